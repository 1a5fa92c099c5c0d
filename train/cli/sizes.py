"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

from train.errors import UsageError

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse(text: str) -> int:
    """Read an amount of memory.

    Raises:
        UsageError: it is none.

    >>> parse("80GiB")
    85899345920
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", text.strip())
    size = int(float(match[1]) * (_UNITS | _DECIMAL)[match[2]]) if match else 0
    if size < 1:
        raise UsageError(
            f"--device-memory {text!r} is no amount of memory: write a number and a unit, such as "
            "80GiB"
        )
    return size


def written(size: float) -> str:
    """Write an amount of memory with the unit that suits it.

    >>> written(481280), written(12), written(3 * 2**30)
    ('470.0 KiB', '12 B', '3.0 GiB')
    """
    for unit, factor in reversed(_UNITS.items()):
        if abs(size) >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:.0f} B"
