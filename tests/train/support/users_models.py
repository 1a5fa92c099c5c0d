"""Models with a count of passes, parameters of an explicit type, and parts that they freeze."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.data.order import Batch
from train.tasks.base import Classifier

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class OnNoise(Classifier):
    def train(self) -> Batch:
        drawn = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 4, generator=drawn)
        return Batch(inputs=inputs, targets=torch.randint(0, 3, (64,), generator=drawn))

    test = train


class AnnealedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        scores: Tensor = self.net(x) * min(1.0, self.calls / 8)
        return scores


class Annealed(OnNoise):
    def model(self) -> nn.Module:
        return AnnealedModel()


class FreezingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.n: Tensor
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n += 1
            if self.n >= 6:
                self.a.requires_grad_(False)
        scores: Tensor = self.b(self.a(x).tanh())
        return scores


class Freezing(OnNoise):
    def model(self) -> nn.Module:
        return FreezingModel()


class ExplicitModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.pos = nn.Parameter(torch.zeros(8, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.b((self.a(x) + self.pos).tanh())
        return scores


class Explicit(OnNoise):
    def model(self) -> nn.Module:
        return ExplicitModel()


class Drop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x.relu(), 0.5, self.training)


class Dropping(OnNoise):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Drop(), nn.Linear(8, 3))

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> dict[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"0": ColwiseParallel(), "2": RowwiseParallel()}
