"""Fully sharded data parallel (FSDP2): each rank keeps a part of every parameter.

Before a piece of the model runs, its ranks gather its parameters; after it, they let them go. Its
gradients are summed and shared out at once. With two data axes (`hsdp`), parameters are sharded
along one and replicated along the other, so that the gathering stays within a node.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)

from train.cli.config import Config
from train.errors import UsageError
from train.parallel import inventory
from train.parallel.base import DTYPES
from train.parallel.fsdp_precision import POLICY, gather_matrices_in
from train.parallel.fsdp_units import Units


def apply(
    model: nn.Module, pieces: Sequence[str], mesh: DeviceMesh, config: Config, *, task: str
) -> Units:
    """Shard a model along `mesh`: one dimension to shard, or two to replicate and to shard.

    In place: afterwards its parameters are other objects, DTensors, so an optimizer that was built
    before would train nothing, silently.

    Pieces that share a parameter are sharded with the whole: it stays gathered from the first of
    them to the last, and its gradients from all of them are added before they are reduced.

    Raises:
        UsageError: a parameter has no dimension that could be shared out.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(
                f"task {task!r}: parameter {name!r} is a single number without a dimension, which "
                "sharded data parallel cannot share out; make it a tensor of shape [1], or use "
                "--strategy ddp"
            )
    # A linear layer's output is a view whenever its input has three dimensions.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = OffloadPolicy()
    if config.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    units = own_units(model, pieces)
    for name in units:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=POLICY, offload_policy=offload)
    # Last the whole: it takes what no piece has taken.
    fully_shard(model, mesh=mesh, mp_policy=POLICY, offload_policy=offload)
    if config.precision != "fp32":
        gather_matrices_in(DTYPES[config.precision], model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are sums, so gradients must be as well: no division by the number of ranks.
            module.set_gradient_divide_factor(1.0)
            # A plain sum: torch would multiply by that factor on the way, which gloo cannot.
            module.set_force_sum_reduction_for_comms(True)
            # Parameters that only some ranks' data use are reduced like all others.
            module.set_reduce_scatter_unused_params(True)
    return Units(model, units, task=task)


def own_units(model: nn.Module, pieces: Sequence[str]) -> list[str]:
    """Name the pieces that are gathered by themselves: they share no parameter, and have some."""
    homes: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        within = [piece for piece in pieces if name.startswith(f"{piece}.")]
        homes.setdefault(id(parameter), set()).update(within or [""])
    shared = {piece for names in homes.values() if len(names) > 1 for piece in names}
    own = {piece for names in homes.values() for piece in names} - shared
    return [piece for piece in pieces if piece and piece in own]


def tie_again(model: nn.Module, ties: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
    """Make modules share parameters again after `to_empty()`, which makes one for each of them."""
    for places in ties:
        module, name = places[0]
        inventory.tie(places, module.get_parameter(name))
    for module in model.modules() if ties else ():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()  # type: ignore[no-untyped-call]


def exchange_gradients(model: nn.Module, *, last: bool, each: bool) -> None:
    """Choose whether the next backward pass exchanges gradients, or only accumulates them.

    Args:
        model: the sharded modules.
        last: whether it is the step's last backward pass.
        each: whether all of them share gradients out; copies of a shard are summed in the last.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or each)
        model.set_requires_all_reduce(last)
