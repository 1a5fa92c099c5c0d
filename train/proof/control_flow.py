"""Does a pass have data-dependent control flow, as `if hidden.sum() > 0` is?

A part of a batch has other numbers than the whole, and may take another way, if not now then later.
So it is not enough that the parts of one batch go where the whole goes. What Python reads of a
tensor is noted with the line that reads it; the pass is then made again with another answer for one
of these lines, and where its result is another one, the line decides.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

READS = 32
"""Reads of a pass for which it is made again: the first ones."""
READS_OF_A_LINE = 3


def _forms(*names: str) -> set[Any]:
    """Return what these operations are called by: functions, methods, operators."""
    places = ((torch, "{}"), (Tensor, "{}"), (Tensor, "__{}__"))
    forms = {getattr(place, form.format(name), None) for name in names for place, form in places}
    return forms - {None}


_ORDERS = _forms("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal")
_EQUALS = _forms("eq", "ne", "not_equal")
_ANY, _ALL, _SAME = _forms("any"), _forms("all"), _forms("equal", "allclose")
_COUNTS = _forms("sum", "count_nonzero")
_TRUTHS = {Tensor.__bool__, Tensor.item, torch.is_nonzero}
_NUMBERS = {Tensor.item, Tensor.__float__}
_OTHERS = {Tensor.__int__, Tensor.__index__, Tensor.tolist, Tensor.numpy, Tensor.__array__}
_TORCH = f"{Path(torch.__file__).parent}/"


@dataclass(frozen=True, kw_only=True)
class Read:
    """What Python has read of a tensor."""

    module: str
    """The innermost module whose forward() has read it; '' is the model."""
    line: str
    """The name of the file, and the number of the line."""
    value: Any
    """What Python got."""
    depends: tuple[float, ...]
    """What a part of the batch has otherwise, where the tensor depends on the batch."""
    answers: tuple[Any, ...]
    """What a part of another batch may get, as far as that is known."""


@dataclass(frozen=True)
class _Truth:
    """How a tensor with one truth value came about; the tensor keeps its number in memory."""

    tensor: Tensor
    depends: tuple[float, ...]
    may_differ: bool


class _Reads(TorchFunctionMode):
    """Notes what Python reads, in its order, and gives other answers where told to."""

    def __init__(self, module: Callable[[], str], answers: Mapping[int, Any]) -> None:
        super().__init__()
        self.found: list[Read] = []
        self._module, self._answers = module, answers
        self._truths: dict[int, _Truth] = {}
        self._counts: dict[int, tuple[Tensor, float]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SAME:
            return self._read(result, (_size(args[0]),), (False,) if result else ())
        if func in _COUNTS and isinstance(result, Tensor) and result.numel() == 1:
            self._counts[id(result)] = result, _size(args[0])
        if _is_truth(result):
            # Under torch.vmap, a tensor has no number.
            with suppress(RuntimeError):
                self._note(func, args, result)
        known = self._truths.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if func in _TRUTHS and known:
            return self._read(result, known.depends, (not result,) if known.may_differ else ())
        if func is Tensor.__bool__ and _is_float(args[0]):
            return self._read(result, (_number(args[0]),), (not result,))
        if func in _NUMBERS and _is_float(args[0]):
            nearer = (-result, 0.0, result + 1.0, result - 1.0)
            further = (10.0 + 10.0 * result, -10.0 - 10.0 * result, 1e4 * result)
            return self._read(result, (result,), nearer + further)
        if func is Tensor.__int__ and _is_float(args[0]):
            return self._read(result, (_number(args[0]),), (result + 1, result - 1))
        if func in _TRUTHS | _OTHERS:
            # Lengths, flags, arrays: what else they might be is not known.
            return self._read(result, (), ())
        return result

    def _read(self, value: Any, depends: tuple[float, ...], answers: tuple[Any, ...]) -> Any:
        answer = self._answers.get(len(self.found), value)
        read = Read(
            module=self._module(), line=_line(), value=value, depends=depends, answers=answers
        )
        self.found.append(read)
        return answer

    def _note(self, func: Any, args: Sequence[Any], result: Tensor) -> None:
        """Remember how a tensor with one truth value came about."""
        if func in _ANY or func in _ALL:
            # That some sample has it says nothing of another one: the whole must have none.
            value = bool(result.detach())
            self._remember(result, (_size(args[0]),), value == (func in _ALL))
        elif func in _ORDERS and any(map(_is_float, args)):
            numbers = tuple(_number(one) for one in args[:2] if isinstance(one, Tensor))
            self._remember(result, numbers, True)
        elif func in _ORDERS | _EQUALS and _counts(args):
            count, limit = _number(args[0]), args[1]
            _, size = self._counts.get(id(args[0]), (None, 0.0))
            # `> 0` and `>= 1` ask whether there is any.
            if limit in (0, 1) or func in _ORDERS:
                self._remember(result, (count, size), limit not in (0, 1) or count == 0)
        else:
            known = (self._truths.get(id(one)) for one in args if isinstance(one, Tensor))
            if first := next(filter(None, known), None):
                self._remember(result, first.depends, first.may_differ)

    def _remember(self, result: Tensor, depends: tuple[float, ...], may_differ: bool) -> None:
        self._truths[id(result)] = _Truth(result, depends, may_differ)


def _is_truth(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.numel() == 1


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _counts(args: Sequence[Any]) -> bool:
    """Whether a whole number of a tensor is compared with one that is written down."""
    number, limit = args[0], args[1] if len(args) > 1 else None
    whole = isinstance(number, Tensor) and number.numel() == 1 and not number.is_floating_point()
    return whole and not number.is_complex() and isinstance(limit, int | float)


def _number(tensor: Tensor) -> float:
    return tensor.detach().double().item() if tensor.numel() == 1 else 0.0


def _size(value: Any) -> float:
    return float(value.numel()) if isinstance(value, Tensor) else 0.0


def _line() -> str:
    """Return the innermost line that is not one of torch or of this file."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


@contextmanager
def reads(model: nn.Module, answers: Mapping[int, Any] | None = None) -> Iterator[list[Read]]:
    """Note what Python reads of tensors, in its order.

    Args:
        model: whose modules are named.
        answers: what Python gets instead of the tensor's number, by place in that order.
    """
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
        with _Reads(lambda: inside[-1], answers or {}) as mode:
            yield mode.found
    finally:
        for handle in handles:
            handle.remove()


def by_the_batch(whole: Sequence[Read], part: Sequence[Read]) -> list[int]:
    """Return the places of what may be another number in a part: some for each line."""
    found: list[int] = []
    of_line: Counter[str] = Counter()
    for place, (one, other) in enumerate(zip(whole, part, strict=False)):
        if (one.module, one.line) != (other.module, other.line):
            break  # it has gone another way
        if one.depends != other.depends and one.answers:
            of_line[one.line] += 1
            if of_line[one.line] <= READS_OF_A_LINE:
                found.append(place)
    return found[:READS]
