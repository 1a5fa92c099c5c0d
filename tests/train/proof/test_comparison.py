"""Which difference counts, how it is written, and what is taken for its cause."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.support import kinds, proved
from train.proof.causes import UNKNOWN, Observations, likeliest, observe, otherwise
from train.proof.comparison import Bounds, Difference, State, first_difference

DOUBLE = Bounds.of(torch.finfo(torch.float64).eps)
SINGLE = Bounds.of(torch.finfo(torch.float32).eps)
START = {
    "weight": torch.zeros(3, dtype=torch.float64),
    "mean": torch.zeros(2, dtype=torch.float64),
    "count": torch.tensor(0),
}
ONE = State(
    loss=0.5,
    model={
        "weight": torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64),
        "mean": torch.ones(2, dtype=torch.float64),
        "count": torch.tensor(4),
    },
    optimizer={"weight/exp_avg": torch.full((3,), 1e-3), "weight/step": torch.tensor(1.0)},
)


def seen(changes: dict[str, object], bounds: Bounds = DOUBLE) -> str:
    """The difference of a rank that has other values for some names; '' if there is none."""
    changes = dict(changes)
    loss = changes.pop("loss", ONE.loss)
    model = {n: changes.pop(n, t) for n, t in ONE.model.items()}
    optimizer = {n: changes.pop(n.partition("/")[2], t) for n, t in ONE.optimizer.items()}
    assert not changes
    mine = State(loss=loss, model=model, optimizer=optimizer)  # type: ignore[arg-type]
    found = first_difference(mine, ONE, START, step=2, bounds=bounds, parameters=["weight"], rank=1)
    return "" if found is None else str(found)


def off(tensor: Tensor, by: float) -> Tensor:
    changed = tensor.clone()
    changed[-1] += by
    return changed


def test_equal_states_have_no_difference() -> None:
    assert seen({}) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": 0.6, "count": torch.tensor(2)}, "the loss of step 2 differs by 0.1 from 0.5"),
        ({"loss": math.nan}, "the loss of step 2 differs by inf from 0.5"),
        (
            {"weight": off(ONE.model["weight"], 1e-4), "mean": off(ONE.model["mean"], 1.0)},
            "after step 2 parameter 'weight' differs by 0.0001, which one process has moved by 0.2",
        ),
        (
            {"mean": off(ONE.model["mean"], 0.5)},
            "after step 2 buffer 'mean' differs by 0.5, which one process has moved by 1",
        ),
        (
            {"mean": off(ONE.model["mean"], math.nan)},
            "after step 2 buffer 'mean' differs by inf, which one process has moved by 1",
        ),
        (
            {"mean": torch.ones(3)},
            "after step 2 buffer 'mean' differs by inf, which one process has moved by 1",
        ),
        (
            {"count": torch.tensor(3)},
            "after step 2 buffer 'count' differs by 1, which one process has moved by 4",
        ),
        (
            {"exp_avg": off(ONE.optimizer["weight/exp_avg"], 1e-6)},
            "after step 2 optimizer state 'weight/exp_avg' differs by 1e-06, which one process has "
            "moved by 0.001",
        ),
    ],
)
def test_the_first_difference_is_named_with_its_size(changes: dict[str, object], text: str) -> None:
    assert seen(changes) == text


def test_rounding_is_no_difference_and_single_precision_rounds_more() -> None:
    little = off(ONE.model["weight"], 1e-13)
    assert seen({"weight": little, "loss": 0.5 + 1e-13}) == ""
    more = off(ONE.model["weight"], 1e-5)
    assert seen({"weight": more}) != ""
    assert seen({"weight": more, "loss": 0.5 + 1e-5}, SINGLE) == ""
    # A fault moves a weight by another amount, not by rounding.
    assert seen({"weight": off(ONE.model["weight"], 1e-2)}, SINGLE) != ""


def test_what_a_rank_does_not_hold_is_not_compared() -> None:
    mine = dataclasses.replace(ONE, model={"mean": ONE.model["mean"]}, optimizer={})
    arguments = {"step": 1, "bounds": DOUBLE, "parameters": ["weight"]}
    assert first_difference(mine, ONE, START, **arguments) is None  # type: ignore[arg-type]


def of(name: str, kind: str = "parameter") -> Difference:
    return Difference(name=name, kind=kind, step=1, size=1.0, moved=1.0)


def observed(task: proved.Plain) -> Observations:
    torch.manual_seed(0)
    model = task.model()
    found = observe(model, task.train().part(0, 4), task)
    # It can go on from here.
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


CAUSES = {
    "written": (proved.Followed(), of("1.student.bias"), "parameter '1.teacher.weight' (as"),
    "written by samples": (proved.Clamped(), of("1.weight"), "forward() writes parameter '1.w"),
    "hooked": (
        proved.Hooked(),
        of("0.weight/exp_avg", "optimizer state"),
        "parameter '0.weight' has a",
    ),
    "frozen": (proved.Thawed(), of("0.weight"), "'1.linear.weight', '1.linear.bias' is frozen"),
    "not saved": (proved.Drifting(), of("the loss", "loss"), "moves buffer '1.ema', which is reg"),
    "counted": (proved.Counted(), of("1.seen", "buffer"), "each rank or micro-batch changes"),
    "unknown": (proved.Plain(), of("0.weight"), UNKNOWN),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_likeliest_cause_is_one_that_was_seen(name: str) -> None:
    task, difference, text = CAUSES[name]
    found = observed(task)
    assert text in likeliest(difference, found)


class Turns(nn.Module):
    """Counts its passes, and recalls its last input."""

    def __init__(self, *, recalls: bool) -> None:
        super().__init__()
        self.turns, self.recalls, self.last = 0, recalls, torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        if self.recalls:
            self.last = hidden.detach().mean()
        else:
            self.turns += 1
        return hidden


class Clipping(nn.Tanh):
    """Clips the gradient on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(self.clipped)

    @staticmethod
    def clipped(module: nn.Module, given: Any, got: Any) -> tuple[Tensor, ...]:
        return tuple(gradient.clamp(-0.1, 0.1) for gradient in given)


class Twice(proved.Plain):
    def model(self) -> nn.Module:
        model = super().model()
        turns = Turns(recalls=False)
        return nn.Sequential(model[0], turns, model[2], turns, model[3])  # type: ignore[index]


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (kinds.Annealed, "loss() changes attribute 'calls' of the task"),
        (Twice, "forward() changes '1.turns', and its module is used as '1' and as '3'"),
        (proved.with_layer(lambda: Turns(recalls=False)), "forward() changes attribute '1.turns'"),
        (proved.with_layer(lambda: Turns(recalls=True)), "forward() changes attribute '1.last'"),
        (proved.with_layer(Clipping), "module '1' has a hook on its backward pass"),
        (proved.Plain, UNKNOWN),
    ],
)
def test_hooks_and_what_modules_remember_explain_what_nothing_else_does(
    task: type[proved.Plain], text: str
) -> None:
    assert text in otherwise(observed(task()))
