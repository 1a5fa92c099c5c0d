"""Seeing every operation of torch as it is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations on plain tensors while it is entered, in backward passes too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Those on tensors that consist of others, such as DTensors, will come again in parts.
        if wraps_others(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.seen(func, args, kwargs, result)
        return result

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take notice of an operation that has been carried out."""


def wraps_others(types: Sequence[type]) -> bool:
    """Say whether tensors of these types consist of others."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)
