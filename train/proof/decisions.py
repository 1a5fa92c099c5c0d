"""Does a model decide by a number of its batch, as in `if hidden.sum() > 0`?

A part of the batch has another number and may decide otherwise, if not now then later: so what
counts is that it decides at all, and not what.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_COMPARISONS = ("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal")
_COMPARES = {
    function
    for name in _COMPARISONS
    for place in (torch, Tensor)
    for function in (getattr(place, name, None), getattr(place, f"__{name}__", None))
    if function is not None
}

Decision = tuple[str, float]
"""The name of the module, and the number by which it decides."""


class _Read(float):
    """What `item()` gives: a number that tells when Python compares it."""

    tell: Callable[[float], None]

    def _compared(self, name: str, other: Any) -> Any:
        self.tell(float(self))
        return getattr(float, name)(float(self), other)

    def __gt__(self, other: Any) -> Any:
        return self._compared("__gt__", other)

    def __ge__(self, other: Any) -> Any:
        return self._compared("__ge__", other)

    def __lt__(self, other: Any) -> Any:
        return self._compared("__lt__", other)

    def __le__(self, other: Any) -> Any:
        return self._compared("__le__", other)


class _Watch(TorchFunctionMode):
    """Notes which single numbers are compared and then read by Python."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        super().__init__()
        self._tell = tell
        self._compared: dict[int, tuple[Tensor, float]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COMPARES and _is_number(args[0]):
            # With the tensor, so that no other one gets its number.
            self._compared[id(result)] = result, args[0].detach().double().item()
        elif func in (Tensor.__bool__, Tensor.item) and id(args[0]) in self._compared:
            self._tell(self._compared[id(args[0])][1])
        elif func is Tensor.__bool__ and _is_number(args[0]):
            self._tell(args[0].detach().double().item())
        elif func is Tensor.item and _is_number(args[0]):
            result = _Read(result)
            result.tell = self._tell
        return result


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


@contextmanager
def decisions_of(model: nn.Module) -> Iterator[list[Decision]]:
    """Note by which numbers a model decides in its passes, in their order."""
    found: list[Decision] = []
    inside = [""]
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        inside.append(names[module])

    def leave(*_: Any) -> None:
        inside.pop()

    handles = [
        handle
        for module in names
        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
        )
    ]
    try:
        with _Watch(lambda number: found.append((inside[-1], number))):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def by_the_batch(whole: Sequence[Decision], part: Sequence[Decision]) -> Decision | None:
    """Return a decision that the whole batch and a part of it make by different numbers."""
    for one, other in zip(whole, part, strict=False):
        if one[0] != other[0]:
            break  # it has decided otherwise, and went another way
        if one[1] != other[1]:
            return one
    return None
