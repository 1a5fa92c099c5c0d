"""Statlog Shuttle: 58,000 readings of a space shuttle's radiators, most of them of one class."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from train.data.order import Batch, permutation
from train.errors import UsageError
from train.tasks import rda
from train.tasks.base import Classifier
from train.tasks.perceptron import perceptron, perceptron_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

FILE = Path("/usr/lib/R/site-library/mlbench/data/Shuttle.rda")
FILE_VARIABLE = "SHUTTLE_RDA"
FEATURES = 9
CLASSES = 7
HIDDEN = 64
TEST_SHARE = 0.3


class Shuttle(Classifier):
    """Classify nine readings; 45,586 samples are of the first class, 10 of the sixth."""

    name = "shuttle"

    def __init__(self, file: Path | None = None) -> None:
        """Read the file (default: $SHUTTLE_RDA, or the Debian package's own)."""
        inputs, targets = _read(file or Path(os.environ.get(FILE_VARIABLE) or FILE))
        test = _stratified(targets)
        # By the training part alone: the test must not leak into what the model is given.
        mean, std = inputs[~test].mean(dim=0), inputs[~test].std(dim=0)
        inputs = ((inputs - mean) / std).float()
        self._train = Batch(inputs=inputs[~test], targets=targets[~test])
        self._test = Batch(inputs=inputs[test], targets=targets[test])

    def identity(self) -> Mapping[str, str | int]:
        """Say what else makes two runs different: the sizes."""
        return {"hidden": HIDDEN, "train_samples": len(self._train)}

    def model(self) -> nn.Module:
        """Make a perceptron, [batch, 9] to [batch, 7]."""
        return perceptron(FEATURES, HIDDEN, CLASSES)

    def train(self) -> Batch:
        """Give all training samples: [40600, 9] float of mean 0 and deviation 1, [40600] int."""
        return self._train

    def test(self) -> Batch:
        """Give all test samples, three of ten of each class."""
        return self._test

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count each pair of true and guessed class. Shape [49]."""
        pairs = targets * CLASSES + outputs.argmax(dim=-1)
        return torch.bincount(pairs, minlength=CLASSES**2)

    def metrics(self, score: Tensor, count: int) -> Mapping[str, float]:
        """Give accuracies over samples, over classes, and for the rarest class alone.

        Always guessing the first class has an accuracy of 0.79, and a balanced one of 1/7.
        """
        confusion = score.view(CLASSES, CLASSES)
        right, sizes = confusion.diagonal(), confusion.sum(dim=1)
        recall = right / sizes.clamp(min=1)
        return {
            "accuracy": (right.sum() / count).item(),
            "balanced_accuracy": recall[sizes > 0].mean().item(),
            "rarest_class_recall": recall[torch.bincount(self._train.targets).argmin()].item(),
        }

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        """Cut the matrices by their outputs, by their inputs, and by class."""
        return perceptron_plan(HIDDEN, CLASSES, ranks=ranks, loss_parallel=loss_parallel)


def _stratified(targets: Tensor) -> Tensor:
    """Choose three tenths of each class for testing, always the same. Shape [n], bool."""
    chosen = torch.zeros(len(targets), dtype=torch.bool)
    for number in range(CLASSES):
        members = (targets == number).nonzero().squeeze(1)
        shuffled = members[permutation(len(members), seed=0, epoch=number)]
        chosen[shuffled[: round(TEST_SHARE * len(members))]] = True
    return chosen


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Read features [58000, 9], double, and classes [58000], counted from 0.

    Raises:
        UsageError: the file is missing or has other content.
    """
    try:
        frame = rda.read(path)["Shuttle"]
        assert isinstance(frame, rda.Vector)
        columns = [frame.column(f"V{number}").numbers() for number in range(1, FEATURES + 1)]
        # A factor: its levels are numbered from 1.
        classes = frame.column("Class").numbers() - 1
    except FileNotFoundError as error:
        raise UsageError(
            f"task 'shuttle' needs {path} of the Debian package r-cran-mlbench: "
            "apt-get install r-cran-mlbench; or, without R, apt-get download r-cran-mlbench, "
            f"dpkg -x r-cran-mlbench_*.deb FOLDER, and set {FILE_VARIABLE} to "
            f"FOLDER{FILE}"
        ) from error
    except (OSError, KeyError, rda.RdaError) as error:
        raise UsageError(f"task 'shuttle' cannot use {path}: {error}") from error
    inputs = torch.from_numpy(np.stack(columns, axis=1).astype(np.float64))
    return inputs, torch.from_numpy(classes.astype(np.int64))
