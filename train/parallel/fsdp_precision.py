"""Mixed precision of sharded data parallel: the numbers of autocast, with half as much to gather.

Autocast casts a matrix when a layer multiplies by it, and the backward pass needs that copy again.
Under sharding, copies that outlive their layer would add up to the whole model on every rank.
Therefore a rank casts its shard before the ranks gather it, which gives the same numbers: of the
weights of linear layers and convolutions, which nothing but multiplications reads. Norms,
embeddings and a layer's own parameters are gathered as they are, since autocast leaves them alone
or rounds results only. FSDP's own policy would round all of them, and the inputs of each unit,
which lose what makes them different where they lie far from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# What units begin with: no casts of their own.
POLICY = MixedPrecisionPolicy(cast_forward_inputs=False)
_Layer = type[nn.Module]
_PLAIN = ("weight", "bias")
# What a layer's own forward() gives to multiplications that autocast lowers, and to nothing else.
_MULTIPLIED: dict[_Layer, tuple[str, ...]] = {
    nn.Linear: _PLAIN,
    nn.Conv1d: _PLAIN,
    nn.Conv2d: _PLAIN,
    nn.Conv3d: _PLAIN,
    nn.ConvTranspose1d: _PLAIN,
    nn.ConvTranspose2d: _PLAIN,
    nn.ConvTranspose3d: _PLAIN,
    nn.MultiheadAttention: ("in_proj_weight", "in_proj_bias"),
}


def gather_matrices_in(precision: torch.dtype, model: nn.Module) -> None:
    """Have ranks cast what layers only multiply by before they gather it.

    Args:
        precision: that of autocast.
        model: has been sharded.
    """
    # Gradients are added up as exactly as in one process.
    kept = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    lowered = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                # A unit's gradients are of one type; and autocast casts nothing but fp32.
                parameters: list[Any] = group.fsdp_params
                if {p.sharded_param.dtype for p in parameters} == {torch.float32}:
                    for parameter in parameters:
                        policy = lowered if _only_multiplied(parameter) else kept
                        parameter.init_dtype_attrs = _with(policy, parameter.init_dtype_attrs)


def widen_gradients(group: Any) -> None:
    """Bring the gradients of one unit to the type in which they are reduced, all together.

    What was gathered in half precision has such a gradient, as autocast's copy of it would.
    """
    for parameter in group.fsdp_params:
        if parameter.param_dtype is None or not hasattr(parameter, "_unsharded_param"):
            continue
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        unused = parameter.unsharded_accumulated_grad is None
        if unused and group.reduce_grads and parameter.sharded_param.requires_grad:
            # What stands in for it on a rank whose data do not use it.
            parameter.unsharded_accumulated_grad = torch.zeros_like(
                parameter.unsharded_param, dtype=parameter.reduce_dtype
            )


def _only_multiplied(parameter: Any) -> bool:
    """Say so of a parameter of a unit, of all modules that share it."""
    info, layers = parameter._module_info, _MULTIPLIED.items()
    places = [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]
    return all(
        any(type(module).forward is layer.forward and name in names for layer, names in layers)
        for module, name in places
    )


def _with(policy: MixedPrecisionPolicy, choose: Callable[..., None]) -> Callable[..., None]:
    """Choose by this policy in place of the unit's."""
    return lambda _: choose(policy)
