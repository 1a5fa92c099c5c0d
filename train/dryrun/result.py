"""All that a dry run finds out, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from train.dryrun.simulate import Rehearsed
from train.dryrun.traffic import Exchange, axis_of, crosses_nodes
from train.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What a rank exchanges along some axes in one kind of collective, in one step."""

    axes: str
    """Along which axes of the mesh, such as `dp_shard x cp`."""
    kind: str
    """The operation, such as `all-gather`."""
    ranks: int
    """How many take part."""
    calls: float
    """How often; a fraction if not in every step."""
    payload: float
    """Bytes of all calls: the whole buffer that is gathered, reduced or sent."""
    sent: float
    """Bytes that the rank sends, if rings are used."""
    crosses_nodes: bool
    """Whether the ranks are on several nodes."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A plan and its cost."""

    task: str
    """The task."""
    strategy: str
    """How."""
    layout: Layout
    """On which ranks."""
    node_size: int
    """How many of them are on a node."""
    global_batch: int
    """Samples per step."""
    schedule: str | None
    """Of the pipeline, if there is one."""
    parameters: int
    """Of the whole model, in numbers."""
    ranks: Sequence[Rehearsed]
    """The rank with the most to do, of each stage."""
    bubbles: Mapping[str, float]
    """Share of the time that ranks of a pipeline wait, by schedule."""
    limit: int | None
    """Bytes of a device."""
    misfits: Sequence[str]
    """The problems of the plan."""

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return math.ceil(self.layout.world_size / self.node_size)

    def neighbours(self, axis: str) -> list[int]:
        """Number the ranks that rank 0 meets along an axis."""
        sizes = list(self.layout.sizes().items())
        names = [name for name, _ in sizes]
        stride = math.prod(size for _, size in sizes[names.index(axis) + 1 :])
        return [number * stride for number in range(self.layout.sizes()[axis])]

    def flows(self, rank: Rehearsed) -> list[Flow]:
        """Add up a rank's exchanges by axes and kind, the largest first."""
        calls: dict[tuple[str, str], dict[Exchange, float]] = {}
        for exchange, count in rank.traffic.items():
            key = (axis_of(exchange.ranks, self.layout), exchange.kind)
            calls.setdefault(key, {})[exchange] = count
        flows = [
            Flow(
                axes=axes,
                kind=kind,
                ranks=len(next(iter(counted)).ranks),
                calls=sum(counted.values()),
                payload=sum(e.payload * n for e, n in counted.items()),
                sent=sum(e.sent * n for e, n in counted.items()),
                crosses_nodes=any(crosses_nodes(e.ranks, self.node_size) for e in counted),
            )
            for (axes, kind), counted in calls.items()
        ]
        return sorted(flows, key=lambda flow: -flow.payload)

    def as_dict(self) -> dict[str, Any]:
        """Give all of it as what JSON knows."""
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
            "ranks": [
                {
                    "rank": rank.rank,
                    "coordinates": self.layout.coordinates(rank.rank),
                    "micro_batches": rank.micro_batches,
                    "micro_batch": rank.micro_batch,
                    "eval_batch": rank.evaluated,
                    "gradient_sync": rank.gradient_sync and dataclasses.asdict(rank.gradient_sync),
                    "peak": rank.peak,
                    "memory": dict(rank.memory),
                    "host_memory": dict(rank.host_memory),
                    "flops": rank.flops,
                    "traffic": [dataclasses.asdict(flow) for flow in self.flows(rank)],
                }
                for rank in self.ranks
            ],
        }
