"""Where a run stands, in the words of all schedulers."""

import enum
from dataclasses import dataclass

__all__ = ["RunState", "RunStatus"]


class RunState(enum.StrEnum):
    """Where a run stands, in the words of all schedulers."""

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
    """Ended because the machines were taken or time was over; it can go on from a checkpoint."""

    UNKNOWN = enum.auto()
    """The scheduler gives no answer, or one that this toolkit does not know. Never success."""

    @property
    def final(self) -> bool:
        """Whether the run has ended."""
        return self not in (RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run's state and why."""

    state: RunState
    """The state."""

    reason: str = ""
    """The scheduler's own words, or the outcome's; empty where there is nothing to say."""

    word: str = ""
    """The retry policy's word for the end of the newest attempt, such as `fatal`; empty if there is
    none. See docs/reference/run-directory.md."""

    lost: bool = False
    """Whether the status is lost for good: the scheduler has forgotten the run, and it left no
    files."""

    expected_start: str = ""
    """When the scheduler expects to start it, in the scheduler's words (local time there), or
    empty."""
