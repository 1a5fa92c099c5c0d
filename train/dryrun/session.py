"""A dry run from its configuration to its exit status."""

from __future__ import annotations

import dataclasses
import json

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from train import tasks
from train.cli import compatibility
from train.cli.config import Config
from train.dryrun.bubbles import bubbles
from train.dryrun.report import lines
from train.dryrun.result import Findings
from train.dryrun.simulate import Rehearsal, Rehearsed
from train.dryrun.suggestions import misfit
from train.errors import EXIT_DONE, EXIT_USAGE, UsageError
from train.parallel.layout import OWN_AXIS, flag
from train.rundir.console import Console
from train.runtime.devices import parse_size, written
from train.runtime.rank import RankInfo
from train.tasks.base import Task

# Not one device per rank, or not one kind of rank.
_UNKNOWN = ("ps", "manual", "dataparallel")


def show(config: Config, console: Console) -> int:
    """Print what a plan takes; give 2 if it does not fit, else 0.

    Raises:
        UsageError: the plan cannot work, or cannot be rehearsed.
    """
    # Before the work is done.
    limit = None if config.device_memory is None else parse_size(config.device_memory)
    findings = examine(config, limit)
    if config.json:
        console.say(json.dumps(findings.as_dict(), indent=2))
    else:
        console.say("\n".join(lines(findings)))
    return EXIT_USAGE if findings.misfits else EXIT_DONE


def examine(config: Config, limit: int | None = None) -> Findings:
    """Rehearse a plan on as many ranks as its sizes say, whose devices have `limit` bytes.

    Raises:
        UsageError: the plan cannot work, or cannot be rehearsed.
    """
    rank_info = place_of(config)
    task = tasks.load(config.task)
    layout = config.layout_on(rank_info)
    ranks = _rehearse(config, task, rank_info)
    strategy = config.strategy_on(rank_info)
    numbers, size = _whole_model(task)

    def attempt(other: Config) -> int | None:
        try:
            rehearsed = _rehearse(other, task, place_of(other))
        except UsageError:
            return None
        return max(sum(rank.memory.values()) for rank in rehearsed)

    misfits = []
    if limit is not None:
        # A pipeline's ranks make the model in the host's memory; those that do not shard it have
        # no less of it later on.
        if (
            strategy in compatibility.COMPOSED
            and not config.meta_init
            and layout.pp == 1
            and size > limit
        ):
            misfits.append(
                f"while the run starts, each rank holds the whole model: {written(size)} of "
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
        parameters=numbers,
        ranks=ranks,
        bubbles=bubbles(layout.pp, ranks[0].micro_batches) if layout.pp > 1 else {},
        limit=limit,
        misfits=misfits,
    )


def place_of(config: Config) -> RankInfo:
    """Return the identity of rank 0 among the ranks of the mesh.

    Raises:
        UsageError: the number of ranks is not given, or the strategy cannot be rehearsed.
    """
    if config.strategy in _UNKNOWN:
        raise UsageError(
            f"--dry-run knows strategies whose ranks have a device each and are alike, not "
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


def _rehearse(config: Config, task: Task, rank_info: RankInfo) -> list[Rehearsed]:
    try:
        return Rehearsal(config, task, rank_info).all()
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    ) as error:
        raise UsageError(
            f"--dry-run cannot rehearse task '{task.name}': its model or loss does something that "
            f"depends on the values of a tensor, which has none here: {error}"
        ) from error


def _whole_model(task: Task) -> tuple[int, int]:
    """Count the parameters of a task's model, and their bytes."""
    parameters = list(task._sketch().parameters())
    return sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
