"""The learning rate at each step, in the optimizer, and in a resumed run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.train.support.making import config_of, trainer_for
from train.errors import UsageError
from train.model.optimizer import LearningRate

if TYPE_CHECKING:
    from tests.train.conftest import Start


def rates(steps: int, **chosen: object) -> list[float]:
    schedule = LearningRate(config_of(lr=1.0, **chosen), steps)
    return [schedule.at(step) for step in range(steps)]


def test_constant() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_ends_at_the_full_rate() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_line_reaches_zero_after_the_last_step() -> None:
    assert rates(6, warmup_steps=2, lr_schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_a_half_cosine_is_at_its_half_in_the_middle() -> None:
    found = rates(8, lr_schedule="cosine")
    assert found[0] == 1.0
    assert found[4] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert 0.0 < found[-1] < 0.1


def test_beyond_the_last_step_nothing_moves() -> None:
    assert LearningRate(config_of(lr_schedule="cosine"), 8).at(9) == pytest.approx(0.0, abs=1e-12)


def test_a_run_that_ends_while_it_warms_up_is_refused() -> None:
    with pytest.raises(UsageError, match="--warmup-steps 8: the run has 8 steps"):
        LearningRate(config_of(warmup_steps=8), 8)


def test_the_optimizer_goes_by_it(tmp_path: Path) -> None:
    """Plain SGD moves weights by the rate times the gradient."""
    moved = []
    for steps in (0, 2):
        trainer = trainer_for(
            0, 1, tmp_path / str(steps), optimizer="sgd", weight_decay=0.0, warmup_steps=steps
        )
        _, weight = next(trainer.strategy.named_parameters())
        before = weight.detach().clone()
        trainer.train_step()
        moved.append((weight.detach() - before).norm().item())
    assert moved[0] == pytest.approx(2 * moved[1], rel=1e-3)
    assert moved[0] > 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_the_rate_was(start: Start, tmp_path: Path) -> None:
    flags = ("--steps=20", "--warmup-steps=4", "--lr-schedule=cosine", "--checkpoint-every=10")
    whole = start.single(*flags, run_dir=tmp_path / "whole").finish()
    rates = {line["step"]: line["lr"] for line in whole.metrics() if "lr" in line}
    assert rates[4] == max(rates.values())
    assert rates[20] == min(rates.values())
    broken = tmp_path / "broken"
    shutil.copytree(whole.run_dir, broken)
    (broken / "outcome.json").unlink()
    shutil.rmtree(broken / "checkpoints" / "attempt-0" / "step-00000020")
    resumed = start.single(*flags, run_dir=broken).finish()
    # Steps 11 to 20 stand there twice: the loss of every one is the same again.
    lines = [line for line in resumed.metrics() if "lr" in line]
    assert len(lines) == 30
    assert all(line["lr"] == rates[line["step"]] for line in lines)
    assert resumed.losses() == whole.losses()


@pytest.mark.slow
def test_a_run_whose_rate_falls_cannot_be_made_longer(start: Start, tmp_path: Path) -> None:
    falling = ("--lr-schedule=linear", "--checkpoint-every=0")
    start.single("--steps=3", *falling, run_dir=tmp_path / "run").finish()
    longer = start.single("--steps=5", *falling, run_dir=tmp_path / "run").finish(2)
    assert "steps: 3 there, 5 here" in longer.output()
