"""Model parallel by hand: successive pieces of the model on a list of devices, in one process.

Activations move from device to device as they come along; while one computes, the others wait. What
a pipeline does better can be seen beside `pp.py`. The list may name one device several times:
`cpu,cpu` goes the same way as `cuda:0,cuda:1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from train.data.order import Batch
from train.errors import UsageError
from train.model import compilation
from train.model.trees import mapped
from train.parallel.base import Parts, Sums, Tally, WholeModel
from train.parallel.pipeline import split


class Manual(WholeModel):
    """Runs the plain model, whose pieces fetch their inputs to where they are."""

    def __init__(self, parts: Parts) -> None:
        """Make the model and put its pieces on the devices."""
        # On the host: no device need ever hold the whole.
        super().__init__(parts, parts.model(torch.device("cpu")))
        self._devices = devices(parts.config.devices)
        pieces = {
            name: sum(
                parameter.numel() for parameter in self.model.get_submodule(name).parameters()
            )
            for name in self.task.pieces(self.model)
        }
        asked = f"--devices {','.join(map(str, self._devices))}"
        self._groups = split.cut(pieces, len(self._devices), asked=asked)
        self._sizes = [sum(pieces[name] for name in names) for names in self._groups]
        for device, names in zip(self._devices, self._groups, strict=True):
            for name in names:
                module = self.model.get_submodule(name).to(device)
                module.register_forward_pre_hook(partial(_fetch, device))
            compilation.pieces(self.model, names, parts.config)

    def describe(self) -> str:
        """Say which device holds what."""
        return "; ".join(
            f"{device}: {size:,} parameters ({', '.join(names)})"
            for device, size, names in zip(self._devices, self._sizes, self._groups, strict=True)
        )

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss, one micro-batch after the other."""
        return super().accumulate([self._with_targets(batch) for batch in micro_batches], factor)

    def evaluate(self, batch: Batch) -> Tally:
        """Run the model without gradients."""
        return super().evaluate(self._with_targets(batch))

    def _with_targets(self, batch: Batch) -> Batch:
        """Put the targets where the outputs will be."""
        last = self._devices[-1]
        return replace(batch, targets=mapped(lambda tensor: tensor.to(last), batch.targets))


def devices(listed: str | None) -> list[torch.device]:
    """Read a list of devices such as `cuda:0,cuda:1` or `cpu,cpu`; by default all GPUs, or the CPU.

    Raises:
        UsageError: the device does not exist.
    """
    gpus = torch.cuda.device_count()
    if listed is None:
        return [torch.device("cuda", number) for number in range(gpus)] or [torch.device("cpu")]
    return [_device(name.strip(), f"--devices {listed}", gpus) for name in listed.split(",")]


def _device(name: str, place: str, gpus: int) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UsageError(f"{place}: unknown device {name!r}; use 'cpu', or 'cuda:0' and so on")
    if device.type == "cpu":
        return torch.device("cpu")
    number = device.index or 0
    if number >= gpus:
        present = f"cuda:0 to cuda:{gpus - 1}" if gpus > 1 else "cuda:0" if gpus else "no GPU"
        raise UsageError(f"{place}: there is no {name!r}: this process sees {present}; use 'cpu'")
    return torch.device("cuda", number)


def _fetch(device: torch.device, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move a piece's inputs to its device."""
    moved: tuple[Any, ...] = mapped(
        lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs
    )
    return moved
