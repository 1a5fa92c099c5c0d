"""How long the ranks of a pipeline wait for each other, by schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from train.cli.config import ScheduleName
from train.parallel.pipeline import split

# In units of a forward pass: the gradients of inputs take as long, and those of weights too.
_TIME = {"FORWARD": 1.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": 1.0, "FULL_BACKWARD": 2.0}
# Something done to a micro-batch: (what, stage, micro-batch), and when.
_Action = tuple[str, int, int]
_Done = dict[_Action, float]


def bubbles(pp: int, micro_batches: int) -> dict[str, float]:
    """Give the share of the time that ranks wait, of each schedule that takes so many."""
    return {
        name: bubble(name, pp, micro_batches)
        for name in get_args(ScheduleName)
        if split.accepts(name, pp, micro_batches)
    }


def bubble(schedule: str, pp: int, micro_batches: int) -> float:
    """Play torch's schedule through, as if all stages were equal and messages took no time.

    >>> round(bubble("1F1B", 4, 12), 2)  # (4 - 1) / (12 + 4 - 1)
    0.2
    """
    waiting = _orders(schedule, pp, micro_batches)
    clocks, work = [0.0] * pp, 0.0
    done: _Done = {}
    last = split.stage_count(schedule, pp) - 1
    while any(waiting):
        before = len(done), work
        for rank, actions in enumerate(waiting):
            while actions and (start := _ready(actions[0], done, last)) is not None:
                kind, stage, number = actions.pop(0)
                clocks[rank] = max(clocks[rank], start) + _TIME[kind]
                work += _TIME[kind]
                if kind != "BACKWARD_WEIGHT":
                    way = "forward" if kind == "FORWARD" else "backward"
                    done[way, stage, number] = clocks[rank]
        assert before != (len(done), work), f"schedule {schedule} waits for itself"
    return 1 - work / (pp * max(clocks))


def _orders(schedule: str, pp: int, micro_batches: int) -> list[list[_Action]]:
    """List each rank's actions, in their order."""
    if schedule in split.ONE_STAGE:
        # Not torch's own list: of 1F1B, it misnumbers micro-batches on all ranks but the first.
        ahead = [micro_batches if schedule == "GPipe" else pp - rank for rank in range(pp)]
        return [_one_stage(rank, micro_batches, ahead[rank]) for rank in range(pp)]
    return [
        [one for action in rank for one in _flat(action)]
        for rank in get_schedule_ops(schedule, pp, micro_batches)
    ]


def _one_stage(stage: int, micro_batches: int, ahead: int) -> list[_Action]:
    """Run ahead by some forward passes, then alternate backward and forward."""
    forward = [("FORWARD", stage, number) for number in range(micro_batches)]
    backward = [("FULL_BACKWARD", stage, number) for number in range(micro_batches)]
    order = forward[:ahead]
    for number, action in enumerate(backward):
        order += [action, *forward[ahead + number : ahead + number + 1]]
    return order


def _flat(action: Any) -> Iterator[_Action]:
    """Take apart what overlaps: here it is one after the other. Sums over ranks take no time."""
    if action is None:
        return
    if action.sub_actions:
        for part in action.sub_actions:
            yield from _flat(part)
    elif (kind := action.computation_type.name) in _TIME:
        yield kind, action.stage_index, action.microbatch_index


def _ready(action: _Action, done: _Done, last: int) -> float | None:
    """Say when an action can begin, if that is known."""
    kind, stage, number = action
    if kind == "FORWARD":
        return 0.0 if stage == 0 else done.get(("forward", stage - 1, number))
    if kind == "BACKWARD_WEIGHT":
        return done.get(("backward", stage, number))
    if stage == last:
        return done.get(("forward", stage, number))
    return done.get(("backward", stage + 1, number))
