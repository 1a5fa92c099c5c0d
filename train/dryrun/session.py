"""A dry run, from configuration to exit status, with alternatives to a plan that does not fit."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses import fake_tensor

from .. import tasks
from ..cli import compatibility
from ..cli.config import Config
from ..errors import EXIT_DONE, EXIT_USAGE, UsageError
from ..parallel.layout import OWN_AXIS, Layout, flag
from ..proof.session import is_cut, memory_problem
from ..rundir.console import Console
from ..runtime.devices import parse_size, written
from ..runtime.rank import RankInfo
from ..tasks.base import Task, sketch_of
from .counters import ACTIVATIONS, STATE
from .report import Findings
from .simulate import EVALUATION, RankCost, Rehearsal, bubbles

Try = Callable[[Config], int | None]
"""Rehearses another plan; returns the bytes of its worst rank, or None if it cannot work."""
_Changes = dict[str, Any]
_FACTORS = [2**power for power in range(1, 11)]
"""Factors to try; larger ones would make another plan instead of fixing this one."""


def show(config: Config, console: Console) -> int:
    """Print the cost of a plan; return the exit status 2 if it does not fit, else 0.

    Raises:
        UsageError: the plan cannot work, or cannot be rehearsed.
    """
    # Read the limit first, since a rehearsal takes seconds.
    limit = None if config.device_memory is None else parse_size(config.device_memory)
    findings = examine(config, limit)
    if config.json:
        console.say(json.dumps(findings.as_dict(), indent=2))
    else:
        console.say("\n".join(findings.lines()))
    return EXIT_USAGE if findings.misfits else EXIT_DONE


def examine(config: Config, limit: int | None = None) -> Findings:
    """Rehearse a plan on as many ranks as its sizes say; their devices have `limit` bytes.

    Raises:
        UsageError: the plan cannot work, or cannot be rehearsed.
    """
    rank_info = place_of(config)
    task = tasks.load(config.task)
    layout, strategy = config.layout_on(rank_info), config.strategy_on(rank_info)
    ranks = _rehearse(config, task, rank_info)
    weights = list(sketch_of(task).parameters())

    def attempt(other: Config) -> int | None:
        try:
            costs = _rehearse(other, task, place_of(other))
        except UsageError:
            return None
        return max(rank.total for rank in costs)

    misfits = []
    if limit is not None:
        # A pipeline's ranks make the model in the host's memory; ranks that do not shard it hold
        # no less of it later on.
        whole = sum(weight.nbytes for weight in weights)
        shards = strategy in compatibility.COMPOSED and layout.pp == 1
        if shards and not config.meta_init and whole > limit:
            misfits.append(
                f"while the run starts, each rank holds the whole model: {written(whole)} of "
                f"--device-memory {written(limit)}; use --meta-init"
            )
        if problem := misfit(ranks, limit, config, layout, attempt):
            misfits.append(problem)
    return Findings(
        task=task.name,
        strategy=strategy,
        layout=layout,
        node_size=rank_info.local_world_size,
        global_batch=config.global_batch,
        schedule=config.pp_schedule if layout.pp > 1 else None,
        parameters=sum(weight.numel() for weight in weights),
        ranks=ranks,
        bubbles=bubbles(layout.pp, ranks[0].micro_batches) if layout.pp > 1 else {},
        limit=limit,
        misfits=misfits,
        no_proof=_no_proof(config, layout, rank_info, weights, limit),
    )


def _no_proof(
    config: Config,
    layout: Layout,
    rank_info: RankInfo,
    weights: Sequence[Tensor],
    limit: int | None,
) -> str:
    """Return why the proof before training takes too much memory, where that is known."""
    if limit is None or config.verify is False or not is_cut(config, layout, rank_info):
        return ""
    return memory_problem(sum(weight.numel() for weight in weights), limit, ranks=1)


def place_of(config: Config) -> RankInfo:
    """Return the identity of rank 0 among the ranks of the mesh.

    Raises:
        UsageError: the number of ranks is not given, or the strategy cannot be rehearsed.
    """
    # These have not one device per rank, or not one kind of rank.
    if config.strategy in ("ps", "manual", "dataparallel"):
        raise UsageError(
            f"--dry-run supports strategies with one device per rank and equal ranks, not "
            f"--strategy {config.strategy}; use --strategy single to see the model's memory"
        )
    rank_info = compatibility.ranks_of(config, RankInfo(), only_looking=True)
    if rank_info.world_size == 1 and config.strategy not in ("auto", "single"):
        axis = flag(OWN_AXIS.get(config.strategy, "dp_shard"))
        raise UsageError(
            f"--dry-run --strategy {config.strategy}: on how many ranks? Say so with {axis} 8, or "
            "with other sizes of the mesh"
        )
    node = min(config.nproc_per_node, rank_info.world_size)
    return dataclasses.replace(rank_info, local_world_size=node)


def _rehearse(config: Config, task: Task, rank_info: RankInfo) -> list[RankCost]:
    try:
        return Rehearsal(config, task, rank_info).run()
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
    ) as error:
        raise UsageError(
            f"--dry-run cannot rehearse task '{task.name}': its model or loss does something that "
            f"depends on the values of a tensor, which has none here: {error}"
        ) from error


def misfit(
    ranks: Sequence[RankCost], limit: int, config: Config, layout: Layout, attempt: Try
) -> str | None:
    """List each rank that needs more than `limit` bytes, with the arithmetic and ways out."""
    worst = max(ranks, key=lambda rank: rank.total)
    if worst.total <= limit:
        return None
    sums = " + ".join(f"{written(size)} {kind}" for kind, size in worst.memory.items() if size)
    ways = _ways(worst, limit, config, layout, attempt)
    excess = written(worst.total - limit)
    return (
        f"rank {worst.rank} needs {written(worst.total)} = {sums}: {excess} more than "
        f"--device-memory {written(limit)}; "
        + (
            f"tried, and it fits: {'; or '.join(ways)}"
            if ways
            else "no small change will do: raise --tp (parameters and activations), --pp "
            "(parameters) or --dp-shard, and lower --micro-batch"
        )
    )


def _ways(rank: RankCost, limit: int, config: Config, layout: Layout, attempt: Try) -> list[str]:
    """Name the smallest change of each kind that fits; if none does, try several together."""
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
        shards = layout.dp_shard * factor
        if best / factor + rest <= limit and copies * shards <= config.global_batch:
            axes = {"dp_replicate": copies, "dp_shard": shards}
            axes |= {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp")}
            mesh = {axis: size if size > 1 else None for axis, size in axes.items()}
            yield {"strategy": "auto", **mesh, "comm_hook": "none"}


def _sizes(rank: RankCost, rehearsed: int, limit: int) -> Iterator[int]:
    """Yield smaller sample counts that fit, assuming activations proportional to the count."""
    activations = rank.memory[ACTIVATIONS]
    others = rank.total - activations
    for factor in _FACTORS:
        size = rehearsed // factor
        if size and others + activations * size / rehearsed <= limit:
            yield size
