"""Amounts as Kubernetes writes them: `500m`, `64Gi`, `1e3`."""

import re
from fractions import Fraction
from typing import Any

__all__ = ["amount"]

_NUMBER = re.compile(
    r"([+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40}))"
    r"([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?"
)
_BINARY = {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGTPE", start=1)}
_DECIMAL = {unit: 1000**power for power, unit in enumerate("kMGTPE", start=1)}
_SMALL = {unit: Fraction(1, 1000**power) for power, unit in enumerate("mun", start=1)}
_FACTORS: dict[str, int | Fraction] = {"": 1, **_BINARY, **_DECIMAL, **_SMALL}


def amount(value: Any) -> Fraction | None:
    """Return what a quantity stands for; None for other values.

    Source: Kubernetes, apimachinery/pkg/api/resource. A number counts as its digits do.

    >>> amount("1.5Gi") == 1.5 * 2**30, amount("500m"), amount(2), amount("64GiB"), amount("2 Gi")
    (True, Fraction(1, 2), Fraction(2, 1), None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    match = _NUMBER.fullmatch(str(value))
    if match is None:
        return None
    unit = match[2] or ""
    if unit[:1] in ("e", "E") and len(unit) > 1:
        return Fraction(match[1]) * Fraction(10) ** int(unit[1:])
    return Fraction(match[1]) * _FACTORS[unit]
