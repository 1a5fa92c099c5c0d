"""A task of our own: small pictures, convolutions, and batch normalisation, which has buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train.data.order import Batch
from train.tasks import Classifier


class Pictures(Classifier):
    """Classify four patterns; pictures differ much in brightness, and so do slices of them."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(4 * 4 * 4, 4)),
        )

    def train(self) -> Batch:
        return self._pictures(240, seed=1)

    def test(self) -> Batch:
        return self._pictures(60, seed=2)

    @staticmethod
    def _pictures(count: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        targets = torch.arange(count) % 4
        patterns = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        brightness: Tensor = 3.0 * torch.rand(count, 1, 1, 1, generator=generator)
        noise = torch.randn(count, 1, 6, 6, generator=generator)
        return Batch(inputs=brightness * patterns[targets] + noise, targets=targets)
