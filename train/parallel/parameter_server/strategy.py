"""The model under a parameter server: the server's, and each trainer's copy of it.

The server holds parameters and optimizer. A trainer loads the received weights, computes a gradient
and sends it back; it has no state of its own that a checkpoint would have to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from train.cli.config import Config
from train.errors import UsageError
from train.model import buffers, compilation
from train.parallel.base import Parts, WholeModel


class Served(WholeModel):
    """One rank's copy of the model; rank 0's is the one that counts."""

    def __init__(self, parts: Parts) -> None:
        """Make the model on the rank's device.

        Raises:
            UsageError: an option needs agreement of the trainers.
        """
        check(parts.config)
        super().__init__(parts, parts.model())
        self.serves = parts.group.rank_info.rank == 0
        if not self.serves:
            compilation.whole(self.model, parts.config)
        # In step, each trainer has a slice of every batch; else it has whole batches of its own.
        self.trainers = parts.group.rank_info.world_size - 1
        in_step = parts.config.ps_mode == "sync"
        self.shards = self.trainers if in_step else 1
        self.shard = max(parts.group.rank_info.rank - 1, 0) if in_step else 0
        self.axes = (self.shard,)
        kept = self.model.state_dict().keys()
        # Of running statistics, how far they move is sent; a table of angles never does.
        numbers = buffers.numbers(self.model)
        self._buffers = [buffer for name, buffer in numbers.items() if name in kept]
        self._ages = 0, 0, 0

    def describe(self) -> str:
        """Print the role of each rank."""
        config = self.parts.config
        waits = {
            "sync": "which wait for each other",
            "async": "which wait for nobody",
            "bounded": f"with gradients at most {config.staleness} updates old",
        }[config.ps_mode]
        return f"rank 0 serves {self.trainers} trainers, {waits}"

    def report(self) -> str:
        """Say how old gradients were."""
        if not (ages := self.ages()) or self.parts.config.ps_mode == "sync":
            return ""
        return (
            f"gradients were {ages['staleness_mean']:.2f} updates old in the mean, at most "
            f"{ages['staleness_max']:g}"
        )

    def note_age(self, age: int) -> None:
        """Note how many updates old an update's gradient was."""
        count, total, largest = self._ages
        self._ages = count + 1, total + age, max(largest, age)

    def ages(self) -> dict[str, float]:
        """Give the mean and the largest age since the start of this process."""
        count, total, largest = self._ages
        if not count:
            return {}
        return {"staleness_mean": total / count, "staleness_max": float(largest)}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Give the server's parameters; a trainer has none that an optimizer should know."""
        return self.model.named_parameters() if self.serves else iter(())

    def model_state(self) -> dict[str, Tensor]:
        """Give the server's model; a trainer has nothing to save."""
        return super().model_state() if self.serves else {}

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Put it in place; a trainer is sent weights with its work."""
        if self.serves:
            super().load_model_state(state)

    def copy_weights(self) -> list[Tensor]:
        """Copy parameters and moving buffers to the CPU."""
        return [tensor.detach().to("cpu", copy=True) for tensor in self._moving()]

    def take_weights(self, weights: Sequence[Tensor]) -> None:
        """Put in place what the server has copied."""
        with torch.no_grad():
            for mine, sent in zip(self._moving(), weights, strict=True):
                mine.copy_(sent)

    def take_gradients(self) -> list[Tensor | None]:
        """Move this trainer's gradients to the CPU, out of the parameters."""
        taken: list[Tensor | None] = []
        for parameter in self.model.parameters():
            taken.append(None if parameter.grad is None else parameter.grad.cpu())
            parameter.grad = None
        return taken

    def moved(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Say how far buffers have moved since these weights."""
        before = weights[len(weights) - len(self._buffers) :]
        return [now.cpu() - then for now, then in zip(self._buffers, before, strict=True)]

    def put_gradients(self, pieces: Sequence[Sequence[Tensor | None]]) -> None:
        """Make the parameters' gradients the sum of pieces, added in their order."""
        for parameter, column in zip(
            self.model.parameters(), zip(*pieces, strict=True), strict=True
        ):
            total: Tensor | None = None
            for gradient in column:
                if gradient is not None:
                    total = gradient.clone() if total is None else total.add_(gradient)
            parameter.grad = None if total is None else total.to(parameter.device)

    def move(self, pieces: Sequence[Sequence[Tensor]]) -> None:
        """Move buffers by the mean of how far trainers have: see `train.model.buffers`."""
        for buffer, column in zip(self._buffers, zip(*pieces, strict=True), strict=True):
            mean = torch.stack(column).double().mean(dim=0)
            # Counters of passes are whole numbers.
            mean = mean if buffer.is_floating_point() else mean.round()
            buffer += mean.to(buffer.device, buffer.dtype)

    def _moving(self) -> list[Tensor]:
        return [*self.model.parameters(), *self._buffers]


def check(config: Config) -> None:
    """Refuse what trainers would have to agree on.

    Raises:
        UsageError: names it, and the way out.
    """
    if config.precision == "fp16":
        raise UsageError(
            "--strategy ps does not go with --precision fp16: the scale of the loss would have to "
            "travel with each gradient; use --precision bf16"
        )
    if config.sync_batch_norm:
        raise UsageError(
            "--sync-batch-norm lets ranks exchange in every forward pass, but the server makes "
            "none; leave it out with --strategy ps"
        )
