"""A task whose samples are random: text that is written anew, and moved, each time it is read."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from train.data.order import Batch
from train.tasks.chars import CONTEXT, VOCABULARY, Chars


class Noisy(Chars):
    def train(self) -> Windows:  # type: ignore[override]  # a Dataset where there was a Batch
        return Windows(super().train())


class Windows:
    """Draws from each generator that a Dataset may draw from."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._batch.inputs[index].clone(), self._batch.targets[index]
        inputs[random.randrange(CONTEXT)] = np.random.randint(VOCABULARY)
        # Both: the rank with the targets must draw the same as the rank with the inputs.
        places = int(torch.randint(CONTEXT, ()))
        return inputs.roll(places), targets.roll(places)
