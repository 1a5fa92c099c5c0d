"""Quantities as servers store them: in the canonical form of apimachinery's resource.Quantity."""

import re
from fractions import Fraction
from typing import Any

from tests.fakes.kubernetes.wire import Object

__all__ = ["with_canonical_quantities"]

_LISTS = ("requests", "limits", "capacity", "hard", "allocatable")
_BINARY = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
_DECIMAL = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"]


def with_canonical_quantities(thing: Object) -> Object:
    """Return an object, its lists of resources and limits of volumes in canonical form."""
    canonical: Object = _canonical(thing)
    return canonical


def _canonical(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        if name in _LISTS:
            return {key: _quantity(amount) for key, amount in value.items()}
        return {key: _canonical(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return _quantity(value) if name == "sizeLimit" else value


def _quantity(value: Any) -> Any:
    match = re.fullmatch(r"([0-9.]+)([KMGTPE]i|[numkMGTPE])?", str(value))
    if match is None:  # an exponent, a sign: nobody writes them here
        return value
    unit = match[2] or ""
    if unit in _BINARY[1:]:
        amount = Fraction(match[1]) * 1024 ** _BINARY.index(unit)
        if amount >= 1024:
            return _shortest(amount, 1024, _BINARY)
    else:
        amount = Fraction(match[1]) * Fraction(1000) ** (_DECIMAL.index(unit) - 3)
    return _shortest(amount * 1000**3, 1000, _DECIMAL)


def _shortest(amount: Fraction, step: int, units: list[str]) -> str:
    """Return a whole number of the largest unit that keeps the amount exactly."""
    if not amount:
        return "0"
    at = 0
    while amount % step == 0 and at + 1 < len(units):
        amount, at = amount / step, at + 1
    return f"{amount}{units[at]}"
