"""Random numbers of a model, held constant while two passes are compared.

One process cannot draw what ranks draw: dropout on half a batch draws other masks than on the
whole. So every draw gives a constant instead, the same for every shape: dropout keeps everything,
noise is 0, a uniform number is the middle of its range. Other draws (`torch.randperm`,
`torch.multinomial`, `random`, `numpy.random`) stay random, and are reported.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SINGLE = {torch.float32, torch.complex64}
HALF = {torch.float16, torch.bfloat16}


class RandomState:
    """The state of all generators that a sample, a model or a loss may draw from."""

    def __init__(self) -> None:
        self._random, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.default_generator.get_state()
        self._cuda = _of_gpus()

    def put_back(self) -> None:
        """Restore the state of all generators."""
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def drawn_from(self) -> str:
        """Name a generator with draws since this state was recorded; '' if there is none."""
        if random.getstate() != self._random:
            return "random"
        before, now = self._numpy, np.random.get_state()
        assert isinstance(before, tuple)
        assert isinstance(now, tuple)
        if before[2:] != now[2:] or not np.array_equal(before[1], now[1]):
            return "numpy.random"
        cuda = torch.cuda.get_rng_state_all() if self._cuda else []
        same = torch.equal(torch.default_generator.get_state(), self._torch)
        if not same or not all(map(torch.equal, cuda, self._cuda)):
            return "torch"
        return ""


def _of_gpus() -> list[Tensor]:
    # Only GPUs in use: a first access would allocate GPU memory.
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if used else []


class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces torch's draws with constants, and records a draw that has no replacement."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left_random = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _FILLS:
            target = args[0] if name.endswith("_") else _undrawn(func, args, kwargs)
            return target.fill_(_FILLS[name](*_bounds(func, args, kwargs)))
        if name in ("native_dropout", "_fused_dropout"):
            keep = args[1] if name == "_fused_dropout" else 1.0 - args[1]
            training = name == "_fused_dropout" or args[2] is not False
            scaled = args[0] / max(keep, 1e-9) if training else args[0].clone()
            return scaled, torch.ones_like(args[0], dtype=torch.bool)
        changed = _without_dropout(func, args, kwargs)
        if changed is None:
            self.left_random = self.left_random or name
            return func(*args, **kwargs)
        return func(*changed[0], **changed[1])


def _undrawn(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor of a draw, and restore the generators."""
    state = RandomState()
    try:
        return func(*args, **kwargs)
    finally:
        state.put_back()


def _middle(low: float = 0.0, high: float = 1.0) -> float:
    return (low + high) / 2


def _whole_middle(low: float = 0.0, high: float = 2.0) -> float:
    return float((int(low) + int(high)) // 2)


_FILLS: dict[str, Callable[..., float]] = {
    "bernoulli": lambda *_: 1.0,
    "bernoulli_": lambda *_: 1.0,
    "rand": lambda *_: 0.5,
    "rand_like": lambda *_: 0.5,
    "uniform": _middle,
    "uniform_": _middle,
    "randn": lambda *_: 0.0,
    "randn_like": lambda *_: 0.0,
    "normal": lambda mean=0.0, *_: mean,
    "normal_": lambda mean=0.0, *_: mean,
    "normal_functional": lambda mean=0.0, *_: mean,
    "exponential_": lambda rate=1.0, *_: 1.0 / rate,
    "randint": _whole_middle,
    "randint_like": _whole_middle,
    "random_": _whole_middle,
}
"""The constant for a draw, by operation; a function of the draw's bounds."""


def _bounds(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[float]:
    """Return the bounds or other numeric parameters of a draw, in their order."""
    names = ("low", "high", "from", "to", "mean", "lambd")
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    found = [given[n] for n in names if isinstance(given.get(n), int | float)]
    if "high" in given and "low" not in given:
        return [0.0, *found]
    if set(given) & {"to"} and "from" not in given:
        return [0.0, *found]
    return found


def _without_dropout(
    func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """Return a fused layer's arguments without dropout; None if it has no dropout argument."""
    args, found = list(args), False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name not in ("dropout_p", "dropout"):
            continue
        found = True
        if place < len(args):
            args[place] = 0.0
        elif argument.name in kwargs:
            kwargs[argument.name] = 0.0
    return (args, kwargs) if found else None


class LeastPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the coarsest number type in a model's computation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.numel() > 1:
                self._seen.add(one.dtype)
        return result

    @property
    def epsilon(self) -> float:
        """Machine epsilon of that type; both half precision types count as bfloat16."""
        if self._seen & HALF:
            return torch.finfo(torch.bfloat16).eps
        return torch.finfo(torch.float32 if self._seen & SINGLE else torch.float64).eps


@contextmanager
def double_precision(wanted: bool = True) -> Iterator[None]:
    """Make float64 the default type for models and tensors, if wanted."""
    before = torch.get_default_dtype()
    if wanted:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
