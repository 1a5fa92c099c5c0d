"""What a rank's memory holds: a mode that notes each storage as it comes and goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from train.dryrun.op_mode import Observer
from train.parallel.base import local

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
COMMUNICATION = "communication"
# The kinds of memory of each parameter.
STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)
KINDS = (*STATE, ACTIVATIONS, COMMUNICATION)
# Operations whose tensors are buffers of an exchange. Those of tensor parallelism
# (`_c10d_functional`) exchange activations as they are.
EXCHANGES = ("c10d", "fsdp")


class Memory(Observer):
    """Notes how large each storage is, and when.

    What a storage is for is often known only later, a gradient's for instance. So this keeps a
    diary, and `peak()` reads it from the start.
    """

    def __init__(self) -> None:
        super().__init__()
        # (number of a storage, by how much it has grown), in the order of time.
        self._diary: list[tuple[int, int]] = []
        self._kinds: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        # Living storages by address: their number, and a reference that notes their end.
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._resize: Any = None

    def __enter__(self) -> Memory:
        """Watch non-operations as well: FSDP empties storages and fills them again."""
        self._resize = resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note(storage)
            return result

        setattr(torch.UntypedStorage, "resize_", noted)  # noqa: B010  # its type is another's
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop watching."""
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the storages of an operation's results; those of exchanges are for them."""
        for tensor in _tensors(result):
            self._note(tensor.untyped_storage())
        if func.namespace in EXCHANGES:
            for tensor in _tensors((args, kwargs, result)):
                self._kinds.setdefault(self._note(tensor.untyped_storage()), COMMUNICATION)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what tensors are for."""
        for tensor in tensors:
            self._kinds[self._note(local(tensor).untyped_storage())] = kind

    def forget_the_past(self) -> None:
        """Start the record now, with the existing storages."""
        self._diary = [(number, size) for number, size in self._sizes.items() if size]

    def peak(self, without: Iterable[str] = ()) -> dict[str, int]:
        """Give the bytes of each kind when all together were most.

        Args:
            without: kinds that are kept elsewhere.
        """
        elsewhere = set(without)
        now = dict.fromkeys(KINDS, 0)
        total, best, at_peak = 0, -1, now
        for number, growth in self._diary:
            kind = self._kinds.get(number, ACTIVATIONS)
            now[kind] += growth
            if kind in elsewhere:
                continue
            total += growth
            if total > best:
                best, at_peak = total, dict(now)
        return at_peak

    def _note(self, storage: torch.UntypedStorage) -> int:
        """Write down a storage that is new, or has another size; give its number."""
        address = storage._cdata
        if address in self._living:
            number = self._living[address][0]
        else:
            number = len(self._sizes) + 1
            self._sizes[number] = 0

            def ended(_: object) -> None:
                del self._living[address]
                self._diary.append((number, -self._sizes[number]))
                self._sizes[number] = 0

            self._living[address] = (number, weakref.ref(storage, ended))
        if growth := storage.nbytes() - self._sizes[number]:
            self._sizes[number] += growth
            self._diary.append((number, growth))
        return number


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
