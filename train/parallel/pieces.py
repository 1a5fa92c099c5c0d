"""Check that a task's pieces, one after another, make up the forward pass of its model.

A pipeline runs only the pieces: other operations of the model's `forward()` (a factor, a sum, a
branch around a piece) would be left out without an error. Sharded data parallel gathers a piece's
parameters only while that piece runs.

Before the first step, two samples go through the model and through its pieces. The two sequences of
operations are compared on the device `meta`, at almost no cost. If a model's branches depend on its
data, the outputs are compared on the CPU instead.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..data.order import Batch
from ..errors import UsageError
from ..model.trees import Tree, mapped, near, tensors_of
from .base import Parts

FAR = 1e-6
"""Largest difference relative to the norm of the outputs; both run the same operations."""
MOST_READS = 1000
"""Reads of numbers from its data after which a model is considered to loop."""


def check_complete(parts: Parts, batch: Batch, *, flags: str) -> None:
    """Make sure, with two samples of rank 0, that the model runs its pieces and nothing else.

    Messages name `flags`, which run the pieces separately.

    Raises:
        UsageError: on all ranks; the model differs from its pieces.
    """
    problem = ""
    if parts.group.rank_info.rank == 0 and len(batch):
        problem = _difference(parts, batch.part(0, 2).inputs)
    if problem := parts.group.broadcast(problem):
        raise UsageError(
            f"{flags}: the pieces of task {parts.task.name!r}, one after the other, do not compute "
            f"what its model does: {problem}; move that into one of the modules that pieces() "
            "names, or use --strategy fsdp"
        )


def check_at_home(parts: Parts, batch: Batch, units: Sequence[str], *, flags: str) -> None:
    """Make sure that parameters gathered for a piece are used in that piece only.

    `units` are the pieces that become separate units with `flags`.

    Raises:
        UsageError: on all ranks; names the parameter.
    """
    if not units or not len(batch):
        return
    abroad: list[tuple[str, str]] = []
    # Tensors on `meta` have no values: try both directions of a branch on them.
    for number in (0, 1):
        record = _Record(number)
        # If the model cannot run there, torch refuses it at the first step.
        with suppress(Exception):
            model = parts.sketch(torch.device("meta"))
            record.watch(model, units)
            _run(model, batch.part(0, 1).inputs, record)
        abroad += record.abroad
    for name, piece in abroad:
        raise UsageError(
            f"{flags}: parameter {name!r} of task {parts.task.name!r} is used outside of piece "
            f"{piece!r}, for which alone it is gathered; share it between two modules "
            "(`head.weight = embedding.weight`) instead, or have pieces() name '' (the whole "
            "model), or use --strategy ddp"
        )


def looks_at_data(parts: Parts, batch: Batch) -> bool:
    """Whether the model reads a number from its data (`item()`, or `if` on a tensor)."""
    record = _Record()
    with suppress(Exception):
        _run(parts.sketch(torch.device("meta")), batch.part(0, 1).inputs, record)
    return any(name.startswith("aten._local_scalar_dense") for name, _, _ in record.operations)


_Operation = tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]
"""An operation's name, its parameters, and the shapes of all its tensors."""


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a forward pass, and their parameters."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The number returned for each read of a value on `meta`, and the count of reads.
        self._number, self._reads = number, 0
        self.operations: list[_Operation] = []
        self.abroad: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}
        self._homes: dict[int, str] = {}
        self._running: list[str] = []

    def watch(self, model: nn.Module, pieces: Sequence[str]) -> None:
        for name, parameter in model.named_parameters():
            self._names[id(parameter)] = name
        for piece in pieces:
            module = model.get_submodule(piece)
            self._homes |= {id(p): piece for p in module.parameters()}
            module.register_forward_pre_hook(lambda *_, piece=piece: self._running.append(piece))
            module.register_forward_hook(lambda *_: self._running.pop() and None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = tensors_of((args, dict(kwargs or {})))
        names = tuple(self._names[id(t)] for t in tensors if id(t) in self._names)
        shapes = tuple(tuple(t.shape) for t in tensors)
        self.operations.append((str(func), names, shapes))
        for tensor in tensors:
            home = self._homes.get(id(tensor))
            if home is not None and home not in self._running:
                self.abroad.append((self._names[id(tensor)], home))
        if self._number is not None and func is torch.ops.aten._local_scalar_dense.default:
            self._reads += 1
            if self._reads > MOST_READS:
                raise RuntimeError("a loop that ends by its data")
            return torch.tensor(self._number, dtype=tensors[0].dtype).tolist()
        return func(*args, **(kwargs or {}))


def _difference(parts: Parts, inputs: Tree) -> str:
    """Describe how the model differs from its pieces; '' if it does not."""
    try:
        model = parts.sketch(torch.device("meta"))
        whole, apart = _Record(), _Record()
        for record, run in ((whole, model), (apart, _in_turn(model, parts))):
            record.watch(model, ())
            _run(run, inputs, record)
    except Exception:
        model = parts.sketch(torch.device("cpu")).eval()
        given = mapped(lambda t: t.cpu() if isinstance(t, Tensor) else t, inputs)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            of_model = tensors_of(model(given))
            of_pieces = tensors_of(_in_turn(model, parts)(given))
        same = len(of_model) == len(of_pieces) and all(
            a.shape == b.shape and near(a, b, FAR) for a, b in zip(of_model, of_pieces, strict=True)
        )
        return "" if same else "for the same sample other numbers come out"
    if whole.operations == apart.operations:
        return ""
    pairs = zip([*whole.operations, None], [*apart.operations, None], strict=False)
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{_described(one)} in the model, {_described(other)} in the pieces"


def _in_turn(model: nn.Module, parts: Parts) -> nn.Module:
    return nn.Sequential(*map(model.get_submodule, parts.task.pieces(model)))


def _run(model: nn.Module, inputs: Tree, record: _Record) -> None:
    given = mapped(lambda t: t.to("meta") if isinstance(t, Tensor) else t, inputs)
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), record:
        model(given)


def _described(operation: _Operation | None) -> str:
    if operation is None:
        return "nothing more"
    name, parameters, shapes = operation
    of = f" of {', '.join(parameters)}" if parameters else ""
    return f"{name}{of} {' '.join(str(list(shape)) for shape in shapes)}"
