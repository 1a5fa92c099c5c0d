"""Changes to a model that do not depend on how it is parallelised."""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from . import batchnorm, compilation, dropout
from .recomputation import recompute

if TYPE_CHECKING:
    from ..cli.config import Config
    from ..tasks.base import Task


def prepare(
    model: nn.Module, task: "Task", config: "Config", *, device: torch.device | None = None
) -> nn.Module:
    """Apply the options of the command line to a model, in place; its parameters keep their names.

    `device`: the device that the model will run on (default: its current one).

    Raises:
        UsageError: an option would change nothing.
    """
    if problem := _without_effect(model, task, config):
        raise UsageError(f"{problem}; leave it out")
    if config.dropout is not None:
        dropout.apply(model, config.dropout, task=task.name)
    if config.sync_batch_norm:
        model = batchnorm.synchronised(model, device=device)
    if config.activation_checkpointing:
        # One module may be several pieces.
        pieces = {model.get_submodule(name): name for name in task.pieces(model)}
        for module, name in pieces.items():
            if config.compile:
                # Compile inside of the recomputation: a compiler cannot handle the code that keeps
                # running statistics from moving twice, nor see which of both passes it is in.
                compilation.compile_forward(module)
            recompute(module, name)
    return model


def _without_effect(model: nn.Module, task: "Task", config: "Config") -> str:
    """Describe an option without effect on this model; '' if there is none."""
    whose = f"the model of task {task.name!r}"
    modules = model.modules()
    if config.sync_batch_norm and not any(isinstance(m, _BatchNorm) for m in modules):
        return f"--sync-batch-norm has no effect, as {whose} has no batch normalisation"
    if config.activation_checkpointing and "" in task.pieces(model):
        return (
            f"--activation-checkpointing saves no memory, as {whose} is one piece: have pieces() "
            "name its parts, one after the other"
        )
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if config.precision != "fp32" and kinds == {torch.float64}:
        return (
            f"--precision {config.precision} has no effect, as {whose} is of float64, which "
            "autocast leaves alone"
        )
    return ""
