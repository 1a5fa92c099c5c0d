"""Evaluation: the whole test set, each rank a part of it, none padded."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from train.data import Batch, Source, share_of
from train.distributed import Group
from train.errors import UsageError
from train.strategies.base import Strategy, Tally
from train.tasks.base import Task

BATCH = 256


def measure(task: Task, strategy: Strategy, group: Group, test: Source) -> dict[str, float]:
    """Measure the mean loss and the task's metrics over the whole test set.

    Sums are exchanged, not means, as the parts differ in size; in double precision, in which the
    counts of any test set are exact.
    """
    rows = [
        _row(strategy.evaluate(batch))
        for batch in parts_of(test, shard=strategy.shard, shards=strategy.shards)
    ]
    mine: list[float] = torch.stack(rows).sum(dim=0).tolist()
    # A rank that another one reports for, such as a pipeline's first stage, need not know how many
    # scores there are.
    width = max(group.gather(len(mine)))
    count, loss, *score = group.sum(mine + [0.0] * (width - len(mine)))
    metrics = _figures(task, torch.tensor(score, dtype=torch.float64), int(count))
    return {f"test_{name}": value for name, value in metrics.items()} | {
        "test_loss": loss / max(count, 1.0)
    }


def _figures(task: Task, score: Tensor, count: int) -> dict[str, float]:
    """Let the task make figures of its sums.

    Raises:
        UsageError: they are none.
    """
    metrics = task.metrics(score, count)
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"task {task.name!r}: metrics() gave {metrics!r}; it must be a dict of numbers by name"
        ) from error


def parts_of(test: Source, *, shard: int, shards: int) -> Iterator[Batch]:
    """Give one rank's share of the test set in batches, as many as every other rank.

    Models that are cut exchange something in each batch, and a rank that had one fewer would leave
    the others waiting. Cut evenly, shares that differ by one sample make equally many batches; one
    can be empty only where there are fewer samples than ranks.
    """
    start, stop = share_of(len(test), shard=shard, shards=shards)
    count = max(math.ceil(len(test) / shards / BATCH), 1)
    cuts = [share_of(stop - start, shard=part, shards=count) for part in range(count)]
    return test.read(torch.arange(start + first, start + last) for first, last in cuts)


def _row(found: Tally) -> Tensor:
    """Put a batch's sums side by side: count, loss, scores. Shape [2 + n], float64."""
    count = found.loss.new_tensor([found.count], dtype=torch.float64)
    return torch.cat([count, found.loss.double().reshape(1), found.score.double().reshape(-1)])
