"""Models that count, freeze or type their parts train as in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.train.proof.test_one_process import verdict_of
from tests.train.support import users_models
from tests.train.support.making import config_of, group_of, refusal, trainer_for
from tests.train.support.ranks import on_ranks
from train.parallel.base import Parts
from train.proof.proving import prove


def _losses(rank: int, ranks: int, task: str, chosen: dict[str, Any]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{users_models.__file__}:{task}"
        trainer = trainer_for(rank, ranks, Path(folder), task=path, **chosen)
        trainer.resume()
        found = []
        for _ in range(9):
            trainer.train_step()
            found.append(trainer.progress.metrics["loss"])
        return found


def test_a_parameter_that_forward_freezes_needs_no_gradient() -> None:
    cut, _ = on_ranks(2, _losses, 2, "Freezing", {"strategy": "ddp"})
    (whole,) = on_ranks(1, _losses, 1, "Freezing", {})
    assert cut == pytest.approx(whole, rel=1e-5)


def test_a_count_of_passes_is_no_reason_to_refuse() -> None:
    assert verdict_of(users_models.Annealed(), micro_batch=2, global_batch=8).holds


def _proven(rank: int) -> str:
    config, group = config_of(strategy="fsdp"), group_of(rank, 2)
    layout = config.layout_on(group.rank_info)
    task = users_models.Explicit()
    return prove(Parts(task=task, config=config, layout=layout, group=group)).problem


def test_a_parameter_of_an_explicit_type_is_compared_in_it() -> None:
    assert on_ranks(2, _proven) == ["", ""]


def _refused(rank: int, chosen: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{users_models.__file__}:Dropping"
        return refusal(rank, 4, Path(folder), task=path, **chosen)


def test_checks_before_the_first_step_get_a_sample_whatever_the_shares() -> None:
    chosen = {"global_batch": 9, "micro_batch": 1, "tp": 2, "dp_shard": 2}
    for problem in on_ranks(4, _refused, chosen):
        assert "would drop the same places on all ranks" in problem
