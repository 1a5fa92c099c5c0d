"""By default, tasks are learnt well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.train.conftest import Start


@pytest.mark.slow
def test_digits_are_learnt_by_default(start: Start, tmp_path: Path) -> None:
    run = start.ranks(2, "--epochs=10", run_dir=tmp_path / "run").finish()
    metrics = run.outcome()["metrics"]
    assert metrics["test_accuracy"] >= 0.97
    last_line = run.output().splitlines()[-1]
    assert last_line == (
        f"done: step 225/225, loss {metrics['loss']:.4f}, "
        f"test_accuracy {metrics['test_accuracy']:.4f}, test_loss {metrics['test_loss']:.4f} · "
        f"run directory {tmp_path / 'run'}"
    )


@pytest.mark.slow
def test_chars_beat_the_most_frequent_character(start: Start, tmp_path: Path) -> None:
    run = start.single("--task=chars", "--steps=60", run_dir=tmp_path / "run").finish()
    # Always guessing a space is right for one character in three.
    assert run.outcome()["metrics"]["test_accuracy"] > 0.38
