"""Strict JSON: what every reader takes, fast where there are only numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

_ENCODER = json.JSONEncoder(allow_nan=False)


def dump(record: object, indent: int | None = None) -> str:
    """Write a record: numbers that JSON does not have become null."""
    encoder = _ENCODER if indent is None else json.JSONEncoder(indent=indent, allow_nan=False)
    try:
        return encoder.encode(record)
    except (TypeError, ValueError):
        # Rare, so that only these pay for being walked through.
        return encoder.encode(_strict(record))


def dump_numbers(record: Mapping[str, object]) -> str:
    """Write the same text in half the time where there are only numbers, as after every step."""
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
