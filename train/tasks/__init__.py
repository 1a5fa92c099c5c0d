"""What is learned: a model, data and a loss. One module per task."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from train.data import Batch

# Module and class by name; imported only when asked for, so that `--help` stays fast.
TASKS = {"digits": ("train.tasks.digits", "Digits"), "chars": ("train.tasks.chars", "Chars")}


class Task(Protocol):
    """What the training loop asks of a task.

    The loss is a *sum* over items, with `count()` beside it: the loop divides by the number of
    items of the whole global batch, so that gradients do not depend on ranks, micro-batches or
    padding.
    """

    name: str

    def identity(self) -> Mapping[str, str | int]:
        """Say what else makes two runs of this task different: sizes, digest of the data."""

    def model(self) -> nn.Module:
        """Make the model; its initial weights come from torch's global generator."""

    def train(self) -> Batch:
        """Give all training samples."""

    def test(self) -> Batch:
        """Give all test samples."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum the loss over the items of a batch. Scalar."""

    def count(self, targets: Tensor) -> int:
        """Count the items that `loss()` sums over."""

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the items that the model gets right. Scalar."""


def load(name: str) -> Task:
    """Make the task of that name, which must be in `TASKS`."""
    module, attribute = TASKS[name]
    return cast(Task, getattr(import_module(module), attribute)())
