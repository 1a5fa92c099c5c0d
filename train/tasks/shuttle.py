"""Statlog Shuttle: 58,000 readings of a space shuttle's radiators, most of them of one class."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..data.order import Batch, permutation
from ..errors import UsageError
from .base import Perceptron

FILE = Path("/usr/lib/R/site-library/mlbench/data/Shuttle.rda")
FILE_VARIABLE = "SHUTTLE_RDA"
TEST_SHARE = 0.3


class Shuttle(Perceptron):
    """Classify nine readings; 45,586 samples are of the first class, 10 of the sixth.

    Training samples: [40600, 9] float of mean 0 and deviation 1, and [40600] int; the test has
    three of ten samples of each class.
    """

    name = "shuttle"
    features = 9
    hidden = 64
    classes = 7

    def __init__(self, file: Path | None = None) -> None:
        """Read the file (default: $SHUTTLE_RDA, or the Debian package's own)."""
        inputs, targets = self._read(file or Path(os.environ.get(FILE_VARIABLE) or FILE))
        # Three tenths of each class, always the same.
        test = torch.zeros(len(targets), dtype=torch.bool)
        for number in range(self.classes):
            members = (targets == number).nonzero().squeeze(1)
            shuffled = members[permutation(len(members), seed=0, epoch=number)]
            test[shuffled[: round(TEST_SHARE * len(members))]] = True
        # Use the training part only: the test set must not leak into the model's inputs.
        mean, std = inputs[~test].mean(dim=0), inputs[~test].std(dim=0)
        inputs = ((inputs - mean) / std).float()
        super().__init__(
            train=Batch(inputs=inputs[~test], targets=targets[~test]),
            test=Batch(inputs=inputs[test], targets=targets[test]),
        )

    def _read(self, path: Path) -> tuple[Tensor, Tensor]:
        """Read features [58000, 9], double, and classes [58000], counted from 0."""
        if not path.exists():
            raise UsageError(
                f"task 'shuttle' needs {path} of the Debian package r-cran-mlbench: "
                "apt-get install r-cran-mlbench; or, without R, apt-get download r-cran-mlbench, "
                f"dpkg -x r-cran-mlbench_*.deb FOLDER, and set {FILE_VARIABLE} to FOLDER{FILE}"
            )
        try:
            # Import this late: rdata imports pandas, which takes a second.
            import rdata
        except ModuleNotFoundError as error:
            raise UsageError("task 'shuttle' needs the package rdata: pip install rdata") from error
        try:
            # rdata warns when it guesses the contents of a damaged file.
            with warnings.catch_warnings(action="error"):
                frame = rdata.read_rda(path, default_encoding="utf-8")["Shuttle"]
            readings = frame[[f"V{number + 1}" for number in range(self.features)]]
            inputs = torch.from_numpy(readings.to_numpy("float64", copy=True))
            return inputs, torch.from_numpy(frame["Class"].cat.codes.to_numpy("int64", copy=True))
        # rdata has no specific exception for damaged files.
        except Exception as error:
            raise UsageError(f"task 'shuttle' cannot use {path}: {error!r}") from error

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count each pair of true and guessed class. Shape [49]."""
        pairs = targets * self.classes + outputs.argmax(dim=-1)
        return torch.bincount(pairs, minlength=self.classes**2)

    def metrics(self, score: Tensor, count: int) -> Mapping[str, float]:
        """Return accuracies over samples, over classes, and for the rarest class alone.

        Always guessing the first class has an accuracy of 0.79, and a balanced one of 1/7.
        """
        confusion = score.view(self.classes, self.classes)
        right, sizes = confusion.diagonal(), confusion.sum(dim=1)
        recall = right / sizes.clamp(min=1)
        return {
            "accuracy": (right.sum() / count).item(),
            "balanced_accuracy": recall[sizes > 0].mean().item(),
            "rarest_class_recall": recall[torch.bincount(self._train.targets).argmin()].item(),
        }
