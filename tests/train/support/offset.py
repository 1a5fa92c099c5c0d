"""A task whose inputs lie far from 0, and are normalised by the model: near 1000, bf16 counts by 4.

A sequence model, so that every strategy can cut it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from train.data.order import Batch
from train.tasks.base import Task
from train.tasks.chars import Block, Sizes

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

FEATURES, WIDTH, TIME, SAMPLES = 8, 32, 8, 64


class Centred(nn.Module):
    """Takes the mean off, and projects."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(FEATURES, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.project(inputs - 1000)
        return hidden


class Read(nn.Module):
    """Normalises and reads one number off each position."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        numbers: Tensor = self.project(self.norm(hidden))
        return numbers


class Offset(Task):
    """Predict the mean of a position's features."""

    name = "offset"

    def model(self) -> nn.Module:
        sizes = Sizes(context=TIME, width=WIDTH, heads=4, layers=2)
        return nn.Sequential(Centred(), Block(sizes), Block(sizes), Read())

    def train(self) -> Batch:
        return made(SAMPLES, seed=0)

    def test(self) -> Batch:
        return made(SAMPLES // 4, seed=1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.float() - targets).square().sum()

    def count(self, targets: Tensor) -> int:
        return targets.numel()

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
        )

        time = Shard(1)
        plan: dict[str, ParallelStyle] = {
            "0.project": RowwiseParallel(input_layouts=Replicate(), output_layouts=time),
            "3.norm": SequenceParallel(),
            "3.project": RowwiseParallel(input_layouts=time, output_layouts=Replicate()),
        }
        for block in ("1", "2"):
            plan |= {
                f"{block}.attention_norm": SequenceParallel(),
                f"{block}.attention_in": ColwiseParallel(input_layouts=time),
                f"{block}.attention_out": RowwiseParallel(output_layouts=time),
                f"{block}.feed_norm": SequenceParallel(),
                f"{block}.feed.0": ColwiseParallel(input_layouts=time),
                f"{block}.feed.2": RowwiseParallel(output_layouts=time),
            }
        return plan


def made(count: int, *, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, TIME, FEATURES, generator=generator)
    return Batch(inputs=1000 + noise, targets=noise.mean(-1, keepdim=True))
