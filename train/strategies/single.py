"""One process: the reference that every other strategy must equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from train.data import Batch
from train.distributed import Group
from train.tasks import Task


class Single:
    """Runs the model as it is."""

    def __init__(self, task: Task, model: nn.Module, group: Group) -> None:
        """Take the model over and move it to the rank's device."""
        self.shard, self.shards = 0, 1
        self._task = task
        self._model = model.to(group.device)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Give what the optimizer updates."""
        return self._model.named_parameters()

    def warm_up(self, batch: Batch) -> None:
        """Nothing changes on the first steps of one process."""

    def accumulate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Add the gradients of the summed loss, one micro-batch after the other."""
        self._model.train()
        losses = []
        for batch in micro_batches:
            loss = self._task.loss(self._model(batch.inputs), batch.targets)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def scale_gradients(self, factor: float) -> None:
        """Turn the gradients of the sum into those of the mean."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def evaluate(self, batch: Batch) -> Tensor:
        """Run the model without gradients."""
        self._model.eval()
        with torch.no_grad():
            outputs: Tensor = self._model(batch.inputs)
        return outputs

    def model_state(self) -> dict[str, Tensor]:
        """Give the model's tensors."""
        return self._model.state_dict()

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Put the model's tensors in place."""
        self._model.load_state_dict(state)
