"""A task with each kind of weight: read by multiplications only, by others, by both, by none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train.data.order import Batch
from train.tasks.base import Task

WIDTH, TIME, SAMPLES = 16, 6, 32
# What ranks may cast before they gather it, by the first part of its name; of `normed`, the bias.
ONLY_MULTIPLIED = {"conv", "attention", "linear", "sometimes", "normed"}
OTHERS = {"scale", "norm", "own", "embed", "normed"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full([1], 1.003))
        self.embed = nn.Embedding(2, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        # Its weights are looked up as well.
        self.head = nn.Linear(WIDTH, 2, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.norm.weight, 1, 0.1)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.embed(symbols) * self.scale
        hidden = hidden + self.conv(hidden.mT).mT
        hidden = self.norm(hidden)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + self.normed(self.linear(hidden)) @ self.own
        if symbols[0, 0] == 0:
            hidden = hidden + self.sometimes(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Multiplied(Task):
    """Predict each symbol again."""

    name = "multiplied"

    def model(self) -> nn.Module:
        return Model()

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        symbols = torch.randint(0, 2, (SAMPLES, TIME), generator=generator)
        return Batch(inputs=symbols, targets=symbols)

    def test(self) -> Batch:
        return self.train()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction="sum"
        )

    def count(self, targets: Tensor) -> int:
        return targets.numel()
