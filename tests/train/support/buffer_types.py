"""Models with buffers of every type, moved by training or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train.data.order import Batch
from train.tasks.base import Task

TYPES = (
    "complex128", "complex64", "float64", "float32", "bfloat16", "float16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip
WIDTH = 6


def filled(name: str) -> Tensor:
    """Return 1 to 4 in a type, or the nearest values."""
    return torch.arange(1.0, 5.0).to(getattr(torch, name)).reshape(2, 2)


class Turned(nn.Module):
    """Turns pairs of features by angles: a rotary table, and a mean in complex numbers."""

    table: Tensor
    mean: Tensor
    conjugate: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(WIDTH / 2, dtype=torch.float64)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mean", torch.zeros(WIDTH // 2, dtype=torch.complex128))
        self.register_buffer("conjugate", torch.polar(torch.ones_like(angles), -angles).conj())

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(inputs.double().reshape(len(inputs), WIDTH // 2, 2))
        if self.training and len(pairs):
            self.mean += 0.25 * (pairs.detach().mean(dim=0) - self.mean)
        turned = pairs * self.table * self.conjugate
        return torch.view_as_real(turned if self.training else turned - self.mean).flatten(-2)


class Buffers(Task):
    """Classify the direction of a vector."""

    name = "buffers"

    def model(self) -> nn.Sequential:
        model = nn.Sequential(
            Turned(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
            nn.Tanh(), nn.Linear(WIDTH, 2, dtype=torch.float64),
        )  # fmt: skip
        for name in TYPES:
            model[0].register_buffer(f"of_{name}", filled(name))
        return model

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)
        return Batch(inputs=inputs, targets=inputs[:, :2] > 0)

    def test(self) -> Batch:
        return self.train()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.double()).square().sum()


class Unstorable(Buffers):
    """Has buffers that no checkpoint can hold; those that it need not hold do not count."""

    def model(self) -> nn.Sequential:
        model = super().model()
        levels = torch.ones(3, dtype=torch.uint8).view(torch.bits8)
        model[1].register_buffer("levels", levels)
        model[1].register_buffer("spread", torch.ones(1).expand(3))
        model[1].register_buffer("sparse", torch.eye(3).to_sparse())
        model[1].register_buffer("levels_again", levels, persistent=False)
        return model
