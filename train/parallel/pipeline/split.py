"""The split of a model for a pipeline, the rank of each stage, and the number of micro-batches.

Pure arithmetic, without torch, so that an invalid command line is refused before anything starts.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..layout import Layout, counted

if TYPE_CHECKING:
    from torch import nn

    from ...cli.config import Config
    from ...tasks.base import Task

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage per rank. Other schedules have two stages per rank: a batch passes every
rank twice, and fewer ranks wait during the first and the last micro-batch."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Rank r holds stages r and 2 pp - 1 - r: data goes down the ranks and back up, like a V. In other
schedules with two stages per rank, data starts again at rank 0, in a loop."""
TWO_PASSES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute input gradients first, as another stage waits for them, and weight
gradients when the rank is otherwise idle: two passes over parts of one graph."""


def stage_count(schedule: str, pp: int) -> int:
    """Count the stages that a model is cut into."""
    return pp if schedule in ONE_STAGE else 2 * pp


def stages_of(rank: int, schedule: str, pp: int) -> tuple[int, ...]:
    """Return the numbers of a rank's stages, in the order of the forward pass.

    >>> [stages_of(rank, "Interleaved1F1B", 2) for rank in range(2)]
    [(0, 2), (1, 3)]
    >>> [stages_of(rank, "DualPipeV", 2) for rank in range(2)]
    [(0, 3), (1, 2)]
    """
    if schedule in ONE_STAGE:
        return (rank,)
    return (rank, 2 * pp - 1 - rank if schedule in V_SHAPED else pp + rank)


def owners(schedule: str, pp: int) -> dict[int, int]:
    """Map each stage to its pipeline rank, in the order of the forward pass.

    >>> owners("DualPipeV", 2)
    {0: 0, 1: 1, 2: 1, 3: 0}
    """
    held = {number: rank for rank in range(pp) for number in stages_of(rank, schedule, pp)}
    return dict(sorted(held.items()))


def accepts(schedule: str, pp: int, micro_batches: int) -> bool:
    """Whether a schedule supports this number of micro-batches."""
    match schedule:
        case "1F1B" | "DualPipeV":
            return micro_batches >= stage_count(schedule, pp)
        case "Interleaved1F1B" | "InterleavedZeroBubble":
            # In rounds of equal size, with at least pp micro-batches each.
            return micro_batches % max(1, micro_batches // pp) == 0
        case _:
            return True


def micro_batches(config: "Config", layout: Layout) -> int:
    """Count the micro-batches in every rank's share of a step.

    Without a given size, this is the largest valid number up to twice the number of stages. With
    fewer micro-batches, ranks wait for work; with more, each micro-batch has little work.

    Raises:
        UsageError: micro-batches cannot have equal sizes, or the schedule rejects their number.
    """
    schedule, pp = config.pp_schedule, layout.pp
    whole = f"--global-batch {config.global_batch} with --pp {pp}"
    share, remainder = divmod(config.global_batch, layout.shards)
    if remainder:
        lower = config.global_batch - remainder
        fitting = [str(size) for size in (lower, lower + layout.shards) if size]
        raise UsageError(
            f"{whole}: stages expect batches of one size, but {config.global_batch} samples for "
            f"{layout.shards} ranks are {layout.shards} x {share} + {remainder}; use "
            f"--global-batch {' or '.join(fitting)}"
        )
    stages = stage_count(schedule, pp)
    if schedule in ("1F1B", "DualPipeV"):
        demand = f"but schedule {schedule} needs at least one for each of {stages} stages"
    else:
        demand = f"but schedule {schedule} takes them in rounds of one size, of at least {pp} each"
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    sizes = [size for size in divisors if accepts(schedule, pp, share // size)]
    if not sizes:
        raise UsageError(
            f"{whole}: a rank's share of {share} samples makes at most "
            f"{counted(share, 'micro-batch')}, {demand}; use --global-batch "
            f"{stages * layout.shards} or more, or --pp-schedule GPipe"
        )
    if (size := config.micro_batch) is None:
        counts = [share // size for size in sizes]
        return max((count for count in counts if count <= 2 * stages), default=min(counts))
    count, remainder = divmod(share, size)
    if size in sizes:
        return count
    if remainder:
        why = (
            f"stages expect micro-batches of one size, but a rank's share of {share} samples is "
            f"{count} x {size} + {remainder}"
        )
    else:
        why = f"a rank's share of {share} samples makes {counted(count, 'micro-batch')}, {demand}"
    *others, last = [str(size) for size in reversed(sizes)]
    listed = f"{', '.join(others)} or {last}" if others else last
    raise UsageError(f"--micro-batch {size} with --pp {pp}: {why}; use --micro-batch {listed}")


def check(config: "Config", layout: Layout) -> None:
    """Refuse settings that a pipeline does not support, before a model is made.

    Raises:
        UsageError: shows the arithmetic and a fix.
    """
    if layout.pp == 1:
        raise UsageError(
            "--strategy pp: a pipeline needs at least 2 ranks, but --pp is 1; start more ranks, or "
            "use --strategy single"
        )
    micro_batches(config, layout)
    if config.compile and config.pp_schedule in TWO_PASSES:
        raise UsageError(
            f"--pp-schedule {config.pp_schedule} goes through each graph of the backward pass in "
            "two parts, and --compile leaves no parts; use --pp-schedule Interleaved1F1B, or leave "
            "out --compile"
        )


def piece_sizes(model: "nn.Module", task: "Task") -> dict[str, int]:
    """Count the parameters of each piece of a model, in the order of the forward pass.

    Raises:
        UsageError: a piece is named twice.
    """
    names = list(task.pieces(model))
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"task {task.name!r}: pieces() names {twice[0]!r} twice, and each piece has one place "
            "when a model is cut: register the module under a second name (an nn.Sequential may "
            "hold it twice), or have pieces() name a module around both uses"
        )
    return {
        name: sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
        for name in names
    }


def cut(pieces: Mapping[str, int], parts: int, *, flags: str) -> list[list[str]]:
    """Cut `piece_sizes()` into `parts` successive groups, with the smallest possible maximum size.

    Every group has parameters: without any, an optimizer would have nothing to do. The message
    names the flags that require this number of parts.

    Raises:
        UsageError: there are too few pieces.

    >>> cut({"0": 9, "relu": 0, "1": 5, "2": 4}, 2, flags="--pp 2")
    [['0'], ['relu', '1', '2']]
    """
    names, sizes = list(pieces), list(pieces.values())
    cuttable = sum(size > 0 for size in sizes)
    if cuttable < parts:
        listed = ", ".join(repr(name) for name in names)
        raise UsageError(
            f"{flags}: the model is to be cut in {parts} parts, but only {cuttable} of its pieces "
            f"({listed}) have parameters; ask for at most {cuttable}, or have the task's pieces() "
            "name more submodules"
        )

    @cache
    def best(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Cut the pieces from `start` on: return the largest group's size and all groups' ends."""
        if parts == 1:
            return sum(sizes[start:]) or math.inf, (len(sizes),)
        options = []
        for stop in range(start + 1, len(sizes) - parts + 2):
            rest, ends = best(stop, parts - 1)
            options.append((max(sum(sizes[start:stop]) or math.inf, rest), (stop, *ends)))
        return min(options)

    _, ends = best(0, parts)
    return [names[start:stop] for start, stop in zip((0, *ends), ends, strict=False)]
