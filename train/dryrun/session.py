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
from train.cli import compatibility, sizes
from train.cli.config import Config
from train.dryrun.bubbles import bubbles
from train.dryrun.report import Findings
from train.dryrun.simulate import RankCost, Rehearsal
from train.dryrun.suggestions import misfit
from train.errors import EXIT_DONE, EXIT_USAGE, UsageError
from train.parallel.layout import OWN_AXIS, flag
from train.rundir.console import Console
from train.runtime.rank import Place
from train.tasks.base import Task


def show(config: Config, console: Console) -> int:
    """Print what a plan takes; return the exit status 2 if it does not fit, else 0.

    Raises:
        UsageError: the plan cannot work, or cannot be rehearsed.
    """
    # First, since a rehearsal takes seconds.
    limit = None if config.device_memory is None else sizes.parse(config.device_memory)
    findings = examine(config, limit)
    if config.json:
        console.say(json.dumps(findings.as_dict(), indent=2))
    else:
        console.say("\n".join(findings.lines()))
    return EXIT_USAGE if findings.misfits else EXIT_DONE


def examine(config: Config, limit: int | None = None) -> Findings:
    """Rehearse a plan on as many ranks as its sizes say, whose devices have `limit` bytes.

    Raises:
        UsageError: the plan cannot work, or cannot be rehearsed.
    """
    place = place_of(config)
    task = tasks.load(config.task)
    layout, strategy = config.layout_on(place), config.strategy_on(place)
    ranks = _rehearse(config, task, place)
    weights = list(task._sketch().parameters())

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
                f"while the run starts, each rank holds the whole model: {sizes.written(whole)} of "
                f"--device-memory {sizes.written(limit)}; use --meta-init"
            )
        if problem := misfit(ranks, limit, config, layout, attempt):
            misfits.append(problem)
    return Findings(
        task=task.name,
        strategy=strategy,
        layout=layout,
        node_size=place.local_world_size,
        global_batch=config.global_batch,
        schedule=config.pp_schedule if layout.pp > 1 else None,
        parameters=sum(weight.numel() for weight in weights),
        ranks=ranks,
        bubbles=bubbles(layout.pp, ranks[0].micro_batches) if layout.pp > 1 else {},
        limit=limit,
        misfits=misfits,
    )


def place_of(config: Config) -> Place:
    """Return the identity of rank 0 among the ranks of the mesh.

    Raises:
        UsageError: the number of ranks is not given, or the strategy cannot be rehearsed.
    """
    # These have not one device per rank, or not one kind of rank.
    if config.strategy in ("ps", "manual", "dataparallel"):
        raise UsageError(
            f"--dry-run knows strategies whose ranks have a device each and are alike, not "
            f"--strategy {config.strategy}; use --strategy single to see the model's memory"
        )
    place = compatibility.ranks_of(config, Place(), only_looking=True)
    if place.world_size == 1 and config.strategy not in ("auto", "single"):
        axis = flag(OWN_AXIS.get(config.strategy, "dp_shard"))
        raise UsageError(
            f"--dry-run --strategy {config.strategy}: on how many ranks? Say so with {axis} 8, or "
            "with other sizes of the mesh"
        )
    node = min(config.nproc_per_node, place.world_size)
    return dataclasses.replace(place, local_world_size=node)


def _rehearse(config: Config, task: Task, place: Place) -> list[RankCost]:
    try:
        return Rehearsal(config, task, place).run()
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    ) as error:
        raise UsageError(
            f"--dry-run cannot rehearse task '{task.name}': its model or loss does something that "
            f"depends on the values of a tensor, which has none here: {error}"
        ) from error
