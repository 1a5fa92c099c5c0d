"""A forward() or a loss that goes another way for some batches is refused where the batch is split.

The first batches all go the same way here, whole and in parts: only the line itself tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.train.proof.test_one_process import verdict_of
from tests.train.support.proved import Plain, with_layer
from train.tasks.base import Task


class Deciding(nn.Module):
    """Goes one of two ways."""

    def __init__(self, decides: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.decides, self.limit = decides, nn.Parameter(torch.tensor(1e6))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh() if self.decides(self, hidden) else hidden * self.limit / 1e6


BY_THE_BATCH: dict[str, Callable[[Any, Tensor], Any]] = {
    "a comparison": lambda _, hidden: hidden.sum() > 1e6,
    "the other way round": lambda _, hidden: hidden.sum() < 1e6,
    "a number first": lambda _, hidden: 1e6 < hidden.sum(),  # noqa: SIM300
    "a parameter": lambda self, hidden: self.limit < hidden.sum(),
    "not": lambda _, hidden: not hidden.sum() < 1e6,
    "and": lambda _, hidden: (hidden.sum() > 1e6) & (hidden.mean() > 9),
    "detached": lambda _, hidden: (hidden.detach().cpu().sum() > 1e6).item(),
    "item": lambda _, hidden: hidden.sum().item() > 1e3,
    "arithmetic": lambda _, hidden: hidden.mean().item() * 2 - 1 > 1,
    "a function of Python": lambda _, hidden: math.exp(hidden.mean().item()) > 10,
    "float": lambda _, hidden: float(hidden.abs().max()) > 50,
    "int": lambda _, hidden: int(hidden.sum()) * 0 + int(hidden.mean()) > 0,
    "any": lambda _, hidden: (hidden > 99).any(),
    "not any": lambda _, hidden: not torch.any(hidden.abs() > 99),
    "all": lambda _, hidden: (hidden < 99).all(),
    "a count": lambda _, hidden: (hidden > 0).sum() > 10_000,
    "whether there is any": lambda _, hidden: (hidden > 99).sum() > 0,
    "close": lambda _, hidden: torch.allclose(hidden, hidden.clamp(-99, 99)),
    "equal": lambda _, hidden: hidden.equal(hidden.clamp(-99, 99)),
    "the first sample": lambda _, hidden: hidden[0].sum() > 1e6,
    "the last sample": lambda _, hidden: hidden[-1].sum().item() > 1e3,
}


@pytest.mark.parametrize("name", BY_THE_BATCH)
def test_what_decides_by_its_batch_is_refused_with_its_line(name: str) -> None:
    task = with_layer(lambda: Deciding(BY_THE_BATCH[name]))
    problem = verdict_of(task()).problem
    assert re.fullmatch(
        r".*the forward\(\) of module '1' branches on a value of its batch "
        r"\(test_control_flow.py, line \d+, where Python reads \S+\), as `if hidden.sum\(\) > 0` "
        r"does: a part of the batch may take another branch; .*--accept layer-mixes-samples",
        problem,
    ), problem
    line = int(re.findall(r"line (\d+)", problem)[0])
    assert line in {BY_THE_BATCH[name].__code__.co_firstlineno, _line_of_the_branch()}
    # It trains what is written where the batch is whole, or where somebody wants it.
    assert verdict_of(task(), micro_batch=None).holds
    assert verdict_of(task(), accept="layer-mixes-samples").accepted == ("layer-mixes-samples",)


def _line_of_the_branch() -> int:
    return Deciding.forward.__code__.co_firstlineno + 1


SEEN_ALONE: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda hidden: (hidden[:, 0] > 0).any(),
    "a whole number": lambda hidden: int((hidden[:, 0] > 0).sum()),
    "its item": lambda hidden: (hidden[:, 0] > 0).sum().item(),
    "a list": lambda hidden: max(hidden[:, 0].tolist()) > 0,
    "an array": lambda hidden: hidden[:, 0].detach().numpy().max() > 0,
    "an array of numpy": lambda hidden: np.asarray(hidden[:, 0].detach()).max() > 0,
}


@pytest.mark.parametrize("name", SEEN_ALONE)
def test_a_sample_alone_is_asked_as_well(name: str) -> None:
    class Some(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            # In the whole and in both parts, both kinds are there.
            return hidden.tanh() if SEEN_ALONE[name](hidden) else hidden

    problem = verdict_of(with_layer(Some)()).problem
    assert "layer '1' (Some) gives other outputs for a sample with other samples" in problem


def _asserts(self: Any, hidden: Tensor) -> Tensor:
    assert hidden.isfinite().all()
    assert hidden.abs().max() < 1e6
    if not torch.isfinite(hidden.sum()):
        raise ValueError("not finite")
    return hidden


def _guards(self: Any, hidden: Tensor) -> Tensor:
    if hidden.isnan().any() or hidden.isinf().any():
        hidden = hidden.nan_to_num()
    return hidden


def _logs(self: Any, hidden: Tensor) -> Tensor:
    self.told = f"{hidden.mean().item():.3f} {float(hidden.std()):.3f} {hidden.abs().max():.3f}"
    return hidden


def _reads_parameters(self: Any, hidden: Tensor) -> Tensor:
    if self.scale > 0 and self.scale.item() > 0 and not (self.weight > 99).any():
        hidden = hidden * self.scale
    return hidden


def _skips_experts(self: Any, hidden: Tensor) -> Tensor:
    share = (hidden @ self.weight).softmax(-1)
    chosen, out = share.argmax(-1), torch.zeros_like(hidden)
    for expert in range(4):
        mine = chosen == expert
        if mine.any() and mine.sum() > 0 and mine.sum().item() > 0:
            out[mine] = hidden[mine] * share[mine, expert, None] * (expert + 1)
    return out


def _trims(self: Any, hidden: Tensor) -> Tensor:
    lengths = (hidden[:, 0] > 0).long() + hidden.shape[1] - 1
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    kept = hidden[:, :longest] if mask.all() else hidden[:, :longest] * mask
    return nn.functional.pad(kept, (0, hidden.shape[1] - longest))


def _maps(self: Any, hidden: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        return torch.where(row.sum() > 1e6, row.tanh(), row * (row < 99).all())

    mapped: Tensor = torch.vmap(one)(hidden)
    return mapped


@pytest.mark.parametrize(
    "does", [_asserts, _guards, _logs, _reads_parameters, _skips_experts, _trims, _maps]
)
def test_what_looks_at_its_batch_and_trains_the_same_is_let_through(
    does: Callable[[Any, Tensor], Tensor],
) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.weight = nn.Parameter(torch.linspace(-1, 1, 32).sin().view(8, 4))

        def forward(self, hidden: Tensor) -> Tensor:
            return does(self, hidden)

    verdict = verdict_of(with_layer(Looking)())
    assert verdict.holds, verdict


class Clipped(Plain):
    """Its loss counts less where it is large."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = (outputs - targets).square().sum()
        return loss if loss.item() < 1e3 else loss * 0.1


class Guarded(Plain):
    """Its loss is looked at, and is the sum."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = (outputs - targets).square().sum()
        assert loss >= 0
        self.last = float(loss)
        return loss


@pytest.mark.parametrize(("task", "refused"), [(Clipped, True), (Guarded, False)])
def test_a_loss_that_decides_by_its_batch_is_refused(task: type[Task], refused: bool) -> None:
    problem = verdict_of(task()).problem
    said = r"loss\(\) branches on a value of its batch \(test_control_flow.py, .*loss-mixes-samples"
    found = re.search(said, problem)
    assert bool(found) == refused, problem
