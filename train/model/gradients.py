"""The norm of sharded gradients, gradient clipping, and loss scaling for fp16.

`torch.nn.utils.clip_grad_norm_` fails if parameters are on several meshes, as with tensor
parallelism for some layers only. So every rank adds up its own parts, and the sums are added along
exactly those dimensions of each mesh along which a parameter is sharded.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parallel.base import Strategy, local, scale

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
            # Identify groups by their ranks: of several equal meshes, torch may use any.
            own = {tuple(dist.get_process_group_ranks(g)): g for g in _groups(parameter)}
            groups = own | groups
            cuts.setdefault(tuple(own), []).append(local(gradient))
    device = strategy.norm_device
    total = torch.zeros((), dtype=torch.float64, device=device)
    # The order is the same on all ranks, as that of their parameters is.
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
    """Name the parameters with an infinity or NaN in this rank's part."""
    # Whole numbers are finite; torch computes no norm of them, nor of one-byte floats.
    # A frozen mask may hold infinities.
    named = [(n, p) for n, p in strategy.named_parameters() if p.requires_grad]
    parts = {n: local(p.detach()) for n, p in named if p.dtype.itemsize > 1 and _inexact(p)}
    if not parts:
        return []
    # Use a sum of squares, the fastest single pass over memory, for all parameters together.
    norms = torch._foreach_norm(list(parts.values()))
    finite = torch.stack([norm.to(strategy.norm_device) for norm in norms]).isfinite().tolist()
    return [name for name, good in zip(parts, finite, strict=True) if not good]


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
    """The loss scale: halved at an overflow, doubled after many steps without one.

    fp16 needs it, as many gradients are smaller than the smallest fp16 number.

    torch.amp.GradScaler looks only at one rank's gradients if they are plain tensors, and ranks
    that disagree about a step would diverge. Here the norm over all ranks decides.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = FIRST_SCALE if enabled else 1.0
        self._good_steps = 0

    def passed(self) -> None:
        """Record a step with finite gradients."""
        self._good_steps += 1
        if self.enabled and self._good_steps % GROW_AFTER == 0:
            self.scale *= 2.0

    def overflowed(self) -> bool:
        """Record a step with an overflow; return whether a smaller scale may help."""
        self._good_steps = 0
        self.scale /= 2.0
        return self.enabled and self.scale >= SMALLEST_SCALE

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else {}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint; that of another precision is empty."""
        if self.enabled and state:
            self.scale, self._good_steps = state["scale"], int(state["good_steps"])
