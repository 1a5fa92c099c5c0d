"""The optimizer's step: the norm of all gradients, loss scaling, the update, the learning rate.

`torch.nn.utils.clip_grad_norm_` fails when parameters lie on several meshes, as they do when only
some layers are tensor parallel. So every rank adds up its own parts, and the sums are added along
just those dimensions of each mesh along which something is cut.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.tensor import DTensor

from train.errors import UsageError
from train.parallel.base import Strategy, local, scale

if TYPE_CHECKING:
    from train.cli.config import Config

FIRST_SCALE = 2.0**16
GROW_AFTER = 2000
"""The schedule of Micikevicius et al., "Mixed Precision Training" (2018), with the numbers that
torch.amp.GradScaler uses."""
SMALLEST_SCALE = 2.0**-14


def total_norm(strategy: Strategy) -> float:
    """Compute the 2-norm of the whole gradient: the same number on every rank."""
    cuts: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for _, parameter in strategy.counted_parameters():
        gradient = parameter.grad
        if gradient is not None:
            # By their ranks: of equal meshes that a process has made, torch may take any.
            own = {tuple(dist.get_process_group_ranks(g)): g for g in _groups(parameter)}
            groups = own | groups
            cuts.setdefault(tuple(own), []).append(local(gradient))
    device = strategy.norm_device
    total = torch.zeros((), dtype=torch.float64, device=device)
    # In an order that is the same on all ranks, as their parameters are.
    for cut, gradients in cuts.items():
        norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(gradients)]
        square = torch.stack(norms).square().sum()
        for ranks in cut:
            dist.all_reduce(square, group=groups[ranks])
        total += square
    if (stages := strategy.stage_group) is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt().item()


def clip(strategy: Strategy, norm: float, limit: float) -> None:
    """Scale the gradients so that their norm, which is `norm`, is at most `limit`."""
    if norm > limit:
        scale(strategy.named_parameters(), limit / norm)


def not_finite(strategy: Strategy) -> list[str]:
    """Name the parameters whose part on this rank holds an infinity or NaN."""
    parts = {name: local(p.detach()) for name, p in strategy.named_parameters()}
    if not parts:
        return []
    # A sum of squares, as that is the fastest single pass over memory; one answer for all.
    norms = torch._foreach_norm(list(parts.values()))
    finite = torch.stack([norm.to(strategy.norm_device) for norm in norms]).isfinite().tolist()
    return [name for name, good in zip(parts, finite, strict=True) if not good]


def _groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Name the ranks that hold different parts of a parameter, one group per dimension cut."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


class LossScaler:
    """The factor by which losses are multiplied: halved at an overflow, doubled after long peace.

    For fp16, whose smallest numbers are larger than many gradients.

    Not torch.amp.GradScaler: it looks at one rank's gradients, and ranks that disagree about a step
    part for good. Here the norm over all ranks decides.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = FIRST_SCALE if enabled else 1.0
        self._good_steps = 0

    def passed(self) -> None:
        """Note a step whose gradients were finite."""
        self._good_steps += 1
        if self.enabled and self._good_steps % GROW_AFTER == 0:
            self.scale *= 2.0

    def overflowed(self) -> bool:
        """Note a step whose gradients were not; say whether a smaller scale may help."""
        self._good_steps = 0
        self.scale /= 2.0
        return self.enabled and self.scale >= SMALLEST_SCALE

    def state(self) -> dict[str, float]:
        """Return what a checkpoint must hold."""
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else {}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from there; a checkpoint of another precision holds nothing."""
        if self.enabled and state:
            self.scale, self._good_steps = state["scale"], int(state["good_steps"])


class NamedOptimizer:
    """AdamW or SGD whose state is a flat dictionary of tensors, as `<parameter>/<slot>`.

    torch numbers parameters by their order; names survive a change of strategy.
    """

    def __init__(self, parameters: Iterator[tuple[str, nn.Parameter]], config: "Config") -> None:
        """Optimize the strategy's parameters, after it has wrapped the model."""
        self._parameters = dict(parameters)
        self._lr = config.lr
        on_gpu = [parameter.is_cuda for parameter in self._parameters.values()]
        self._fused = config.optimizer == "adamw" and bool(on_gpu) and all(on_gpu)
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self._parameters.values():
            # One fused call cannot take parameters of several meshes: each has a group of its own.
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        # A rank may hold none: torch refuses an empty list, but not an empty group.
        lists = [{"params": group} for group in groups.values()] or [{"params": []}]
        self._optimizer: torch.optim.Optimizer
        if config.optimizer == "sgd":
            self._optimizer = torch.optim.SGD(
                lists, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
            )
        else:
            self._optimizer = torch.optim.AdamW(
                lists,
                lr=config.lr,
                weight_decay=config.weight_decay,
                # One kernel for all: while it is launched, a GPU that has agreed on a step waits.
                fused=self._fused or None,
            )
        self._unmarked = without_span(self._optimizer)

    def step(self, lr: float | None = None) -> None:
        """Update the parameters, at another learning rate if need be; forget their gradients."""
        if lr is not None and lr != self._lr:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._lr = lr
        if profiler._is_profiler_enabled:
            self._optimizer.step()
        else:
            self._unmarked(self._optimizer)
        self.forget()

    def forget(self) -> None:
        """Drop the gradients without a step."""
        # zero_grad() without its span for a profiler.
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state, live; empty before the first step."""
        return {
            f"{name}/{slot}": value
            for name, parameter in self._parameters.items()
            for slot, value in self._optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }

    def allocate(self, slots: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """Make room for a state to be read into, in place; for other ranks' parameters, none.

        `slots` holds shape and type by `<parameter>/<slot>`, as a checkpoint lists them.
        """
        for key, (shape, dtype) in slots.items():
            name, _, slot = key.rpartition("/")
            if (parameter := self._parameters.get(name)) is None:
                continue
            # State of the parameter's shape is sharded like it. The rest are scalars, which only a
            # fused kernel needs on the parameters' device.
            if slot != "step" and shape == parameter.shape:
                state = torch.zeros_like(parameter, requires_grad=False)
            else:
                device = parameter.device if self._fused else None
                state = torch.zeros(shape, dtype=dtype, device=device)
            self._optimizer.state[parameter][slot] = state
        return self.tensors()


def without_span(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """Return `step()` as it was before torch wrapped it in a span for the profiler.

    The span is useless unless a profiler runs, and takes a tenth of a step of one millisecond.
    """
    step = type(optimizer).step
    # torch marks the functions that it has wrapped so.
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class LearningRate:
    """A function of the step, so that a resumed run needs no state of it."""

    def __init__(self, config: "Config", steps: int) -> None:
        """Plan for a run of so many steps.

        Raises:
            UsageError: the run would end before the learning rate has risen.
        """
        self._shape, self._warm_up, self._steps = config.lr_schedule, config.warmup_steps, steps
        self._lr = config.lr
        if self._warm_up and self._warm_up >= steps:
            raise UsageError(
                f"--warmup-steps {self._warm_up}: the run has {steps} steps, and would end before "
                "the learning rate reaches --lr; warm up for fewer, or train for more"
            )

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        It rises on a line, then falls towards 0, which the step after the last one would have; the
        half cosine is that of Loshchilov and Hutter, "SGDR" (2017).
        """
        if step < self._warm_up:
            return self._lr * (step + 1) / self._warm_up
        if self._shape == "constant":
            return self._lr
        done = min((step - self._warm_up) / max(self._steps - self._warm_up, 1), 1.0)
        left = 1.0 - done if self._shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return self._lr * left
