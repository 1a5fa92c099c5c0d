"""A file that lines are appended to, such as `metrics.jsonl`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from train.rundir import untrusted

# Lines that follow each other faster than this find the file open, for as long as this at most. A
# network file system shows others the new lines when the file is closed; opening and closing it
# there for every line costs milliseconds.
OPEN_S = 1.0


class Journal:
    """Appends whole lines: a kill tears the last one at most, and only that one is lost."""

    def __init__(self, path: Path) -> None:
        """Name the file; it is made by the first line."""
        self.path = path
        self._handle: int | None = None
        self._opened = self._last = float("-inf")
        # Its length if no other process has written since we did.
        self._length = -1

    def append(self, *lines: str, create: bool = True) -> None:
        """Write lines; `create`: make the file if it is missing.

        Raises:
            OSError: it could not be written.
        """
        now = time.monotonic()
        handle, length = self._open(now, create=create)
        if length != self._length and length and os.pread(handle, 1, length - 1) != b"\n":
            # A killed writer left a torn line: end it, so that only that one is lost.
            lines = ("", *lines)
        # One write for all, for the same reason.
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            written = os.write(handle, data)
        except OSError as error:
            # A handle has no name, which a message needs.
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        # A full disk may have taken a part: the next line will look.
        self._length = length + written if written == len(data) else -1
        slow, self._last = now - self._last > OPEN_S, now
        if slow:
            self.close()

    def close(self) -> None:
        """Let go of the file; the next line opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    __del__ = close

    def _open(self, now: float, *, create: bool) -> tuple[int, int]:
        """Give the open file, and how long it is."""
        if self._handle is not None:
            status = os.fstat(self._handle)
            # Removed meanwhile, it would take lines that no reader can find.
            if now - self._opened <= OPEN_S and status.st_nlink:
                return self._handle, status.st_size
            self.close()
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0)
        # A link would have lines appended to any file of the user's.
        self._handle = untrusted.open_file(self.path, flags)
        self._opened, self._length = now, -1
        return self._handle, os.fstat(self._handle).st_size
