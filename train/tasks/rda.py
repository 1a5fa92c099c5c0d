"""Reads data frames from R's `.rda` files without R.

The format is R's XDR serialisation (R Internals, section "Serialization Formats"), compressed with
xz. Only what a data frame is made of is read: numbers, strings, lists and their attributes.
"""

from __future__ import annotations

import lzma
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Type codes of R objects.
SYMBOL, PAIRLIST, CHARACTERS = 1, 2, 9
LOGICALS, INTEGERS, REALS, STRINGS, LIST = 10, 13, 14, 16, 19
REFERENCE, NULL = 255, 254
NUMBERS: Mapping[int, np.dtype[Any]] = {
    LOGICALS: np.dtype(">i4"),
    INTEGERS: np.dtype(">i4"),
    REALS: np.dtype(">f8"),
}
HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10

Array = NDArray[np.int32] | NDArray[np.float64]


class RdaError(ValueError):
    """The file is no `.rda` file, is damaged, or holds more than a data frame."""


@dataclass(frozen=True, kw_only=True)
class Vector:
    """An R object: a vector of numbers, of strings or of other objects."""

    values: Array | list[object]
    """Its elements."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """What R calls attributes: `names`, `levels` of a factor, `class`."""

    def strings(self, attribute: str) -> list[str]:
        """Give an attribute that is a vector of strings."""
        vector = self.attributes.get(attribute)
        if not isinstance(vector, Vector) or not isinstance(vector.values, list):
            raise RdaError(f"attribute {attribute!r} is missing, or no strings")
        return [str(value) for value in vector.values]

    def column(self, name: str) -> Vector:
        """Give a column of a data frame."""
        names = self.strings("names")
        column = self.values[names.index(name)] if name in names else None
        if not isinstance(column, Vector):
            raise RdaError(f"no column {name!r}, only {', '.join(names)}")
        return column

    def numbers(self) -> Array:
        """Give the elements as numbers; those of a factor count its levels from 1."""
        if isinstance(self.values, list):
            raise RdaError("strings or a list where numbers were expected")
        return self.values


def read(path: Path) -> Mapping[str, object]:
    """Read the objects of a file by name.

    Raises:
        RdaError: names the file and the fault.
        OSError: it cannot be opened.
    """
    try:
        with lzma.open(path) as file:
            content = file.read()
        return _Reader(content).objects()
    except (lzma.LZMAError, EOFError, RecursionError, RdaError) as error:
        raise RdaError(f"{path}: not a data frame that can be read: {error}") from error


class _Reader:
    """Goes through the bytes once, from front to back."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        # Names that later ones refer back to by number.
        self._symbols: list[str] = []

    def objects(self) -> Mapping[str, object]:
        if self._take(7) != b"RDX2\nX\n":
            raise RdaError("no file of R's format RDX2 in XDR")
        # Versions: of the format, of the R that wrote it, of the oldest R that reads it.
        self._take(12)
        pairs = self._object()
        if not isinstance(pairs, dict):
            raise RdaError("no named objects")
        return pairs

    def _take(self, size: int) -> bytes:
        taken = self._content[self._at : self._at + size]
        if size < 0 or len(taken) != size:
            raise RdaError("cut short")
        self._at += size
        return taken

    def _integer(self) -> int:
        (value,) = struct.unpack(">i", self._take(4))
        return int(value)

    def _object(self) -> object:
        flags = self._integer()
        kind = flags & 0xFF
        if kind == NULL:
            return None
        if kind == SYMBOL:
            self._symbols.append(str(self._object()))
            return self._symbols[-1]
        if kind == REFERENCE:
            number = flags >> 8
            if not 0 < number <= len(self._symbols):
                raise RdaError(f"a reference to name {number} of {len(self._symbols)}")
            return self._symbols[number - 1]
        if kind == CHARACTERS:
            size = self._integer()
            return None if size == -1 else self._take(size).decode("utf-8", "replace")
        if kind == PAIRLIST:
            return self._pairs(flags)
        return self._vector(kind, flags)

    def _pairs(self, flags: int) -> dict[str, object]:
        """Read a chain of name and value, whose end is a NULL."""
        pairs: dict[str, object] = {}
        while flags & 0xFF == PAIRLIST:
            if flags & HAS_ATTRIBUTES or not flags & HAS_TAG:
                raise RdaError("a list of values without names")
            name = str(self._object())
            pairs[name] = self._object()
            flags = self._integer()
        if flags & 0xFF != NULL:
            raise RdaError("a list that does not end")
        return pairs

    def _vector(self, kind: int, flags: int) -> Vector:
        values: Array | list[object]
        if kind in NUMBERS:
            size, number = self._integer(), NUMBERS[kind]
            raw = np.frombuffer(self._take(size * number.itemsize), dtype=number)
            values = raw.astype(number.newbyteorder("="))
        elif kind in (STRINGS, LIST):
            values = [self._object() for _ in range(self._integer())]
        else:
            raise RdaError(f"an R object of type {kind}")
        attributes = self._object() if flags & HAS_ATTRIBUTES else {}
        if not isinstance(attributes, dict):
            raise RdaError("attributes without names")
        return Vector(values=values, attributes=attributes)
