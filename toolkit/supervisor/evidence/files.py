"""Bounded reads of untrusted files.

Text is decoded as Latin-1, byte by byte: it may be cut anywhere, and may be binary data.
"""

import os
import stat
from typing import BinaryIO, List, Optional

TAIL_BYTES = 65536
"""The number of bytes to read from the end of a log or record."""


def open_regular(path: str) -> BinaryIO:
    """Open a file for reading; never block, not even on a named pipe.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def read(path: str, most: int = TAIL_BYTES) -> str:
    """Return the beginning of a file; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(most).decode("latin-1")
    except OSError:
        return ""


def last_lines(path: str, most: int = TAIL_BYTES, end: Optional[int] = None) -> List[str]:
    """Return the last lines of a file, or of its part before `end`; the first may be cut."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2) if end is None else end
            file.seek(max(0, size - most))
            text = file.read(most).decode("latin-1")
    except OSError:
        return []
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]
