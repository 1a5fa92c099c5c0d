"""Communication: a mode that sees every collective, in a real run and in a pretended one.

Collectives are operations like any other, so that a `TorchDispatchMode` sees those of DDP, FSDP,
DTensor, pipelines and our own alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from train.dryrun.op_mode import Observer
from train.parallel.layout import Layout

# By what the operation's name begins with; the first that fits. `wait_tensor` moves nothing.
KINDS = {
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
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A kind of collective among some ranks."""

    kind: str
    """The operation, such as `all-reduce`."""
    ranks: tuple[int, ...]
    """Who takes part."""
    payload: int
    """Bytes of one call: of the whole, which every rank, or one, has before or after it."""

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


class Traffic(Observer):
    """Counts calls of collectives by payload and group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Exchange] = Counter()

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count it if it is an exchange."""
        if func.namespace in NAMESPACES and (kind := _kind(func)):
            given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}
            given |= kwargs
            group = _group(given)
            if group is not None and group.size() > 1:
                self.calls[
                    Exchange(
                        kind=kind,
                        ranks=tuple(dist.get_process_group_ranks(group)),
                        payload=max(size_of(list(given.values())), size_of(result)),
                    )
                ] += 1


def size_of(values: object) -> int:
    """Add up the bytes of all tensors in a structure, the largest of its parts."""
    parts = values if isinstance(values, (list, tuple)) else [values]
    return max(
        (
            sum(t.numel() * t.element_size() for t in tree_leaves(part) if isinstance(t, Tensor))
            for part in parts
        ),
        default=0,
    )


def axis_of(ranks: Sequence[int], layout: Layout) -> str:
    """Name the axes of the layout along which some ranks differ, such as `dp_shard x cp`."""
    at = [layout.coordinates(rank) for rank in ranks]
    return " x ".join(axis for axis in layout.sizes() if len({one[axis] for one in at}) > 1)


def crosses_nodes(ranks: Sequence[int], node_size: int) -> bool:
    """Say whether ranks are on several nodes, which are filled in the order of ranks."""
    return len({rank // node_size for rank in ranks}) > 1


def _kind(func: Any) -> str | None:
    name = func._schema.name.partition("::")[2]
    return next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)


def _group(given: dict[str, Any]) -> dist.ProcessGroup | None:
    """Find the group among an operation's arguments: the object itself or its name."""
    if (boxed := given.get("process_group")) is not None:
        return dist.ProcessGroup.unbox(boxed)
    name = given.get("group_name")
    return None if name is None else _resolve_process_group(name)
