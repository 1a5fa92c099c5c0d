"""A network of two hidden layers, and how tensor parallelism cuts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from train.tasks.base import check_divisible, classes_can_be_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def perceptron(features: int, hidden: int, classes: int) -> nn.Sequential:
    """Make a network, [batch, features] to [batch, classes], from torch's global generator."""
    return nn.Sequential(
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def perceptron_plan(
    hidden: int, classes: int, *, ranks: int, loss_parallel: bool
) -> Mapping[str, ParallelStyle]:
    """Cut the first matrix by its outputs, the second by its inputs, the last by class.

    So the first exchange comes after the second matrix: between them every rank has its own units.

    Raises:
        UsageError: the hidden units cannot be shared evenly.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    check_divisible("hidden units", hidden, ranks)
    by_class = loss_parallel and classes_can_be_sharded(classes, ranks)
    return {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(),
        "4": ColwiseParallel(
            output_layouts=Shard(-1) if by_class else Replicate(),
            use_local_output=not by_class,
        ),
    }
