"""Whether a failure has come before: in an earlier start of the ranks, or in an earlier attempt."""

import glob
import os
import time
from typing import Callable, Dict, List, NamedTuple, Optional

from .files import read
from .first_error import (
    ANOTHER_ONE,
    Attempt,
    Failure,
    alike,
    from_line,
    last_failure,
    repeated_failure,
)

ECHO_S = 60
"""How long one waits for the error of which another one is the echo: its files may come late."""


class Earlier(NamedTuple):
    """A failure that an earlier attempt had."""

    failure: Failure
    folder: str
    """Of that attempt."""


class Repetitions:
    """What is known of the failures of an attempt, and of those before it."""

    def __init__(self, logs: str, since: int, starts: Callable[[], Attempt]) -> None:
        self.logs, self.since, self.starts = logs, since, starts
        """The attempt's folder; the attempt from which failures count; where its ranks are."""
        self._looked_at: Dict[str, List[str]] = {}
        self._echo: Optional[Failure] = None
        self._echo_s = 0.0

    def last(self) -> Optional[Failure]:
        """Return the first error of the last start."""
        return last_failure(self.starts(), self.logs)

    def in_job(self, *, all_ended: bool) -> Optional[Failure]:
        """Return how the ranks of one torchrun failed alike in two starts, if they have."""
        for folder in sorted(glob.glob(glob.escape(self.logs) + "/node-*/*/")):
            if not os.path.isdir(folder + "attempt_1"):
                continue
            files = sorted(
                glob.glob(glob.escape(folder) + "attempt_*")
                + glob.glob(glob.escape(folder) + "attempt_*/*/error.json")
            )
            if self._looked_at.get(folder) == files and not all_ended:
                continue  # the same files have the same errors
            self._looked_at[folder] = files
            failure = repeated_failure(self.starts(), folder.rstrip("/"), all_ended=all_ended)
            if failure is None:
                continue
            if not failure.message.endswith(ANOTHER_ONE):
                return failure
            self._echo = failure  # another node, whose files may come late, has the cause
            self._echo_s = self._echo_s or time.monotonic()
        late = self._echo_s and time.monotonic() >= self._echo_s + ECHO_S
        return self._echo if all_ended or late else None

    def in_earlier_attempt(self, now: Failure) -> Optional[Earlier]:
        """Return the same failure of an earlier attempt, if there is one."""
        logs, _, number = self.logs.rpartition("-")
        for before in range(int(number) - 1, self.since - 1, -1):
            folder = f"{logs}-{before}"
            failure = from_line(read(folder + "/first_error", 4096))
            if failure is not None and alike(failure, now, in_a_row=True):
                return Earlier(failure, folder)
            # Where no step is known, the attempts in between may have made progress.
            if now.kind != "fault" and not now.step[:1].isdigit():
                break
        return None
