"""Changes to a model that do not depend on how it is parallelised."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from train.model import compilation
from train.model.batchnorm import synchronised
from train.model.buffers import standing_still

if TYPE_CHECKING:
    from train.cli.config import Config
    from train.tasks.base import Task


def prepare(
    model: nn.Module, task: Task, config: Config, *, device: torch.device | None = None
) -> nn.Module:
    """Apply the options of the command line; the names of parameters stay as they are.

    Args:
        model: is changed.
        task: knows its pieces.
        config: the requested options.
        device: where the model will run (default: where it is).
    """
    if config.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = config.dropout
    if config.sync_batch_norm:
        model = synchronised(model, device=device)
    if config.activation_checkpointing:
        # One module may be several pieces.
        for module in dict.fromkeys(map(model.get_submodule, task.pieces(model))):
            if config.compile:
                # Inside: what keeps running statistics from moving twice is not for a compiler,
                # which could not see, either, which of both passes it is in.
                compilation.forward(module)
            _recompute(module)
    return model


def _recompute(module: nn.Module) -> None:
    """Keep only a module's inputs, and run it again for its backward pass.

    The method is replaced rather than the module wrapped, which would change parameters' names.
    """
    module.forward = partial(
        checkpoint,
        module.forward,
        use_reentrant=False,
        # The second time, running statistics have moved already.
        context_fn=lambda: (nullcontext(), _StandingStill(module)),
    )


class _StandingStill(AbstractContextManager[None]):
    """`standing_still()` as often as it is entered.

    Pipeline schedules that go through a graph in two passes compute the activations in each.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._entered = standing_still(self._module)
        self._entered.__enter__()

    def __exit__(self, *failure: object) -> None:
        self._entered.__exit__(*failure)  # type: ignore[arg-type]
