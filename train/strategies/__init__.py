"""How a step's work is shared between processes. One module per strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from train.data import Batch
    from train.distributed import Group
    from train.tasks import Task

# Module and class by name; imported only when asked for: DistributedDataParallel alone takes a
# second.
STRATEGIES = {
    "single": ("train.strategies.single", "Single"),
    "ddp": ("train.strategies.ddp", "DataParallel"),
}


class Strategy(Protocol):
    """What the training loop asks of a strategy.

    The strategy owns the model; the loop builds the optimizer from `named_parameters()`, after
    the strategy has wrapped or sharded the model, never before.
    """

    shard: int
    """Which slice of the global batch this rank works on."""
    shards: int
    """How many slices there are; fewer than ranks when some share one (tensor parallel)."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Give what the optimizer updates, under the plain model's names."""

    def warm_up(self, batch: Batch) -> None:
        """Do what changes on the first steps before the first step, without changing the model."""

    def accumulate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Add the gradients of the summed loss; give this rank's summed loss. Scalar, detached."""

    def scale_gradients(self, factor: float) -> None:
        """Make the gradients those of `factor` times the loss summed over all ranks."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Run the model without gradients."""

    def model_state(self) -> dict[str, Tensor]:
        """Give the whole model's tensors under the plain model's names."""

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Put a whole model's tensors in place; the inverse of `model_state()`."""


def build(name: str, task: Task, model: nn.Module, group: Group) -> Strategy:
    """Make the strategy of that name, which must be in `STRATEGIES`."""
    module, attribute = STRATEGIES[name]
    return cast(Strategy, getattr(import_module(module), attribute)(task, model, group))
