"""DistributedDataParallel: every rank has the whole model and a slice of each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.data import Batch
from train.distributed import Group
from train.tasks import Task


class DataParallel:
    """Averages gradients over the ranks while the backward pass is still running."""

    def __init__(self, task: Task, model: nn.Module, group: Group) -> None:
        """Take the model over, move it to the rank's device and wrap it."""
        self.shard, self.shards = group.place.rank, group.place.world_size
        self._task = task
        self._model = model.to(group.device)
        self._ddp = DistributedDataParallel(
            self._model,
            # On the CPU there are no device numbers, and giving one is an error.
            device_ids=[group.device.index] if group.device.type == "cuda" else None,
            # Gradients live in the communication buckets: no copy in, no copy out.
            gradient_as_bucket_view=True,
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Give what the optimizer updates, without DDP's prefix `module.`."""
        return self._model.named_parameters()

    def warm_up(self, batch: Batch) -> None:
        """Let DDP rebuild its buckets now, so that a resumed run sums in the same order.

        DDP sorts its buckets anew after the first backward pass, in the order in which gradients
        arrived. From three ranks on, the place of a gradient in its bucket decides in which order
        the ranks' numbers are added, hence the last bits. An unbroken run has old buckets in step
        0 only; a resumed one would have them again in its first step, and would differ. Two
        passes over zeros (the rebuild happens when the second one starts) leave every run with
        the final buckets from its first real step on. (With two ranks a + b = b + a hides all
        this.)
        """
        state = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        zeros = batch.zeros()
        for _ in range(2):
            self.accumulate([zeros])
        self._ddp.zero_grad(set_to_none=True)
        # Running statistics (batch normalisation) have moved: put them back.
        self._model.load_state_dict(state)

    def accumulate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Add the gradients of the summed loss; exchange them once, in the last backward pass."""
        self._ddp.train(True)  # type: ignore[no-untyped-call]  # DDP lacks annotations
        losses = []
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            # The forward pass belongs inside as well: it decides whether its backward exchanges.
            with nullcontext() if last else self._ddp.no_sync():
                loss = self._task.loss(self._ddp(batch.inputs), batch.targets)
                torch.autograd.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def scale_gradients(self, factor: float) -> None:
        """Turn the mean over ranks that DDP makes back into a sum, and scale that."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor * self.shards)

    def evaluate(self, batch: Batch) -> Tensor:
        """Run the plain model: no rank waits for another that has fewer batches."""
        self._model.eval()
        with torch.no_grad():
            outputs: Tensor = self._model(batch.inputs)
        return outputs

    def model_state(self) -> dict[str, Tensor]:
        """Give the plain model's tensors: the same on every rank."""
        return self._model.state_dict()

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Put the model's tensors in place, on every rank alike."""
        self._model.load_state_dict(state)
