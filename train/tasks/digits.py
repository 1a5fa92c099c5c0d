"""Handwritten digits: 1,797 real 8 x 8 images that come inside scikit-learn."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from train.data.order import Batch, permutation
from train.errors import UsageError
from train.tasks.base import Classifier
from train.tasks.perceptron import perceptron, perceptron_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

TEST_SAMPLES = 360
FEATURES = 64
HIDDEN = 128
CLASSES = 10


class Digits(Classifier):
    """Classify a digit's image with two hidden layers."""

    name = "digits"

    def __init__(self) -> None:
        """Load the images, and set the same fifth of them aside for testing with any seed."""
        table = torch.from_numpy(np.loadtxt(_file(), delimiter=","))
        everything = Batch(
            # Grey values 0 to 16 become 0 to 1; the digit itself stands last.
            inputs=table[:, :FEATURES].float() / 16.0,
            targets=table[:, FEATURES].long(),
        )
        shuffled = everything.take(permutation(len(everything), seed=0, epoch=0))
        self._test = shuffled.part(0, TEST_SAMPLES)
        self._train = shuffled.part(TEST_SAMPLES, len(shuffled))

    def identity(self) -> Mapping[str, str | int]:
        """Say what else makes two runs different: the sizes."""
        return {"hidden": HIDDEN, "train_samples": len(self._train)}

    def model(self) -> nn.Module:
        """Make a perceptron, [batch, 64] to [batch, 10]."""
        return perceptron(FEATURES, HIDDEN, CLASSES)

    def train(self) -> Batch:
        """Give all training samples: [1437, 64] float, [1437] int."""
        return self._train

    def test(self) -> Batch:
        """Give all test samples: [360, 64] float, [360] int."""
        return self._test

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        """Cut the matrices by their outputs, by their inputs, and by class."""
        return perceptron_plan(HIDDEN, CLASSES, ranks=ranks, loss_parallel=loss_parallel)


def _file() -> Path:
    """Find the table of `sklearn.datasets.load_digits`, without the two seconds of importing it."""
    spec = importlib.util.find_spec("sklearn")
    path = spec and spec.origin and Path(spec.origin).parent / "datasets/data/digits.csv.gz"
    if not path or not path.is_file():
        raise UsageError("task 'digits' needs the package scikit-learn: pip install scikit-learn")
    return path
