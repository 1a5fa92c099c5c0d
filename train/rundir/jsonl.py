"""Strict JSON, and appending lines of it to files: `events.jsonl` and `metrics.jsonl`.

A line that cannot be written raises an OSError.
"""

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import untrusted

OPEN_S = 1.0
"""Time for which the file stays open for further lines. A network file system shows new lines to
others when the file is closed; opening and closing it there for every line costs milliseconds."""
TOGETHER_S = 0.1
"""Metrics that follow each other faster than this are written together: single writes would cost a
tenth of a short step. A kill loses at most this much; metrics of longer steps are not delayed.
"""
WHOLE_BYTES = 200 << 20
"""Length from which metrics are thinned, about a million steps: ten million steps fill no disk."""
THINNED_S = 1.0
"""When thinned, one record represents all steps of this period: the last one, with a `count`."""


def dump(record: object, indent: int | None = None) -> str:
    """Format a record as JSON that every reader accepts: non-finite numbers become null."""
    try:
        return json.dumps(record, indent=indent, allow_nan=False)
    except (TypeError, ValueError):
        # Only these rare records need a walk through their values.
        return json.dumps(_strict(record), indent=indent, allow_nan=False)


def as_recorded(record: Mapping[str, object]) -> dict[str, Any]:
    """Return a record as its file holds it: a tuple is a list there."""
    read: dict[str, Any] = json.loads(dump(record))
    return read


def dump_numbers(record: Mapping[str, object]) -> str:
    """Format a record of numbers like `dump()` in half the time, as needed after every step."""
    fields = []
    for name, value in record.items():
        kind = type(value)
        plain = kind is int or (kind is float and math.isfinite(value))  # type: ignore[arg-type]
        if not (plain and name.isidentifier() and name.isascii()):
            return dump(record)
        fields.append(f'"{name}": {value!r}')
    return "{" + ", ".join(fields) + "}"


def _strict(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {str(key): _strict(item) for key, item in value.items()}
        case list() | tuple():
            return [_strict(item) for item in value]
        case _:
            return value


class Journal:
    """Appends whole lines: a kill can only tear, and thus lose, the last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._opened = self._last = float("-inf")
        # The file's length, unless another process has written since.
        self._length = -1
        # A checkpoint's thread writes events, too.
        self._one_at_a_time = threading.RLock()

    def append(self, *lines: str, create: bool = True) -> int:
        """Write lines, and return the new length of the file in bytes.

        Args:
            lines: The lines, without their ends.
            create: Whether to make the file if it is missing.
        """
        with self._one_at_a_time:
            return self._append(lines, create=create)

    def _append(self, lines: Sequence[str], *, create: bool) -> int:
        now = time.monotonic()
        handle, length = self._open(now, create=create)
        if length != self._length and length and os.pread(handle, 1, length - 1) != b"\n":
            # A killed writer left a torn line: end it, so that no other line is lost.
            lines = ("", *lines)
        # One write for all, for the same reason.
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            written = os.write(handle, data)
        except OSError as error:
            # The error of a handle has no file name, but its message needs one.
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        # A full disk may have accepted only a part: the next append checks the end of the file.
        self._length = length + written if written == len(data) else -1
        slow, self._last = now - self._last > OPEN_S, now
        if slow:
            self.close()
        return length + written

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    __del__ = close

    def _open(self, now: float, *, create: bool) -> tuple[int, int]:
        if self._handle is not None:
            status = os.fstat(self._handle)
            # Lines written to a file that was removed meanwhile would be lost.
            if now - self._opened <= OPEN_S and status.st_nlink:
                return self._handle, status.st_size
            self.close()
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0)
        # Not through a link, which may lead to any file of the user's.
        self._handle = untrusted.open_file(self.path, flags)
        self._opened, self._length = now, -1
        return self._handle, os.fstat(self._handle).st_size


class MetricsLog:
    """Writes a line per step, at once or a moment later: cheap enough for steps of 1 ms."""

    def __init__(self, path: Path, head: Mapping[str, object]) -> None:
        self._journal, self._head = Journal(path), head
        # Two threads share the queue, and neither replaces it, so no line is lost between them.
        # Each entry: time, record, and number of steps in the record.
        self._waiting: deque[tuple[float, Mapping[str, object], int]] = deque()
        self._written = float("-inf")
        self._thins = False
        self._one_at_a_time = threading.RLock()
        self._held_back = threading.Event()
        self._keeper: threading.Thread | None = None

    def note(self, record: Mapping[str, object]) -> None:
        """Write a record, or keep it for the next one to come."""
        now = time.time()
        self._waiting.append((now, record, 1 + self._replaced_by(record)))
        # A clock that was set back does not hold lines back.
        if not 0 <= now - self._written < self._pause_s():
            self.flush()
        elif len(self._waiting) == 1:
            # A thread writes the line if no other follows, as before a step that hangs.
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="metrics", daemon=True)
                self._keeper.start()
            self._held_back.set()

    def _replaced_by(self, record: Mapping[str, object]) -> int:
        """Remove the waiting record that a step's record replaces, and count its steps."""
        if not self._thins or "loss" not in record:
            return 0
        with suppress(IndexError):  # none waits, or the thread has just taken it
            last = self._waiting.pop()
            if "loss" in last[1]:
                return last[2]
            self._waiting.append(last)
        return 0

    def flush(self, *, create: bool = True) -> None:
        """Write the records that wait; `create`: make the file if it is missing."""
        with self._one_at_a_time:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not waiting:
                return
            self._written = time.time()
            lines = (
                dump_numbers(
                    {
                        **self._head,
                        "time": when,
                        **record,
                        **({"count": count} if count > 1 else {}),
                    }
                )
                for when, record, count in waiting
            )
            self._thins = self._journal.append(*lines, create=create) >= WHOLE_BYTES

    def _pause_s(self) -> float:
        """How long records may wait for each other."""
        return THINNED_S if self._thins else TOGETHER_S

    def _keep(self) -> None:
        while self._held_back.wait():
            self._held_back.clear()
            time.sleep(self._pause_s())
            # The next line from training reports the error. If a user removes the directory
            # meanwhile, no new file must appear in it.
            with suppress(OSError):
                self.flush(create=False)
