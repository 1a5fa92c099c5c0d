"""Handwritten digits: 1,797 real 8 x 8 images that come inside scikit-learn."""

import importlib.util
from pathlib import Path

import numpy as np
import torch

from ..data.order import Batch, permutation
from ..errors import UsageError
from .base import Perceptron

TEST_SAMPLES = 360


class Digits(Perceptron):
    """Classify a digit's image.

    Training samples: [1437, 64] float and [1437] int; test samples: [360, 64] and [360].
    """

    name = "digits"
    features = 64
    hidden = 128
    classes = 10

    def __init__(self) -> None:
        """Load the images; the test set is the same fifth of them for any seed."""
        # Read the table of `sklearn.datasets.load_digits`; its import would take two seconds.
        spec = importlib.util.find_spec("sklearn")
        path = spec and spec.origin and Path(spec.origin).parent / "datasets/data/digits.csv.gz"
        if not path or not path.is_file():
            raise UsageError(
                "task 'digits' needs the package scikit-learn: pip install scikit-learn"
            )
        table = torch.from_numpy(np.loadtxt(path, delimiter=","))
        everything = Batch(
            # Grey values 0 to 16 become 0 to 1; the last column is the digit.
            inputs=table[:, : self.features].float() / 16.0,
            targets=table[:, self.features].long(),
        )
        shuffled = everything.take(permutation(len(everything), seed=0, epoch=0))
        super().__init__(
            train=shuffled.part(TEST_SAMPLES, len(shuffled)), test=shuffled.part(0, TEST_SAMPLES)
        )
