"""The changes that make a plan fit into a device's memory, each of which a rehearsal has tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from train.cli.config import Config
from train.cli.sizes import written
from train.dryrun.counters import ACTIVATIONS, STATE
from train.dryrun.simulate import EVALUATION, RankCost
from train.parallel.layout import Layout, flag

Try = Callable[[Config], int | None]
"""Rehearses another plan; returns the bytes of its worst rank, or None if it cannot work."""
_Changes = dict[str, Any]
# Larger factors would be another plan, not a way out of this one.
_FACTORS = [2**power for power in range(1, 11)]


def misfit(
    ranks: Sequence[RankCost], limit: int, config: Config, layout: Layout, attempt: Try
) -> str | None:
    """Say which rank needs more than `limit` bytes, with the arithmetic and ways out."""
    worst = max(ranks, key=lambda rank: rank.total)
    if worst.total <= limit:
        return None
    sums = " + ".join(f"{written(size)} {kind}" for kind, size in worst.memory.items() if size)
    ways = _ways(worst, limit, config, layout, attempt)
    return (
        f"rank {worst.rank} needs {written(worst.total)} = {sums}: {written(worst.total - limit)} "
        f"more than --device-memory {written(limit)}; "
        + (
            f"tried, and it fits: {'; or '.join(ways)}"
            if ways
            else "no small change will do: raise --tp (parameters and activations), --pp "
            "(parameters) or --dp-shard, and lower --micro-batch"
        )
    )


def _ways(rank: RankCost, limit: int, config: Config, layout: Layout, attempt: Try) -> list[str]:
    """Name the smallest change of each kind that fits; if there is none, changes of all kinds."""
    sharding = list(_sharding(rank, limit, config, layout))
    micro_batches = [{"micro_batch": size} for size in _sizes(rank, rank.micro_batch, limit)]
    evaluations = [{"eval_batch": size} for size in _sizes(rank, rank.eval_batch, limit)]
    checkpointing = {"activation_checkpointing": True}
    # So that no gradient stays whole from one micro-batch to the next.
    sharded = layout.pp == 1 and layout.dp_shard * layout.cp > 1
    sync = rank.gradient_sync
    whole_gradients = rank.micro_batches > 1 and sync is not None and sync.when == "last"
    kinds: list[list[_Changes]] = [
        sharding,
        micro_batches,
        evaluations if rank.peak == EVALUATION else [],
        [] if config.activation_checkpointing else [checkpointing],
        [{"gradient_sync": "each"}] if sharded and whole_gradients else [],
    ]
    ways = [way for changes in kinds if (way := _first_fitting(changes, limit, config, attempt))]
    if not ways and sharding:
        both = sharding[0] | checkpointing
        candidates = [both, both | {"micro_batch": 1}]
        if way := _first_fitting(candidates, limit, config, attempt):
            ways.append(way)
    return ways


def _first_fitting(
    candidates: Sequence[_Changes], limit: int, config: Config, attempt: Try
) -> str | None:
    # Rehearsals take seconds, and the arithmetic's first choice is mostly right.
    for changes in candidates[:2]:
        needed = attempt(dataclasses.replace(config, **changes))
        if needed is not None and needed <= limit:
            flags = " ".join(
                flag(name) if value is True else f"{flag(name)} {value}"
                for name, value in changes.items()
                if value is not None and name not in ("strategy", "comm_hook")
            )
            return f"{flags} ({written(needed)})"
    return None


def _sharding(rank: RankCost, limit: int, config: Config, layout: Layout) -> Iterator[_Changes]:
    """Have each rank hold a smaller part: on as many ranks as now, or on more.

    At best its share of the batch becomes smaller as well.
    """
    if config.reduce == "exact" or config.strategy == "local-sgd":
        return
    best = sum(size for kind, size in rank.memory.items() if kind in (*STATE, ACTIVATIONS))
    rest = rank.total - best
    for factor in _FACTORS:
        copies, remainder = divmod(layout.dp_replicate, factor)
        if remainder:
            copies = layout.dp_replicate
        sizes = {"dp_replicate": copies, "dp_shard": layout.dp_shard * factor}
        if best / factor + rest <= limit and copies * sizes["dp_shard"] <= config.global_batch:
            others = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp")}
            yield {
                "strategy": "auto",
                **{axis: size if size > 1 else None for axis, size in (sizes | others).items()},
                "comm_hook": "none",
            }


def _sizes(rank: RankCost, rehearsed: int, limit: int) -> Iterator[int]:
    """Give smaller numbers of samples whose activations, in proportion, leave room for the rest."""
    activations = rank.memory[ACTIVATIONS]
    others = rank.total - activations
    for factor in _FACTORS:
        size = rehearsed // factor
        if size and others + activations * size / rehearsed <= limit:
            yield size
