"""Handwritten digits: 1,797 real 8 x 8 images that come inside scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from train.data import Batch, permutation
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
        """Load the images and set the same fifth of them aside for testing, whatever the seed."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UsageError(
                "task 'digits' needs the package scikit-learn: pip install scikit-learn"
            ) from error
        images, labels = load_digits(return_X_y=True)
        everything = Batch(
            # Grey values 0 to 16 become 0 to 1.
            inputs=torch.from_numpy(images).float() / 16.0,
            targets=torch.from_numpy(labels).long(),
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
