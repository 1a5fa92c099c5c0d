"""A small training, whose checkpoints the tests use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.support.whole_runs import Ended, run

STEPS = (3, 6)
TASK = "--task=digits"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that two ranks have trained, with checkpoints of two steps."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    flags = ["--strategy=fsdp", "--steps=6", "--checkpoint-every=3", "--global-batch=12"]
    ended = run(2, TASK, *flags, environ={"TRAIN_RUN_DIR": str(run_dir)})
    assert ended.status == 0, ended.output
    return run_dir


Predict = Callable[..., Ended]


@pytest.fixture
def using(trained: Path) -> Predict:
    """Use the trained model on some ranks."""

    def use(ranks: int, *flags: str, run_dir: Path = trained, task: str = TASK) -> Ended:
        return run(ranks, task, f"--run-dir={run_dir}", *flags, environ={})

    return use
