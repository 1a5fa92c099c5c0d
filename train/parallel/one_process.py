"""The strategies of one process: the plain model, threads on several GPUs, pieces on devices.

`single` is the reference that every other strategy must equal.

`dataparallel` is nn.DataParallel, with a thread per GPU, for comparison only; use `ddp` instead.
Before every pass, the model is copied from the first GPU to all others; afterwards, outputs and
gradients are gathered on the first GPU. The first GPU has more work and holds more data than the
others, and Python's threads take turns. `report()` describes the difference.

`manual` is model parallel by hand: successive pieces of the model on a list of devices. Activations
move from device to device; while one device computes, the others wait. Compare `pipeline/`, which
avoids most of this wait. The list may name one device several times: `cpu,cpu` runs the same code
as `cuda:0,cuda:1`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.order import Batch
from ..errors import UsageError
from ..model import compilation
from ..model.trees import Tree, mapped, tensors_of
from .base import Parts, WholeModel
from .layout import flag
from .pipeline import split

MIB = 1024 * 1024


class Single(WholeModel):
    """Runs the model as it is, on the rank's device."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.model())
        compilation.compile_whole(self.model, parts.config)


class Threaded(WholeModel):
    """Splits each batch over the GPUs; the loss and gradients are those of the whole batch."""

    def __init__(self, parts: Parts) -> None:
        listed = parts.config.devices
        gpus = devices(listed)
        self._gpus = [device.index for device in gpus if device.type == "cuda"]
        if self._gpus and len(set(self._gpus)) < len(gpus):
            raise UsageError(
                f"--devices {listed}: nn.DataParallel takes different GPUs, each once; for a list "
                "with 'cpu' or with one GPU twice use --strategy manual"
            )
        if not self._gpus and len(gpus) > 1:
            raise UsageError(
                f"--devices {listed}: nn.DataParallel knows GPUs only; name different ones, or "
                "leave --devices out to run on the CPU, in one thread"
            )
        for option in ("compile", "activation_checkpointing"):
            if len(self._gpus) > 1 and getattr(parts.config, option):
                raise UsageError(
                    f"{flag(option)} cannot be combined with --strategy dataparallel on several "
                    "GPUs: their copies would all run the first one's weights; use --strategy ddp, "
                    "or one GPU"
                )
        super().__init__(parts, parts.model(torch.device("cpu")).to(gpus[0]))
        self._device = gpus[0]
        compilation.compile_whole(self.model, parts.config)
        # The loss uses the gathered outputs: a sum over the whole batch, as required. Losses per
        # thread would have to be summed by hand; their mean would be wrong.
        # Without listed GPUs, nn.DataParallel would still use one if the machine has any.
        if self._gpus:
            # toolkit: allow data-parallel: for comparison with the other strategies
            self.run = nn.DataParallel(self.model, device_ids=self._gpus)
        self._largest_output = 0
        self.run.register_forward_hook(self._note_output)

    def own_part(self, batch: Batch) -> Batch:
        """Move a batch to the first device."""
        return batch.to(self._device)

    def describe(self) -> str:
        """Describe which device holds which part."""
        if not self._gpus:
            return "nn.DataParallel without a GPU just runs the model: one process on the CPU"
        names = ", ".join(f"cuda:{number}" for number in self._gpus)
        return f"nn.DataParallel on {names}: {self._arithmetic()}"

    def report(self) -> str:
        """Describe how unevenly the devices were loaded: measured on GPUs, else by arithmetic."""
        if not self._gpus:
            return f"on two GPUs or more it would be: {self._arithmetic()}"
        peaks = [torch.cuda.max_memory_allocated(number) / MIB for number in self._gpus]
        listed = ", ".join(
            f"cuda:{n} {peak:,.1f} MiB" for n, peak in zip(self._gpus, peaks, strict=True)
        )
        most = f"; the fullest holds {max(peaks) / max(min(peaks), 1 / MIB):.1f} x the emptiest"
        return f"peak memory: {listed}{most if len(peaks) > 1 else ''}"

    def _arithmetic(self) -> str:
        """Describe how much more memory the first device needs than the others."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        config = self.parts.config
        copies = 2 if config.optimizer == "adamw" else int(config.momentum > 0)
        text = (
            f"the first device keeps {(2 + copies) * weights / MIB:,.2f} MiB (weights, gradients, "
            f"{copies} x optimizer state) from step to step, each other one borrows "
            f"{2 * weights / MIB:,.2f} MiB (weights, gradients) in a pass"
        )
        if self._largest_output:
            text += (
                f", and the first gathers the outputs of all, {self._largest_output / MIB:,.2f} "
                "MiB, and computes the loss alone"
            )
        return text

    def _note_output(self, module: nn.Module, inputs: object, output: Tree) -> None:
        size = sum(tensor.nbytes for tensor in tensors_of(output))
        self._largest_output = max(self._largest_output, size)


class Manual(WholeModel):
    """Runs the plain model; each piece moves its inputs to the piece's device."""

    def __init__(self, parts: Parts) -> None:
        # On the host, so that no device ever holds the whole model.
        super().__init__(parts, parts.model(torch.device("cpu")))
        self._devices = devices(parts.config.devices)
        sizes = split.piece_sizes(self.model, self.task)
        flags = f"--devices {','.join(map(str, self._devices))}"
        self._groups = split.cut(sizes, len(self._devices), flags=flags)
        self._sizes = [sum(sizes[name] for name in names) for names in self._groups]
        for device, names in zip(self._devices, self._groups, strict=True):
            for name in names:
                module = self.model.get_submodule(name).to(device)
                module.register_forward_pre_hook(partial(_fetch, device))
            compilation.compile_pieces(self.model, names, parts.config)

    def describe(self) -> str:
        """Describe which device holds which pieces."""
        return "; ".join(
            f"{device}: {size:,} parameters ({', '.join(names)})"
            for device, size, names in zip(self._devices, self._sizes, self._groups, strict=True)
        )

    def own_part(self, batch: Batch) -> Batch:
        """Move the targets to the device of the outputs."""
        last = self._devices[-1]
        return replace(batch, targets=mapped(lambda tensor: tensor.to(last), batch.targets))


def _fetch(device: torch.device, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return mapped(lambda value: value.to(device) if isinstance(value, Tensor) else value, inputs)


def devices(listed: str | None) -> list[torch.device]:
    """Parse a list of devices such as `cuda:0,cuda:1`; by default all GPUs, or the CPU.

    Raises:
        UsageError: the device does not exist.
    """
    gpus = torch.cuda.device_count()
    if listed is None:
        return [torch.device("cuda", number) for number in range(gpus)] or [torch.device("cpu")]
    chosen = []
    for name in map(str.strip, listed.split(",")):
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        gpu, number = device.type == "cuda", device.index or 0
        if not gpu and (device.type != "cpu" or number):
            raise UsageError(
                f"--devices {listed}: unknown device {name!r}; use 'cpu', or 'cuda:0' and so on"
            )
        if gpu and number >= gpus:
            present = f"cuda:0 to cuda:{gpus - 1}" if gpus > 1 else "cuda:0" if gpus else "no GPU"
            raise UsageError(
                f"--devices {listed}: there is no {name!r}: this process sees {present}; use 'cpu'"
            )
        chosen.append(torch.device("cuda", number) if gpu else torch.device("cpu"))
    return chosen
