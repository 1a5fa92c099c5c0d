"""The norm of all gradients, wherever their parts lie, and clipping by it.

`torch.nn.utils.clip_grad_norm_` fails when parameters lie on several meshes, as they do when only
some layers are tensor parallel. So every rank adds up its own parts, and the sums are added along
just those dimensions of each mesh along which something is cut.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.parallel.base import Strategy, local, scale


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
