"""Fully sharded data parallel (FSDP2): each rank keeps a part of every parameter.

Before a piece of the model runs, its ranks gather its parameters; after it, they let them go. Its
gradients are summed and shared out at once. With two data axes (`hsdp`), parameters are sharded
along one and replicated along the other, so that the gathering stays within a node.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from train.config import Config
from train.strategies.base import DTYPES


def apply(model: nn.Module, pieces: Sequence[str], mesh: DeviceMesh, config: Config) -> None:
    """Shard a model along `mesh`: one dimension to shard, or two to replicate and to shard.

    In place: afterwards its parameters are other objects, DTensors, so an optimizer that was built
    before would train nothing, silently.
    """
    # A linear layer's output is a view whenever its input has three dimensions.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy()
    if config.precision != "fp32":
        # Gradients are summed in full precision: many ranks' halves would lose the small ones.
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32
        )
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    modules = [model.get_submodule(name) for name in pieces]
    for module in modules:
        # A piece without parameters of its own, such as an activation, has nothing to gather.
        if module is not model and next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # Last the whole: it takes what no piece has taken.
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are sums, so gradients must be as well: no division by the number of ranks.
            module.set_gradient_divide_factor(1.0)
            # A plain sum: torch would multiply by that factor on the way, which gloo cannot.
            module.set_force_sum_reduction_for_comms(True)


def exchange_gradients(model: nn.Module, wanted: bool) -> None:
    """Choose whether the next backward pass exchanges gradients, or only accumulates them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
