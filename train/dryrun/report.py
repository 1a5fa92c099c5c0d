"""The findings of a dry run: as data, as JSON for programs, and as tables for people."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..parallel.layout import Layout, counted
from ..runtime.devices import written
from .counters import Exchange
from .simulate import RankCost

NOTES = (
    "Counted while the real strategy made a step with tensors that have no memory, on one rank of "
    "each stage. By formula: sent, and what leaves a node (rings), waiting (equal stages, a "
    "backward pass twice a forward pass).",
    "Counted for CUDA GPUs, whatever this machine has: where autocast keeps float32, fused AdamW, "
    "attention without a matrix. Work: matrix products and attention, and causal attention "
    "as a full square, although kernels leave out up to half of it.",
    "Not counted: what kernels use inside (cuBLAS, attention, NCCL), fragmentation, and the data "
    "set; allow some GiB on a GPU. "
    "Communication: what FSDP gathers, gradients until it shares them out, buffers of exchanges.",
)
"""Figures that are not measured on the strategy's code, or that differ on real devices."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Traffic of one rank along some axes in one kind of collective, per step."""

    axes: str
    """Along which axes of the mesh, such as `dp_shard x cp`."""
    kind: str
    """The operation, such as `all-gather`."""
    ranks: int
    """How many ranks take part."""
    calls: float
    """Calls per step; a fraction if not in every step."""
    payload: float
    """Bytes of all calls: the whole buffer that is gathered, reduced or sent."""
    sent: float
    """Bytes that the rank sends with ring algorithms."""
    leaves_a_node: float
    """Bytes that all ranks of a node send to other nodes in these collectives."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A plan and its cost."""

    task: str
    """Name of the task."""
    strategy: str
    """Name of the strategy."""
    layout: Layout
    """The mesh of ranks."""
    node_size: int
    """Ranks on a node; nodes are filled in the order of ranks."""
    global_batch: int
    """Samples per step."""
    schedule: str | None
    """The pipeline's schedule, if there is a pipeline."""
    parameters: int
    """Number of parameters of the whole model."""
    ranks: Sequence[RankCost]
    """Cost of the rank with the most work in each stage."""
    bubbles: Mapping[str, float]
    """Share of the time that ranks of a pipeline wait, by schedule."""
    limit: int | None
    """Bytes of a device."""
    misfits: Sequence[str]
    """The problems of the plan."""
    no_proof: str
    """Why the plan cannot be proved at the first start on such devices; empty: no problem."""

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return math.ceil(self.layout.world_size / self.node_size)

    def neighbours(self, axis: str) -> list[int]:
        """Return the ranks in rank 0's group along an axis."""
        sizes = self.layout.sizes()
        stride = math.prod(list(sizes.values())[list(sizes).index(axis) + 1 :])
        return [number * stride for number in range(sizes[axis])]

    def crosses_nodes(self, ranks: Sequence[int]) -> bool:
        """Whether ranks are on several nodes."""
        return len({rank // self.node_size for rank in ranks}) > 1

    def flows(self, rank: RankCost) -> list[Flow]:
        """Add up a rank's exchanges by axes and kind, the largest first."""
        groups: dict[tuple[str, str], dict[Exchange, float]] = {}
        for exchange, count in rank.traffic.items():
            key = (exchange.axes(self.layout), exchange.kind)
            groups.setdefault(key, {})[exchange] = count
        flows = [
            Flow(
                axes=axes,
                kind=kind,
                ranks=len(next(iter(calls)).ranks),
                calls=sum(calls.values()),
                payload=sum(exchange.payload * n for exchange, n in calls.items()),
                sent=sum(exchange.sent * n for exchange, n in calls.items()),
                leaves_a_node=sum(
                    exchange.leaves_a_node(self.node_size) * n for exchange, n in calls.items()
                ),
            )
            for (axes, kind), calls in groups.items()
        ]
        return sorted(flows, key=lambda flow: -flow.payload)

    def as_dict(self) -> dict[str, Any]:
        """Return all findings as JSON types."""
        return {
            "task": self.task,
            "strategy": self.strategy,
            "layout": self.layout.sizes(),
            "world_size": self.layout.world_size,
            "nodes": self.nodes,
            "nproc_per_node": self.node_size,
            "global_batch": self.global_batch,
            "shards": self.layout.shards,
            "parameters": self.parameters,
            "schedule": self.schedule,
            "bubbles": dict(self.bubbles),
            "device_memory": self.limit,
            "fits": not self.misfits,
            "misfits": list(self.misfits),
            "no_proof": self.no_proof,
            "ranks": [
                {
                    "rank": rank.rank,
                    "coordinates": self.layout.coordinates(rank.rank),
                    **vars(rank),
                    "gradient_sync": rank.gradient_sync and dataclasses.asdict(rank.gradient_sync),
                    "traffic": [dataclasses.asdict(flow) for flow in self.flows(rank)],
                }
                for rank in self.ranks
            ],
        }

    def lines(self) -> Iterator[str]:
        """Format the findings as tables and sentences for people."""
        for section in (self._plan, self._memory, self._traffic, self._work, self._verdict):
            yield from section()
            yield ""
        yield from NOTES

    def _plan(self) -> Iterator[str]:
        layout = self.layout
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes of {self.node_size}"
        yield (
            f"{self.task}: {self.parameters:,} parameters, {self.strategy} on "
            f"{counted(layout.world_size, 'rank')} ({nodes})"
        )
        rows = [("axis", "ranks", "with rank 0", "")]
        for axis, size in layout.sizes().items():
            if size > 1:
                ranks = self.neighbours(axis)
                where = "across nodes" if self.crosses_nodes(ranks) else "within a node"
                first = " ".join(map(str, ranks if size <= 8 else ranks[:4]))
                rows.append(
                    (axis, str(size), first if size <= 8 else f"{first} … {ranks[-1]}", where)
                )
        if len(rows) > 1:
            yield from _table(rows)
        one = self.ranks[0]
        yield (
            f"global batch: {self.global_batch} samples = {counted(layout.shards, 'shard')} x "
            f"{counted(one.micro_batches, 'micro-batch')} of up to {one.micro_batch}; evaluation: "
            f"up to {one.eval_batch} per rank at a time"
        )

    def _memory(self) -> Iterator[str]:
        kinds = list(self.ranks[0].memory)
        rows = [("memory per rank at its peak", *kinds, "total", "")]
        rows += [
            (
                name,
                *(written(rank.memory[kind]) for kind in kinds),
                written(rank.total),
                f"in {rank.peak}",
            )
            for name, rank in self._named_ranks()
        ]
        yield from _table(rows)
        if host := self.ranks[0].host_memory:
            parts = ", ".join(f"{written(size)} {kind}" for kind, size in host.items())
            yield f"and in the host's memory: {parts}"
        if gradient_sync := str(self.ranks[0].gradient_sync or ""):
            yield gradient_sync

    def _traffic(self) -> Iterator[str]:
        titles = ("along", "collective", "calls", "bytes", "sent by a rank", "leaves a node")
        rows = [
            (
                name,
                f"{flow.axes} ({flow.ranks})",
                flow.kind,
                f"{flow.calls:g}",
                written(flow.payload),
                written(flow.sent),
                written(flow.leaves_a_node),
            )
            for name, rank in self._named_ranks()
            for flow in self.flows(rank)
        ]
        yield from (
            _table([("on the wire per step", *titles), *rows]) if rows else ["on the wire: nothing"]
        )

    def _work(self) -> Iterator[str]:
        for name, rank in self._named_ranks():
            units = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9))
            unit, factor = next((u for u in units if rank.flops >= u[1]), ("MFLOP", 1e6))
            yield f"work per step: {name} {rank.flops / factor:,.2f} {unit}"
        if self.bubbles:
            chosen = self.schedule or ""
            others = ", ".join(
                f"{name} {share:.1%}" for name, share in self.bubbles.items() if name != chosen
            )
            yield (
                f"waiting: ranks of the pipeline are idle {self.bubbles[chosen]:.1%} of the time "
                f"with {chosen}; {others}"
            )

    def _verdict(self) -> Iterator[str]:
        if self.limit is None:
            yield "fits? say what a device has: --device-memory 80GiB"
        elif not self.misfits:
            most = max(rank.total for rank in self.ranks)
            yield f"fits: {written(most)} of {written(self.limit)} ({most / self.limit:.0%})"
        else:
            yield from (f"does not fit: {misfit}" for misfit in self.misfits)
        if self.no_proof:
            yield f"no proof before training: {self.no_proof}"

    def _named_ranks(self) -> Iterator[tuple[str, RankCost]]:
        for stage, rank in enumerate(self.ranks):
            name = f"rank {rank.rank}"
            yield (name if self.layout.pp == 1 else f"pp {stage} ({name})"), rank


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Align columns: the first to the left, numbers to the right."""

    def is_figure(cell: str) -> bool:
        """Whether a column, by its last cell, has numbers: `12`, `1.5 GiB`, but not `0 4 8`."""
        first, _, rest = cell.replace(",", "").partition(" ")
        return first.replace(".", "").isdigit() and not rest[:1].isdigit() and "…" not in rest

    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if is_figure(rows[-1][column]) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
