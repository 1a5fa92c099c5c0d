"""Every test sample counts once, whatever the number of ranks and however uneven their parts."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from tests.train.ranks import on_ranks
from train import tasks
from train.data import Batch, source_of
from train.distributed import Group
from train.environment import Place
from train.evaluation import measure
from train.strategies.base import Strategy, Tally, tally

TASK = "digits"
SAMPLES = 301


class Measuring:
    """The part of a strategy that evaluation needs; the last rank leaves reporting to another."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.task = tasks.load(TASK)
        torch.manual_seed(0)
        self.model = self.task.model()
        self.silent = ranks > 1 and rank == ranks - 1
        self.shards = max(ranks - 1, 1)
        self.shard = min(rank, self.shards - 1)
        self.calls = 0

    def evaluate(self, batch: Batch) -> Tally:
        self.calls += 1
        with torch.no_grad():
            found = tally(self.task, self.model(batch.inputs), batch.targets)
        if self.silent:
            # Like a pipeline's first stage, which sees no outputs.
            return Tally(loss=torch.zeros(()), score=torch.zeros(0), count=0)
        return found


def measured(rank: int, ranks: int) -> tuple[dict[str, float], int]:
    strategy = Measuring(rank, ranks)
    place = Place(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    group = Group(place=place, device=torch.device("cpu"))
    test = source_of(strategy.task.test()).take(torch.arange(SAMPLES))
    return measure(strategy.task, cast(Strategy, strategy), group, test), strategy.calls


def test_uneven_parts_give_the_figures_of_one_process() -> None:
    (alone,) = on_ranks(1, measured, 1)
    strategy = Measuring(0, 1)
    test = source_of(strategy.task.test()).take(torch.arange(SAMPLES))
    whole = strategy.evaluate(test)
    assert alone[0] == pytest.approx(
        {
            "test_accuracy": whole.score[0].item() / SAMPLES,
            "test_loss": whole.loss.item() / SAMPLES,
        },
        rel=1e-6,
    )
    # Two shards of 150 and 151 samples, and a rank that another one reports for.
    several = on_ranks(3, measured, 3)
    assert [calls for _, calls in several] == [1, 1, 1]
    for metrics, _ in several:
        assert metrics == several[0][0]
        assert metrics["test_accuracy"] == alone[0]["test_accuracy"]
        assert metrics["test_loss"] == pytest.approx(alone[0]["test_loss"], rel=1e-6)


def test_a_mean_of_the_ranks_means_is_another_number() -> None:
    """The wrong form: parts of different size, weighed alike."""
    right = torch.cat([torch.ones(150), torch.zeros(151)])
    means = [right[:150].mean(), right[150:].mean()]
    assert sum(means) / 2 != right.mean()
