"""What sweeps answer alike, wherever they run: which points they have, where the whole stands."""

from collections import Counter
from collections.abc import Sequence

from toolkit.errors import LauncherError, RunNotFound
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.text.quantities import whole_number

__all__ = ["index_of", "sum_of", "unfinished_of"]

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


def sum_of(point_statuses: Sequence[RunStatus]) -> RunStatus:
    """Return the status of a sweep from those of its points."""
    counts = Counter(status.state for status in point_statuses)
    state = next(state for state in _SUMS if counts[state])
    shown = ", ".join(f"{counts[s]} {s.upper()}" for s in RunState if counts[s])
    unknown = [status for status in point_statuses if status.state is RunState.UNKNOWN]
    if state is RunState.UNKNOWN:
        shown += f": {unknown[0].reason}"
    lost = state is RunState.UNKNOWN and all(status.lost for status in unknown)
    return RunStatus(state=state, reason=shown, lost=lost)


def index_of(sweep: Run, key: str) -> int:
    """Return the number of a point by that number or its name.

    Raises:
        RunNotFound: there is none.
    """
    names = [point.name.rpartition("/")[2] for point in sweep.points]
    if key in names:
        return names.index(key)
    if (number := whole_number(key)) is not None and number < len(names):
        return number
    raise RunNotFound(
        f"{sweep.uri} has no point {key!r}; it has 0 to {len(names) - 1}, as in "
        f"{sweep.uri}_0 or {sweep.name}/{names[0]}"
    )


def unfinished_of(sweep: Run, point_statuses: Sequence[RunStatus]) -> list[int]:
    """Return the points that have ended without success.

    Raises:
        LauncherError: all have succeeded, or one has not ended.
    """
    if live := [status for status in point_statuses if not (status.state.final or status.lost)]:
        raise LauncherError(
            f"{sweep.uri}: {len(live)} of {len(point_statuses)} points have not ended (the first "
            f"is {live[0].state.upper()}: {live[0].reason or 'no reason'}); `toolkit wait` for "
            f"them, or name one point that has ended, like {sweep.uri}_0"
        )
    again = [i for i, status in enumerate(point_statuses) if status.state is not RunState.SUCCEEDED]
    if not again:
        raise LauncherError(f"{sweep.uri}: all points have succeeded; there is nothing to do")
    return again
