"""A task whose gradients fill several of DDP's buckets: four matrices of 1 MiB each."""

from __future__ import annotations

import torch
from torch import nn

from train.data.order import Batch
from train.tasks.base import Classifier

WIDTH = 512


class Wide(Classifier):
    name = "wide"

    def model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        return nn.Sequential(*(one for layer in layers for one in (layer, nn.ReLU())))

    def train(self) -> Batch:
        return Batch(inputs=torch.zeros(8, WIDTH), targets=torch.zeros(8, dtype=torch.int64))

    def test(self) -> Batch:
        return self.train()
