"""Counters of one step: memory, traffic between ranks, and floating-point operations.

Each counter is a `TorchDispatchMode`. Collectives are operations like any other, so that one mode
sees those of DDP, FSDP, DTensor, pipelines and our own alike, with real and with fake tensors.

torch has a similar mode for each, which falls short of a dry run:

- `FlopCounterMode` has no formula for the CPU's attention.
- `MemTracker` fixes the kind of each tensor when the peak occurs. But a gradient is recognised only
  later, and `--cpu-offload` needs the peak without the kinds in host memory.
- `CommDebugMode` counts calls by operator: without bytes, without the ranks that take part, and
  without messages from rank to rank.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..parallel.base import local
from ..parallel.layout import Layout

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
COMMUNICATION = "communication"
STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)
"""The kinds of memory of each parameter."""
MEMORY_KINDS = (*STATE, ACTIVATIONS, COMMUNICATION)

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
EXCHANGES = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather": "all-gather",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "_reduce_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "receive",
    "isend": "send",
    "irecv": "receive",
    "barrier": "barrier",
}
"""Collectives by the first prefix that fits the operation's name. `wait_tensor` moves nothing."""

_aten = torch.ops.aten
_SAME_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
"""torch's table has formulas for the GPU's attention only."""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations on plain tensors while entered, including backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations on wrapper tensors, such as DTensors, are dispatched again for their parts.
        if wraps_others(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count(func, args, kwargs, result)
        return result

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operation that has been carried out."""


def wraps_others(types: Sequence[type]) -> bool:
    """Whether tensors of these types consist of other tensors."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


class Flops(OperationCounter):
    """Counts matrix products and attention with torch's formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the operation's FLOPs."""
        operation = func._overloadpacket
        formula = flop_registry.get(_SAME_FLOPS.get(operation, operation))
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)


class Memory(OperationCounter):
    """Records the size of each storage over time.

    The purpose of a storage, such as a gradient, is often known only later. So the counter keeps a
    log of sizes, and `peak()` reads the log from its start.
    """

    def __init__(self) -> None:
        super().__init__()
        # (number of a storage, growth in bytes), in chronological order.
        self._log: list[tuple[int, int]] = []
        self._kinds: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        # Living storages by address: their number, and a reference that records their end.
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __enter__(self) -> "Memory":
        """Also watch `resize_`, a storage method that FSDP uses to empty and refill storages."""
        resize = torch.UntypedStorage.resize_

        def recorded(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._record(storage)
            return result

        self._resize = patch.object(torch.UntypedStorage, "resize_", recorded)
        self._resize.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._resize.stop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the storages of an operation's results."""
        for tensor in _tensors(result):
            self._record(tensor.untyped_storage())
        # The tensors of these are buffers of a collective. Those of tensor parallelism
        # (`_c10d_functional`) exchange activations as they are.
        if func.namespace in ("c10d", "fsdp"):
            for tensor in _tensors((args, kwargs, result)):
                self._kinds.setdefault(self._record(tensor.untyped_storage()), COMMUNICATION)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of the tensors' storages."""
        for tensor in tensors:
            self._kinds[self._record(local(tensor).untyped_storage())] = kind

    def reset_peak(self) -> None:
        """Start the log now, with the existing storages."""
        self._log = [(number, size) for number, size in self._sizes.items() if size]

    def peak(self, without: Sequence[str] = ()) -> dict[str, int]:
        """Return the bytes of each kind when their sum is largest; kinds `without` do not count."""
        now = dict.fromkeys(MEMORY_KINDS, 0)
        total, best, at_peak = 0, -1, now
        for number, growth in self._log:
            kind = self._kinds.get(number, ACTIVATIONS)
            now[kind] += growth
            if kind in without:
                continue
            total += growth
            if total > best:
                best, at_peak = total, dict(now)
        return at_peak

    def _record(self, storage: torch.UntypedStorage) -> int:
        """Log a storage that is new or has another size; return its number."""
        address = storage._cdata
        if address in self._living:
            number = self._living[address][0]
        else:
            number = len(self._sizes) + 1
            self._sizes[number] = 0

            def ended(_: object) -> None:
                del self._living[address]
                self._log.append((number, -self._sizes[number]))
                self._sizes[number] = 0

            self._living[address] = (number, weakref.ref(storage, ended))
        if growth := storage.nbytes() - self._sizes[number]:
            self._sizes[number] += growth
            self._log.append((number, growth))
        return number


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A kind of collective among some ranks."""

    kind: str
    """The operation, such as `all-reduce`."""
    ranks: tuple[int, ...]
    """The ranks that take part."""
    payload: int
    """Bytes of one call: the whole buffer, which every rank, or one, has before or after it."""

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, with the algorithm that sends least: a ring."""
        count = len(self.ranks)
        match self.kind:
            case "all-reduce":
                return 2 * self.payload * (count - 1) / count
            case "all-gather" | "reduce-scatter" | "all-to-all":
                return self.payload * (count - 1) / count
            case "receive" | "barrier":
                return 0.0
            case _:
                return float(self.payload)

    def leaves_a_node(self, node_size: int) -> float:
        """Return the bytes that a node sends to others if all of its ranks make such a call.

        A ring leaves a node at one of its ranks, and so do a pipeline's activations. In an
        all-to-all, every rank sends to every other one.
        """
        here = [rank for rank in self.ranks if rank // node_size == self.ranks[0] // node_size]
        if len(here) == len(self.ranks):
            return 0.0
        if self.kind == "all-to-all":
            return node_size * self.payload * (1 - len(here) / len(self.ranks))
        return node_size / len(here) * self.sent

    def axes(self, layout: Layout) -> str:
        """Name the axes of the layout along which the ranks differ, such as `dp_shard x cp`."""
        places = [layout.coordinates(rank) for rank in self.ranks]
        return " x ".join(axis for axis in layout.sizes() if len({at[axis] for at in places}) > 1)


class Traffic(OperationCounter):
    """Counts calls of collectives by payload and group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Exchange] = Counter()

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count the operation if it is a collective of several ranks."""
        name = func._schema.name.partition("::")[2]
        kind = next((kind for prefix, kind in EXCHANGES.items() if name.startswith(prefix)), None)
        if kind is None or func.namespace not in NAMESPACES:
            return
        arguments = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        # The group itself, or its name.
        if (boxed := arguments.get("process_group")) is not None:
            group = dist.ProcessGroup.unbox(boxed)
        elif (group_name := arguments.get("group_name")) is not None:
            group = _resolve_process_group(group_name)
        else:
            return
        if group.size() > 1:
            # The larger of inputs and outputs is the whole buffer.
            values = [
                *arguments.values(),
                *(result if isinstance(result, (list, tuple)) else [result]),
            ]
            payload = max(sum(tensor.nbytes for tensor in _tensors(value)) for value in values)
            ranks = tuple(dist.get_process_group_ranks(group))
            self.calls[Exchange(kind=kind, ranks=ranks, payload=payload)] += 1


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
