"""Bounded reads of files that somebody else may have written.

Text is decoded as Latin-1, byte by byte: it may be cut anywhere, and may be no text at all.
"""

from typing import Iterator, List

TAIL_BYTES = 65536
"""How much of the end of a log or record is read."""


def read(path: str, most: int = TAIL_BYTES) -> str:
    """Return the beginning of a file; nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode("latin-1")
    except OSError:
        return ""


def last_lines(path: str, most: int = TAIL_BYTES) -> List[str]:
    """Return the last lines of a file; the first of them may be cut."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most))
            text = file.read(most).decode("latin-1")
    except OSError:
        return []
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def lines_of(text: str) -> Iterator[str]:
    """Yield the lines of a text, as programs of the shell count them."""
    return iter(text.split("\n"))
