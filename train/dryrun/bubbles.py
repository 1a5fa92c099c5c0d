"""How long the ranks of a pipeline wait for each other, by schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from train import stages
from train.config import ScheduleName

# In units of a forward pass: the gradients of inputs take as long, and those of weights too.
_TIME = {"FORWARD": 1.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": 1.0, "FULL_BACKWARD": 2.0}
# An action of a stage on a micro-batch: (forward or backward, stage, micro-batch).
_Done = dict[tuple[str, int, int], float]


def bubbles(pp: int, micro_batches: int) -> dict[str, float]:
    """Give the share of the time that ranks wait, of each schedule that takes so many."""
    return {
        name: bubble(name, pp, micro_batches)
        for name in get_args(ScheduleName)
        if stages.accepts(name, pp, micro_batches)
    }


def bubble(schedule: str, pp: int, micro_batches: int) -> float:
    """Play torch's schedule through, as if all stages were equal and messages took no time.

    >>> round(bubble("1F1B", 4, 12), 2)  # (4 - 1) / (12 + 4 - 1)
    0.2
    """
    waiting = [_actions(rank) for rank in get_schedule_ops(schedule, pp, micro_batches)]
    clocks, work = [0.0] * pp, 0.0
    done: _Done = {}
    last = stages.stage_count(schedule, pp) - 1
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


def _actions(rank: Sequence[Any]) -> list[tuple[str, int, int]]:
    """List a rank's actions; two that overlap are one after the other."""

    def flat(action: Any) -> Iterator[tuple[str, int, int]]:
        if action is None:
            return
        if action.sub_actions:
            for part in action.sub_actions:
                yield from flat(part)
        else:
            yield action.computation_type.name, action.stage_index, action.microbatch_index

    return [one for action in rank for one in flat(action)]


def _ready(action: tuple[str, int, int], done: _Done, last: int) -> float | None:
    """Say when an action can begin, if that is known."""
    kind, stage, number = action
    if kind == "FORWARD":
        return 0.0 if stage == 0 else done.get(("forward", stage - 1, number))
    if kind == "BACKWARD_WEIGHT":
        return done.get(("backward", stage, number))
    if stage == last:
        return done.get(("forward", stage, number))
    return done.get(("backward", stage + 1, number))
