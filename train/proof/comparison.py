"""Comparison of two training states: the first difference beyond rounding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 3
LOSS = "the loss"


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a training after a step; whole tensors under the plain model's names."""

    loss: float
    """Mean over the items of the step's batch."""
    model: Mapping[str, Tensor]
    """Parameters and saved buffers."""
    optimizer: Mapping[str, Tensor]
    """State tensors by `<parameter>/<slot>`."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between a training and that of one process."""

    name: str
    """A parameter, a buffer, `<parameter>/<slot>` of the optimizer, or `the loss`."""
    kind: str
    """`loss`, `parameter`, `buffer`, `optimizer state` or `initial value`."""
    step: int
    """The step before the comparison; 0: before the first step."""
    size: float
    """The largest absolute difference; infinite if shapes differ or one side is not finite."""
    moved: float
    """Change in one process since the start; of a loss or optimizer state, the largest value."""
    rank: int = 0
    """The rank with the difference."""

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step else "before the first step"
        if self.kind == "loss":
            return f"the loss of step {self.step} differs by {self.size:.3g} from {self.moved:.6g}"
        change = f", which one process has moved by {self.moved:.3g}" if self.step else ""
        return f"{when} {self.kind} {self.name!r} differs by {self.size:.3g}{change}"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of the difference that rounding alone may cause between two trainings."""

    relative: float
    """Limit relative to the largest change of any tensor in training."""
    epsilon: float
    """Machine epsilon of the model's coarsest type."""

    @classmethod
    def of(cls, epsilon: float) -> "Bounds":
        """Return the bounds for a machine epsilon, with headroom for another order of sums.

        Observed differences: 1e-14 in double, 1e-5 in single precision. The smallest difference
        observed from a real fault is 1e-3.
        """
        return cls(relative=min(2.0e4 * epsilon, 0.1) if epsilon > 1e-9 else 1e-8, epsilon=epsilon)


def first_difference(
    mine: State,
    one: State,
    start: Mapping[str, Tensor],
    *,
    step: int,
    bounds: Bounds,
    parameters: Sequence[str],
    rank: int = 0,
) -> Difference | None:
    """Return the first difference between the states of a rank and of one process.

    Args:
        mine: The state of this rank, without the names that the rank does not hold.
        one: The complete state of one process.
        start: The model of one process before its first step.
        step: Number of the last step, for the message.
        bounds: The limits of rounding.
        parameters: The names of the model's parameters; the others are buffers.
        rank: This rank, for the message.
    """
    if not _near(mine.loss, one.loss, bounds):
        size = abs(mine.loss - one.loss)
        size = size if math.isfinite(size) else math.inf
        return Difference(name=LOSS, kind="loss", step=step, size=size, moved=one.loss, rank=rank)
    moves = {
        name: _distance(tensor, start[name]) for name, tensor in one.model.items() if name in start
    }
    measured = [move for name, move in moves.items() if _is_measured(one.model[name])]
    farthest = max(filter(math.isfinite, measured), default=0.0)
    for name, tensor in one.model.items():
        if name not in mine.model:
            continue
        size = _distance(mine.model[name], tensor)
        most = _largest(tensor)
        if _is_measured(tensor):
            allowed = bounds.relative * farthest + 64 * bounds.epsilon * most
        else:
            allowed = 0.0
        if not size <= allowed:
            kind = "parameter" if name in parameters else "buffer"
            moved = moves.get(name, 0.0)
            return Difference(name=name, kind=kind, step=step, size=size, moved=moved, rank=rank)
    scales: dict[str, float] = {}
    for key, tensor in one.optimizer.items():
        slot = key.rpartition("/")[2]
        scales[slot] = max(scales.get(slot, 0.0), _largest(tensor))
    for key, tensor in one.optimizer.items():
        slot = key.rpartition("/")[2]
        if key in mine.optimizer:
            size = _distance(mine.optimizer[key], tensor)
            if not size <= bounds.relative * scales[slot]:
                return Difference(
                    name=key,
                    kind="optimizer state",
                    step=step,
                    size=size,
                    moved=_largest(tensor),
                    rank=rank,
                )
    return None


def _near(mine: float, one: float, bounds: Bounds) -> bool:
    if math.isnan(one):
        return math.isnan(mine)
    return mine == one or abs(mine - one) <= bounds.relative * max(abs(one), 1e-3)


def _is_measured(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _distance(mine: Tensor, one: Tensor) -> float:
    """Return the largest absolute difference; NaN at the same position in both is equal."""
    if mine.shape != one.shape:
        return math.inf
    if not one.numel():
        return 0.0
    if not _is_measured(one):
        different = mine != one
        if not bool(different.any()):
            return 0.0
        apart = (mine.double() - one.double()).abs().max().item()
        return float(apart)
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = mine.to(wide), one.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    distances = (a - b).abs().masked_fill(same, 0.0)
    worst = float(distances.max())
    return worst if math.isfinite(worst) else math.inf


def _largest(tensor: Tensor) -> float:
    if not tensor.numel() or not _is_measured(tensor):
        return 0.0
    finite = tensor.abs().double()
    finite = torch.where(finite.isfinite(), finite, torch.zeros_like(finite))
    return float(finite.max())
