"""What would not fit into a device's memory, and ways out that have been tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from train.cli.config import Config
from train.dryrun.memory import ACTIVATIONS, STATE
from train.dryrun.simulate import EVALUATION, Rehearsed
from train.parallel.layout import Layout, flag
from train.runtime.devices import written

Try = Callable[[Config], int | None]
"""Rehearses another plan; gives the bytes of its worst rank, or None if it cannot work."""
_Changes = dict[str, Any]
# Larger factors would be another plan, not a way out of this one.
_FACTORS = [2**power for power in range(1, 11)]
# Rehearsals take seconds; what arithmetic has chosen is mostly right.
_TRIES = 2


def misfit(
    ranks: Sequence[Rehearsed], limit: int, config: Config, layout: Layout, attempt: Try
) -> str | None:
    """Say which rank needs more than `limit` bytes, with the arithmetic and ways out."""
    worst = max(ranks, key=lambda rank: sum(rank.memory.values()))
    needed = sum(worst.memory.values())
    if needed <= limit:
        return None
    sums = " + ".join(f"{written(size)} {kind}" for kind, size in worst.memory.items() if size)
    ways = list(_ways(worst, limit, config, layout, attempt))
    return (
        f"rank {worst.rank} needs {written(needed)} = {sums}: {written(needed - limit)} more than "
        f"--device-memory {written(limit)}; "
        + (
            f"tried, and it fits: {'; or '.join(ways)}"
            if ways
            else "no small change will do: raise --tp (parameters and activations), --pp "
            "(parameters) or --dp-shard, and lower --micro-batch"
        )
    )


def _ways(
    rank: Rehearsed, limit: int, config: Config, layout: Layout, attempt: Try
) -> Iterator[str]:
    """Name the smallest change of each kind that has been seen to fit; of all kinds if need be."""
    kinds = [
        list(_sharding(rank, limit, config, layout)),
        list(_smaller_micro_batches(rank, limit)),
        list(_smaller_evaluations(rank, limit)),
        [] if config.activation_checkpointing else [{"activation_checkpointing": True}],
        list(_earlier_reductions(rank, layout)),
    ]
    any_way = False
    for changes in kinds:
        way = _first_fitting(iter(changes), limit, config, attempt)
        any_way = any_way or way is not None
        if way is not None:
            yield way
    if not any_way:
        checkpointing = {"activation_checkpointing": True}
        both = [sharding | checkpointing for sharding in _sharding(rank, limit, config, layout)]
        one_by_one = [changes | {"micro_batch": 1} for changes in both]
        way = _first_fitting(iter([*both[:1], *one_by_one[:1]]), limit, config, attempt)
        if way is not None:
            yield way


def _first_fitting(
    candidates: Iterator[_Changes], limit: int, config: Config, attempt: Try
) -> str | None:
    for changes in islice(candidates, _TRIES):
        needed = attempt(dataclasses.replace(config, **changes))
        if needed is not None and needed <= limit:
            flags = " ".join(
                flag(name) if value is True else f"{flag(name)} {value}"
                for name, value in changes.items()
                if value is not None and name not in ("strategy", "comm_hook")
            )
            return f"{flags} ({written(needed)})"
    return None


def _sharding(rank: Rehearsed, limit: int, config: Config, layout: Layout) -> Iterator[_Changes]:
    """Have each rank hold a smaller part: on as many ranks as now, or on more.

    At best its share of the batch becomes smaller as well.
    """
    if config.reduce == "exact" or config.strategy == "local-sgd":
        return
    best = sum(size for kind, size in rank.memory.items() if kind in (*STATE, ACTIVATIONS))
    rest = sum(rank.memory.values()) - best
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


def _earlier_reductions(rank: Rehearsed, layout: Layout) -> Iterator[_Changes]:
    """Keep no gradient whole from one micro-batch to the next."""
    sharded = layout.pp == 1 and layout.dp_shard * layout.cp > 1
    chosen = rank.gradient_sync
    if sharded and rank.micro_batches > 1 and chosen is not None and chosen.when == "last":
        yield {"gradient_sync": "each"}


def _smaller_evaluations(rank: Rehearsed, limit: int) -> Iterator[_Changes]:
    if rank.peak == EVALUATION:
        for size in _sizes_that_fit(rank, rank.evaluated, limit):
            yield {"eval_batch": size}


def _smaller_micro_batches(rank: Rehearsed, limit: int) -> Iterator[_Changes]:
    for size in _sizes_that_fit(rank, rank.micro_batch, limit):
        yield {"micro_batch": size}


def _sizes_that_fit(rank: Rehearsed, rehearsed: int, limit: int) -> Iterator[int]:
    """Give smaller numbers of samples whose activations, in proportion, leave room for the rest."""
    activations = rank.memory[ACTIVATIONS]
    others = sum(rank.memory.values()) - activations
    for factor in _FACTORS:
        size = rehearsed // factor
        if size and others + activations * size / rehearsed <= limit:
            yield size
