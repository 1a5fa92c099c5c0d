"""Reads untrusted files and answers as data, within limits.

Run directories on a shared file system, files of a login node and answers of a server may be
forged. Such a file is opened without following links and without waiting for a writer, must be a
regular file, and is read up to a limit. A violation is an OSError (`RefusedFile`), as for a missing
file, so a caller that can do without the file continues.
"""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

JSON_BYTES = 16 << 20
"""The largest file or answer that is read whole, in bytes."""

_ENTRIES = 100_000
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking: opening a pipe without a writer would hang.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | _NO_LINK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK


class RefusedFile(OSError):
    """A file that exists but must not be read: a link, a device, or a file that is too large."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))


def open_untrusted(path: Path | str, *, below: Path | None = None) -> BinaryIO:
    """Open a regular file for reading, without following links.

    With a folder `below`, no part of the path below this folder may be a link; without it, only the
    file itself must not be a link.

    Raises:
        RefusedFile: the file is a link, not a regular file, or not below that folder.
        OSError: the file does not exist or cannot be read.
    """
    return os.fdopen(_opened(path, below, _FILE), "rb")


def _opened(path: Path | str, below: Path | None, flags: int) -> int:
    text = os.fspath(path)
    if "\0" in text:
        raise RefusedFile("?", "a name that no file can have")
    handle = -1
    try:
        handle = os.open(text, flags) if below is None else _walked(text, below, flags)
        info = os.fstat(handle)
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        if error.errno in (errno.ELOOP, errno.ENXIO) or (
            error.errno == errno.ENOTDIR and os.path.islink(text)  # noqa: PTH114
        ):
            raise RefusedFile(path, "is a link or a socket, which is not followed") from None
        raise
    required = stat.S_IFDIR if flags & os.O_DIRECTORY else stat.S_IFREG
    if (kind := stat.S_IFMT(info.st_mode)) != required:
        os.close(handle)
        raise RefusedFile(path, f"is {_KINDS.get(kind, 'not a regular file')}")
    return handle


def _walked(path: str, below: Path, flags: int) -> int:
    """Open each part of the path in turn, relative to its folder; none may be a link."""
    start = os.fspath(below)
    if path != start and not path.startswith(f"{start.rstrip('/')}/"):
        raise RefusedFile(path, f"is not below {below}")
    parts = [part for part in path[len(start) :].split("/") if part not in ("", ".")]
    if ".." in parts:
        raise RefusedFile(path, f"is not below {below}")
    folder = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not parts:
        return folder
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], flags, dir_fd=folder)
    finally:
        os.close(folder)


def read_bytes(path: Path | str, *, limit: int = JSON_BYTES, below: Path | None = None) -> bytes:
    """Return a file's bytes, at most `limit`; a larger file is refused.

    The arguments and errors are otherwise those of `open_untrusted()`.
    """
    handle = _opened(path, below, _FILE)
    try:
        parts, size = [], 0
        while chunk := os.read(handle, 1 << 16):
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise RefusedFile(path, f"has more than {limit} bytes")
    finally:
        os.close(handle)
    return b"".join(parts)


def read_text(path: Path | str, *, limit: int = JSON_BYTES, below: Path | None = None) -> str:
    """Return a file's text, read by `read_bytes()`; bytes that are not UTF-8 become U+FFFD."""
    return read_bytes(path, limit=limit, below=below).decode("utf-8", "replace")


def read_json(path: Path | str, *, limit: int = JSON_BYTES, below: Path | None = None) -> Any:
    """Return the value in a JSON file, by `read_bytes()` and `parse_json()`."""
    return parse_json(read_bytes(path, limit=limit, below=below))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, without unpaired surrogates, which UTF-8 cannot encode.

    Raises:
        ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        # json itself would also decode bytes to unpaired surrogates.
        decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        value = json.loads(decoded)
        return _whole_characters(value) if "\\u" in decoded or not decoded.isascii() else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(one) for one in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(one) for key, one in value.items()}
    return value


def lines_of_json(path: Path | str, *, limit: int = JSON_BYTES) -> Iterator[Any]:
    """Yield the value of each line of a file; lines that are incomplete or not JSON are skipped.

    A file that does not exist or cannot be read has no lines.
    """
    try:
        content = read_bytes(path, limit=limit)
    except OSError:
        return
    for line in io.BytesIO(content):
        if line != b"\n":
            with contextlib.suppress(ValueError):
                yield parse_json(line)


def stream_json(path: Path | str, *, limit: int, line_limit: int) -> Iterator[Any]:
    """Yield the JSON object of each line, without loading the whole file into memory.

    At most `limit` bytes are read. Lines that are not an object, that are incomplete or that have
    more than `line_limit` bytes are skipped. A file that cannot be read has no lines.
    """
    try:
        file = open_untrusted(path)
    except OSError:
        return
    with file:
        whole_line = True
        while limit > 0 and (line := file.readline(min(line_limit, limit))):
            limit -= len(line)
            begins, whole_line = whole_line, line.endswith(b"\n")
            # An error of json costs ten times as much as this check of the line's end.
            if begins and whole_line and line.rstrip().endswith(b"}"):
                with contextlib.suppress(ValueError):
                    yield parse_json(line)


def write_bytes(
    path: Path | str, content: bytes, *, append: bool = False, anew: bool = False
) -> None:
    """Write a file that only its owner can write, whatever the umask; a link is not followed.

    Args:
        path: The file.
        content: The bytes to write.
        append: Whether to append to the existing content.
        anew: Whether the file must not exist yet.

    Raises:
        OSError: the file cannot be written, is a link, or exists and should not.
    """
    how = os.O_EXCL if anew else os.O_APPEND if append else os.O_TRUNC
    # Non-blocking: opening a pipe without a reader would hang.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | _NO_LINK | how
    with os.fdopen(os.open(path, flags, 0o644), "wb", buffering=0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]


class FolderEntry(NamedTuple):
    """A file or folder inside a folder."""

    name: str
    """The name, without the folder."""

    is_folder: bool
    """Whether it is a folder, not a link to one."""

    is_file: bool
    """Whether it is a regular file, not a link to one."""


def entries(path: Path | str, *, below: Path | None = None) -> list[FolderEntry]:
    """Return the entries of a folder by name, at most 100,000.

    A folder that cannot be read, or is a link, has none. `below` is as for `open_untrusted()`.
    """
    try:
        handle = _opened(path, below, _FOLDER)
    except OSError:
        return []
    try:
        with os.scandir(handle) as scanned:
            some = [
                FolderEntry(
                    name=one.name,
                    is_folder=one.is_dir(follow_symlinks=False),
                    is_file=one.is_file(follow_symlinks=False),
                )
                for one in itertools.islice(scanned, _ENTRIES)
            ]
    except OSError:
        return []
    finally:
        os.close(handle)
    return sorted(some)


def mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """Return a JSON array; an empty one for any other value."""
    return value if isinstance(value, list) else []


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters; the end of a longer one becomes `…`.

    >>> shortened("3.1415926", 5), shortened("3.14", 5)
    ('3.14…', '3.14')
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def whole(value: Any, *, least: int = 0, most: int = 2**53) -> int | None:
    """Return a whole number within bounds; None for any other value."""
    good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return value if good else None


def finite(value: Any) -> float | None:
    """Return a number that is neither infinite nor NaN; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def moment(value: Any) -> float | None:
    """Return a time in seconds since 1970; None for any other value.

    From the year 3000 on, not every platform can format a time.
    """
    seconds = finite(value)
    return seconds if seconds is not None and 0 <= seconds < 32503680000 else None
