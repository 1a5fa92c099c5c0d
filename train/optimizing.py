"""The optimizer, and its state under the names of the parameters it belongs to."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class NamedOptimizer:
    """AdamW whose state is a flat dictionary of tensors, as `<parameter>/<slot>`.

    torch numbers parameters by their order; names survive a change of strategy.
    """

    def __init__(self, parameters: Iterator[tuple[str, nn.Parameter]], *, lr: float) -> None:
        """Optimize the strategy's parameters, after it has wrapped the model."""
        self._parameters = dict(parameters)
        self._adamw = torch.optim.AdamW(self._parameters.values(), lr=lr)

    def step(self) -> None:
        """Update the parameters and forget their gradients."""
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Give the whole state; empty before the first step."""
        return {
            f"{name}/{slot}": value
            for name, parameter in self._parameters.items()
            for slot, value in self._adamw.state[parameter].items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put a state in place; hyperparameters are not in it, but on the command line."""
        state: dict[int, dict[str, Tensor]] = {}
        numbers = {name: number for number, name in enumerate(self._parameters)}
        for key, tensor in tensors.items():
            name, _, slot = key.rpartition("/")
            state.setdefault(numbers[name], {})[slot] = tensor
        # Through load_state_dict, which knows what belongs on which device.
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": state})
