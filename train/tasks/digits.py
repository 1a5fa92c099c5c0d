"""Handwritten digits: 1,797 real 8 x 8 images that come inside scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.data import Batch, permutation
from train.errors import UsageError

TEST_SAMPLES = 360
HIDDEN = 128


class Digits:
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
        return nn.Sequential(
            nn.Linear(64, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 10),
        )

    def train(self) -> Batch:
        """Give all training samples: [1437, 64] float, [1437] int."""
        return self._train

    def test(self) -> Batch:
        """Give all test samples: [360, 64] float, [360] int."""
        return self._test

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy over the images, in nats."""
        return functional.cross_entropy(outputs, targets, reduction="sum")

    def count(self, targets: Tensor) -> int:
        """Count the images."""
        return len(targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the images whose likeliest class is right."""
        return (outputs.argmax(dim=-1) == targets).sum()
