"""What tests cost: `make test` runs a part of the dear ones, `make test-all` all of them."""

from collections.abc import Iterable

import pytest

__all__ = ["others_slow"]


def others_slow(values: Iterable[object], *tried: object) -> list[object]:
    """Return values to parametrize by; `make test` runs only those in `tried`."""
    return [
        value if value in tried else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
