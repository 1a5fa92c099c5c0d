"""Untrusted files of a run directory: read as data, within limits.

A checkpoint or a record may come from another user or another cluster. Such a file is opened
without following a link and without waiting for a writer, must be a regular file, and is read up to
a limit. Every function raises an OSError for a problem with the file, such as `Refused` for a link,
and a ValueError for a problem with its text, such as a value of another type.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

JSON_BYTES = 16 << 20
"""A manifest takes 130 bytes per rank, a state some dozens per frozen parameter."""
MOST = 2**53
"""The largest whole number that every reader of JSON holds exactly."""
_LINE_BYTES = 1 << 20
_LINES_BYTES = 256 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Refused(OSError):
    """A file that exists but is refused: a link, a device, or a file over the size limit."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_file(path: Path, flags: int = os.O_RDONLY, *, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor; `folder`: descriptor of its folder."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Open without blocking: opening a pipe without a writer would hang.
        handle = os.open(path if folder is None else path.name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        if error.errno == errno.ELOOP:
            raise Refused(path, "is a link, which is not followed") from None
        if error.errno == errno.ENXIO:
            raise Refused(path, "is a socket or a pipe, not a regular file") from None
        raise
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise Refused(path, f"is {_KINDS.get(kind, 'something else')}, not a regular file")
    return handle


def open_folder(path: Path) -> int:
    """Open a folder and return its descriptor."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        why = "is a link, which is not followed" if path.is_symlink() else "is not a folder"
        raise Refused(path, why) from None


def read_bytes(path: Path, *, limit: int = JSON_BYTES) -> bytes:
    """Return the contents of a file of at most `limit` bytes."""
    with os.fdopen(open_file(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise Refused(path, f"has more than {limit} bytes")
    return content


def read_object(path: Path) -> dict[str, object]:
    """Return the JSON object that a file holds."""
    return json_object(read_bytes(path))


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the JSON objects of a file with one per line; skip other lines.

    A file that is missing, or not a regular file, yields none.
    """
    try:
        handle = open_file(path)
    except (FileNotFoundError, NotADirectoryError, Refused):
        return
    with os.fdopen(handle, "rb") as file:
        while file.tell() < _LINES_BYTES and (line := file.readline(_LINE_BYTES)):
            try:
                yield json_object(line)
            except ValueError:
                continue


def json_object(text: bytes) -> dict[str, object]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return mapping(value)


def is_of_version(record: Mapping[str, object], version: int) -> bool:
    """Whether a record has this version; a record without one has the first."""
    return record.get("version", 1) == version


def shown_version(record: Mapping[str, object]) -> str:
    """Return the version of a record for a message."""
    version = record.get("version")
    good = isinstance(version, int) and abs(version) <= MOST
    return f"version {version}" if good else "no known version"


def mapping(value: object) -> dict[str, object]:
    """Return a value that is a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, not {_short(value)}")
    return value


def whole(value: object, *, least: int = 0) -> int:
    """Return a value that is a whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"expected a whole number from {least} to {MOST}, not {_short(value)}")
    return value


def number(value: object) -> float:
    """Return a value that is a number; NaN for null, the notation for numbers not finite."""
    if value is None:
        return float("nan")
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"expected a number, not {_short(value)}")


def text(value: object) -> str:
    """Return a value that is a string."""
    if not isinstance(value, str):
        raise ValueError(f"expected a string, not {_short(value)}")
    return value


def printable(value: str) -> str:
    """Make a string safe for a terminal: quoted, if anything in it must be escaped."""
    return value if value.isprintable() else repr(value)


def _short(value: object) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a JSON object"
    if isinstance(value, int) and abs(value) > MOST:
        return "a larger one" if value > 0 else "a smaller one"  # repr() refuses 5000 digits
    shown = "null" if value is None else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
