"""Layers with sparse gradients, which only some optimizers, options and strategies support.

A sparse gradient holds the rows that a batch has used. The momentum of SGD also becomes sparse, and
checkpoints cannot store it. Clipping cannot compute the norm of a sparse gradient, and sharding
cannot split it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import UsageError

if TYPE_CHECKING:
    from ..cli.config import Config

STRATEGIES = ("single", "manual", "dataparallel", "ddp", "ps")


def layers(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Find the layers of a model that give their weights sparse gradients."""
    return {
        f"layer {name!r} ({type(module).__name__}, sparse=True)": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
    }


def gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Name the parameters that have a sparse gradient."""
    return [
        f"parameter {name!r}"
        for name, parameter in parameters
        if parameter.grad is not None and parameter.grad.layout != torch.strided
    ]


def refuse_exchange(names: Iterable[str], *, task: str) -> None:
    """Refuse sparse gradients that DistributedDataParallel has failed to exchange.

    Raises:
        UsageError: names the parameter.
    """
    raise UsageError(
        f"task {task!r}: {next(iter(names), 'a parameter')} has sparse gradients. --strategy ddp "
        "exchanges them only for an nn.Embedding or nn.EmbeddingBag beside other layers: use one "
        "instead of functional.embedding(), or dense gradients (sparse=False)"
    )


def refuse(names: Iterable[str], config: "Config", *, strategy: str, task: str) -> None:
    """Refuse sparse gradients if an optimizer, option or strategy does not support them.

    Raises:
        UsageError: names the layer, and everything that does not support it.
    """
    name = next(iter(names), None)
    refusing = {
        f"--optimizer {config.optimizer}": config.optimizer != "sgd",
        f"--momentum {config.momentum}": config.optimizer == "sgd" and config.momentum > 0,
        f"--weight-decay {config.weight_decay}": config.weight_decay > 0,
        "--clip-norm": config.clip_norm is not None,
        "--precision fp16": config.precision == "fp16",
        "--reduce exact": config.reduce == "exact",
        f"--comm-hook {config.comm_hook}": config.comm_hook != "none",
        f"--strategy {strategy}": strategy not in STRATEGIES,
    }
    if name is not None and any(refusing.values()):
        flags = ", ".join(flag for flag, refuses in refusing.items() if refuses)
        raise UsageError(
            f"task {task!r}: {name} has sparse gradients, which cannot be combined with {flags}; "
            "use dense ones (sparse=False), or --optimizer sgd --momentum 0 --weight-decay 0 "
            "with --strategy ddp"
        )
