"""Where `tests/packages.sh` has put the data sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / ".cache/data"
FASHION_MNIST = DATA / "dataset-fashion-mnist/usr/share/datasets/fashion-mnist"
SHUTTLE = DATA / "r-cran-mlbench/usr/lib/R/site-library/mlbench/data/Shuttle.rda"


def there(path: Path) -> Path:
    """Give the path; without its data a test is skipped, but not in CI."""
    if not path.exists():
        reason = f"{path} is missing: run tests/packages.sh"
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the tests on real data: {reason}")
        pytest.skip(reason)
    return path
