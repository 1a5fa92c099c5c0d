"""Evaluation: the whole test set, each rank a part of it, none padded."""

from __future__ import annotations

from train.data import Batch, share_of
from train.distributed import Group
from train.strategies import Strategy
from train.tasks import Task

BATCH = 256


def measure(task: Task, strategy: Strategy, group: Group, test: Batch) -> dict[str, float]:
    """Measure mean loss and accuracy. Sums are exchanged, not means: the parts differ in size."""
    start, stop = share_of(len(test), shard=strategy.shard, shards=strategy.shards)
    loss = correct = count = 0.0
    for batch in test.part(start, stop).split(BATCH):
        outputs = strategy.evaluate(batch)
        loss += task.loss(outputs, batch.targets).item()
        correct += task.correct(outputs, batch.targets).item()
        count += task.count(batch.targets)
    loss, correct, count = group.sum([loss, correct, count])
    return {"test_accuracy": correct / count, "test_loss": loss / count}
