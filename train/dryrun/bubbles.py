"""The bubble of a pipeline: the share of the time that its ranks wait, by schedule."""

from collections.abc import Iterator
from typing import Any, get_args

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from train.cli.config import ScheduleName
from train.parallel.pipeline import split

_TIME = {"FORWARD": 1.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": 1.0, "FULL_BACKWARD": 2.0}
"""In units of a forward pass: the gradients of inputs take as long, and those of weights too."""
_Action = tuple[str, int, int]
"""A pass of a micro-batch through a stage: (kind, stage, number of the micro-batch)."""


def bubbles(pp: int, micro_batches: int) -> dict[str, float]:
    """Return the bubble of each schedule that takes so many micro-batches."""
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
    queues = _actions(schedule, pp, micro_batches)
    clocks, work = [0.0] * pp, 0.0
    last = split.stage_count(schedule, pp) - 1
    # When a pass was done, by ("forward" or "backward", stage, number of the micro-batch).
    ends: dict[_Action, float] = {}

    def start_of(action: _Action) -> float | None:
        """Return the time from which an action can begin, if it is known."""
        kind, stage, number = action
        if kind == "FORWARD":
            return 0.0 if stage == 0 else ends.get(("forward", stage - 1, number))
        if kind == "BACKWARD_WEIGHT":
            return ends.get(("backward", stage, number))
        if stage == last:
            return ends.get(("forward", stage, number))
        return ends.get(("backward", stage + 1, number))

    while any(queues):
        before = work
        for rank, actions in enumerate(queues):
            while actions and (start := start_of(actions[0])) is not None:
                kind, stage, number = actions.pop(0)
                clocks[rank] = max(clocks[rank], start) + _TIME[kind]
                work += _TIME[kind]
                if kind != "BACKWARD_WEIGHT":
                    direction = "forward" if kind == "FORWARD" else "backward"
                    ends[direction, stage, number] = clocks[rank]
        assert before != work, f"schedule {schedule} waits for itself"
    return 1 - work / (pp * max(clocks))


def _actions(schedule: str, pp: int, micro_batches: int) -> list[list[_Action]]:
    if schedule not in split.ONE_STAGE:
        ranks = get_schedule_ops(schedule, pp, micro_batches)
        return [[flat for action in actions for flat in _flat(action)] for actions in ranks]
    # Not torch's own list: of 1F1B, it misnumbers micro-batches on all ranks but the first.
    orders = []
    for rank in range(pp):
        forward = [("FORWARD", rank, number) for number in range(micro_batches)]
        # Run ahead by some forward passes, then alternate backward and forward.
        ahead = micro_batches if schedule == "GPipe" else pp - rank
        order = forward[:ahead]
        for number in range(micro_batches):
            order += [("FULL_BACKWARD", rank, number), *forward[ahead + number :][:1]]
        orders.append(order)
    return orders


def _flat(action: Any) -> Iterator[_Action]:
    """Put overlapping actions one after the other. Sums over ranks take no time."""
    if action is None:
        return
    if action.sub_actions:
        for part in action.sub_actions:
            yield from _flat(part)
    elif (kind := action.computation_type.name) in _TIME:
        yield kind, action.stage_index, action.microbatch_index
