"""The optimizer, its state by parameter name, and the learning rate of each step."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from ..errors import UsageError

if TYPE_CHECKING:
    from ..cli.config import Config


class NamedOptimizer:
    """AdamW or SGD with its state as a flat dictionary of tensors, named `<parameter>/<slot>`.

    torch identifies parameters by their order; names survive a change of strategy.
    """

    def __init__(self, parameters: Iterator[tuple[str, nn.Parameter]], config: "Config") -> None:
        """Optimize the strategy's parameters, after it has wrapped the model."""
        self._parameters = dict(parameters)
        self._lr = config.lr
        on_gpu = [parameter.is_cuda for parameter in self._parameters.values()]
        self._fused = config.optimizer == "adamw" and bool(on_gpu) and all(on_gpu)
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self._parameters.values():
            # One fused call cannot take parameters of several meshes, so make a group per mesh.
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        # A rank may hold no parameters: torch refuses an empty list, but not an empty group.
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
                # Use one kernel for all: the GPU idles while kernels are launched.
                fused=self._fused or None,
            )
        self._unmarked = without_span(self._optimizer)

    def step(self, lr: float | None = None) -> None:
        """Update the parameters, with a new learning rate if given; drop their gradients."""
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
        """Allocate the state, to be loaded in place; skip parameters of other ranks.

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
    # torch sets `hooked` on functions wrapped in this span.
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class LearningRate:
    """The learning rate as a function of the step, so that a resumed run needs no saved state."""

    def __init__(self, config: "Config", steps: int) -> None:
        """Plan for a run of `steps` steps.

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

        It rises linearly, then falls towards 0, the value for the step after the last one. The half
        cosine is that of Loshchilov and Hutter, "SGDR" (2017).
        """
        if step < self._warm_up:
            return self._lr * (step + 1) / self._warm_up
        if self._shape == "constant":
            return self._lr
        done = min((step - self._warm_up) / max(self._steps - self._warm_up, 1), 1.0)
        left = 1.0 - done if self._shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return self._lr * left
