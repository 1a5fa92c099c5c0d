"""The submission journal: each submission is recorded before the scheduler is called.

A process that is killed during a submission leaves its file behind, unlocked; the next process can
finish the submission.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.runs.records.state_dir import lock_file
from toolkit.text import untrusted

_VERSION = 1
_BYTES = 64 << 20


class UnknownOutcome(SchedulerMissing):
    """The scheduler may or may not have a submission, or parts of it were left behind."""


class Intent:
    """A submission that this process has locked until it is closed."""

    def __init__(self, path: Path, file: IO[Any], data: Mapping[str, Any]) -> None:
        self._path = path
        self._file = file
        self.data = data

    @property
    def begun(self) -> float:
        """When the submission started or was last continued, in seconds since 1970."""
        return os.fstat(self._file.fileno()).st_mtime

    def goes_on(self) -> None:
        """Record that the submission was continued: its time is now."""
        with contextlib.suppress(OSError):
            os.utime(self._file.fileno())

    def done(self) -> None:
        """Remove the file: the submission is complete and recorded, or will never be made."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> "Intent":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # also unlocks it


def begin(folder: Path, name: str, data: Mapping[str, Any]) -> Intent:
    """Record the submission of a run, before the scheduler is called.

    Raises:
        LauncherError: it cannot be written, or another process is submitting this run.
    """
    path = folder / f"{name}.json"
    if path.exists():  # from an earlier, unfinished call
        with claim(folder, name):
            pass
    part = path.with_name(f".{name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = part.open("w", encoding="utf-8")
        lock_file(file)  # the lock belongs to the file, not to its name
        json.dump({"version": _VERSION, **data}, file)
        file.flush()
        part.replace(path)
    except OSError as error:
        raise LauncherError(f"{path} cannot be written: {error.strerror}") from error
    return Intent(path, file, data)


def take(folder: Path, name: str) -> Intent | None:
    """Return this run's unfinished submission; None if there is none or it is locked."""
    path = folder / f"{name}.json"
    try:
        file = untrusted.open_untrusted(path)
    except OSError:
        return None
    data = None
    if lock_file(file):
        with contextlib.suppress(OSError, ValueError):
            data = untrusted.parse_json(file.read(_BYTES))
            if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                data = None  # another process has finished it
    if not isinstance(data, dict) or data.pop("version", None) != _VERSION:
        file.close()
        return None
    return Intent(path, file, data)


def claim(folder: Path, name: str) -> Intent:
    """Return this run's unfinished submission; raise LauncherError if another process has it."""
    if (intent := take(folder, name)) is None:
        raise LauncherError(f"{name} is being submitted by another process just now")
    return intent


def orphans(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the submissions that ended processes have left unfinished."""
    for path in sorted(folder.glob("*.json")):
        if (intent := take(folder, path.stem)) is not None:
            with intent:
                yield intent.data
