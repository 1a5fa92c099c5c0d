"""Detect data-dependent control flow in a pass, such as `if hidden.sum() > 0`.

A part of a batch has other values than the whole, and may take another branch, now or in a later
step. So it is not enough that the parts of one batch take the same branch as the whole. Each value
that Python reads from a tensor is recorded with the line of the read. Then the pass is repeated
with another answer for one of these reads. If the result changes, the line affects the result.
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
"""Largest number of reads for which a pass is repeated: the first ones."""
READS_OF_A_LINE = 3


def _forms(*names: str) -> set[Any]:
    """Return all callables of these operations: functions, methods, operators."""
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
    """A value that Python has read from a tensor."""

    module: str
    """The innermost module around the read; '' is the model."""
    line: str
    """File name and line number of the read."""
    value: Any
    """The value that Python got."""
    depends: tuple[float, ...]
    """Numbers that differ in a part of the batch, if the tensor depends on the batch."""
    answers: tuple[Any, ...]
    """Known values that a part of another batch may get instead."""


@dataclass(frozen=True)
class _Truth:
    """The origin of a tensor with one truth value; holding the tensor keeps its id() in use."""

    tensor: Tensor
    depends: tuple[float, ...]
    may_differ: bool


class _Reads(TorchFunctionMode):
    """Records the reads of tensors by Python in order, and returns the given other answers."""

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
            # Under torch.vmap, a tensor has no readable value.
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
            # For lengths, flags and arrays, other possible values are unknown.
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
        """Record the origin of a tensor with one truth value."""
        if func in _ANY or func in _ALL:
            # A part may differ only if any() is false, or all() is true, for the whole batch.
            value = bool(result.detach())
            self._remember(result, (_size(args[0]),), value == (func in _ALL))
        elif func in _ORDERS and any(map(_is_float, args)):
            numbers = tuple(_number(one) for one in args[:2] if isinstance(one, Tensor))
            self._remember(result, numbers, True)
        elif func in _ORDERS | _EQUALS and _counts(args):
            count, limit = _number(args[0]), args[1]
            _, size = self._counts.get(id(args[0]), (None, 0.0))
            # `> 0` and `>= 1` test for any.
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
    """Whether a whole number from a tensor is compared with a Python number."""
    number, limit = args[0], args[1] if len(args) > 1 else None
    whole = isinstance(number, Tensor) and number.numel() == 1 and not number.is_floating_point()
    return whole and not number.is_complex() and isinstance(limit, int | float)


def _number(tensor: Tensor) -> float:
    return tensor.detach().double().item() if tensor.numel() == 1 else 0.0


def _size(value: Any) -> float:
    return float(value.numel()) if isinstance(value, Tensor) else 0.0


def _line() -> str:
    """Return the innermost line outside torch and this file."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


@contextmanager
def reads(model: nn.Module, answers: Mapping[int, Any] | None = None) -> Iterator[list[Read]]:
    """Record the values that Python reads from tensors, in order.

    Args:
        model: the model with the modules to name.
        answers: values that Python gets instead of the tensor's value, by position of the read.
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


def by_the_batch(whole: Sequence[Read], parts: Sequence[Sequence[Read]]) -> list[int]:
    """Return the positions of reads that may differ in a part: a few for each line.

    A value of one sample, like the largest, is the same in the part with that sample, so all parts
    are compared.
    """
    found: list[int] = []
    of_line: Counter[str] = Counter()
    for place, one in enumerate(whole):
        # A part that has taken another branch is left out from there on.
        parts = [part for part in parts if part[place:] and _same_place(one, part[place])]
        if one.answers and any(part[place].depends != one.depends for part in parts):
            of_line[one.line] += 1
            if of_line[one.line] <= READS_OF_A_LINE:
                found.append(place)
    return found[:READS]


def _same_place(one: Read, other: Read) -> bool:
    return (one.module, one.line) == (other.module, other.line)
