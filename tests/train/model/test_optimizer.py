"""Our optimizer makes torch's own steps, and shows them to tracers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.train.support.making import config_of
from train.model.optimizer import NamedOptimizer, without_span

CHOICES: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": ({"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    "sgd": ({"momentum": 0.9, "weight_decay": 0.0}, torch.optim.SGD, {"momentum": 0.9}),
}


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def backward(of: nn.Linear) -> None:
    of(torch.arange(10.0).view(2, 5)).square().sum().backward()


@pytest.mark.parametrize("name", CHOICES)
def test_steps_are_torchs_own_to_the_last_bit(name: str) -> None:
    ours, theirs = model(), model()
    chosen, kind, arguments = CHOICES[name]
    optimizer = NamedOptimizer(ours.named_parameters(), config_of(optimizer=name, lr=0.1, **chosen))
    reference: Any = kind(theirs.parameters(), lr=0.1, **arguments)  # type: ignore[call-arg]
    for rate in (0.1, 0.1, 0.02, 0.1):
        for group in reference.param_groups:
            group["lr"] = rate
        backward(ours)
        backward(theirs)
        optimizer.step(rate)
        reference.step()
        reference.zero_grad()
        assert all(parameter.grad is None for parameter in ours.parameters())
    assert all(a.equal(b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert not ours.weight.equal(model().weight)
    state = {key for key in optimizer.tensors() if key.startswith("weight/")}
    assert len(state) == len(reference.state[theirs.weight]) > 0


@pytest.mark.parametrize("name", CHOICES)
def test_a_step_is_a_span_for_who_traces_and_for_nobody_else(name: str) -> None:
    of = model()
    optimizer = NamedOptimizer(of.named_parameters(), config_of(optimizer=name))
    backward(of)
    with torch.profiler.profile() as trace:
        optimizer.step()
    assert any(event.key.startswith("Optimizer.step#") for event in trace.key_averages())
    kind: Any = CHOICES[name][1]
    own = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    # If torch marks its wrapper no more, steps are right as before, and as slow.
    assert without_span(own) is not type(own).step
