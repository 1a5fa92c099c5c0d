"""The states and statuses of runs, common to all schedulers."""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class RunState(enum.StrEnum):
    """The state of a run, common to all schedulers."""

    PENDING = enum.auto()
    """Accepted, not started."""

    RUNNING = enum.auto()
    """Started, not ended; also while it is being stopped."""

    SUCCEEDED = enum.auto()
    """Ended with success."""

    FAILED = enum.auto()
    """Ended without success, and nothing will start it again."""

    CANCELLED = enum.auto()
    """Ended by a user's request."""

    PREEMPTED = enum.auto()
    """Ended by preemption or the time limit; it can continue from a checkpoint."""

    UNKNOWN = enum.auto()
    """The scheduler gives no answer, or an unknown one. Never success."""

    @property
    def final(self) -> bool:
        """Whether the run has ended."""
        return self not in (RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run's state and why."""

    state: RunState
    reason: str = ""
    """The reason from the scheduler or the outcome; empty if there is none."""

    word: str = ""
    """The retry policy's status for the end of the newest attempt, such as `fatal`; empty if there
    is none. See docs/reference/run-directory.md."""

    lost: bool = False
    """Whether the status is permanently lost: the scheduler has forgotten the run, which left no
    files."""

    expected_start: str = ""
    """The start time that the scheduler expects, in ISO 8601 with an offset, or empty."""

    place_in_queue: int | None = None
    """The queue position among the pending jobs of the same partition; 1 is the next job. None if
    the run is not pending, or the position is unknown."""


_STATES_OF_SWEEPS = (
    RunState.RUNNING,
    RunState.PENDING,
    RunState.UNKNOWN,
    RunState.FAILED,
    RunState.PREEMPTED,
    RunState.CANCELLED,
    RunState.SUCCEEDED,
)
"""The state of a sweep is the first of these states that a point has."""


def sum_of(point_statuses: Sequence[RunStatus]) -> RunStatus:
    """Return the status of a sweep from those of its points."""
    counts = Counter(status.state for status in point_statuses)
    state = next(state for state in _STATES_OF_SWEEPS if counts[state])
    shown = ", ".join(f"{counts[s]} {s.upper()}" for s in RunState if counts[s])
    unknown = [status for status in point_statuses if status.state is RunState.UNKNOWN]
    if state is RunState.UNKNOWN:
        shown += f": {unknown[0].reason}"
    lost = state is RunState.UNKNOWN and all(status.lost for status in unknown)
    return RunStatus(state=state, reason=shown, lost=lost)
