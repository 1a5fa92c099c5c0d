"""Where a sweep stands, from where its points stand. Pure."""

from collections import Counter
from collections.abc import Sequence

from toolkit.launchers.base import RunState, RunStatus

__all__ = ["sum_of"]

_SUMS = (
    RunState.RUNNING,
    RunState.PENDING,
    RunState.UNKNOWN,
    RunState.FAILED,
    RunState.PREEMPTED,
    RunState.CANCELLED,
    RunState.SUCCEEDED,
)
"""The state of a sweep is the first of these that a point has."""


def sum_of(found: Sequence[RunStatus]) -> RunStatus:
    """Return the status of a sweep from those of its points."""
    counts = Counter(status.state for status in found)
    state = next(state for state in _SUMS if counts[state])
    shown = ", ".join(f"{counts[s]} {s.upper()}" for s in RunState if counts[s])
    unknown = [status for status in found if status.state is RunState.UNKNOWN]
    if state is RunState.UNKNOWN:
        shown += f": {unknown[0].reason}"
    lost = state is RunState.UNKNOWN and all(status.lost for status in unknown)
    return RunStatus(state=state, reason=shown, lost=lost)
