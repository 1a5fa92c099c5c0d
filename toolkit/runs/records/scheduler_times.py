"""When a scheduler was asked for an attempt's nodes, and when it gave them.

On Slurm, the batch script keeps what the controller says of the job in the attempt's folder
(docs/reference/run-directory.md). On Kubernetes, the pods have them.
"""

import contextlib
import re
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from toolkit.runs.records.log_reader import attempt_folders
from toolkit.text import untrusted

_MOST_ATTEMPTS = 1000
"""Of how many attempts, the newest ones, the times are read."""

_TOLERANCE_S = 2.0
"""By how much an attempt may seem to begin before it was started: times are in whole seconds."""


_FILE_BYTES = 1 << 18
"""How much `scontrol` may say of a job: it names each of its nodes."""

_QUEUED = re.compile(r" SubmitTime=(\d{1,11}) EligibleTime=(\d{1,11}) ")
_STARTED = re.compile(r" StartTime=(\d{1,11}) EndTime=")
"""In the line of `scontrol -o show job`, with times in seconds since 1970. Two patterns, since one
for the whole line would search the rest of it again for each of its beginnings."""


class Scheduled(NamedTuple):
    """What a scheduler says of one attempt; each time in seconds since 1970."""

    queued: float
    """When it was submitted, or queued again."""

    eligible: float
    """From when on it might have started: no dependency, begin time or hold was in the way."""

    started: float
    """When it was given its nodes."""


def scheduled_in(run_dir: Path) -> list[Scheduled]:
    """Return the times that the scripts of a run have noted, by attempt."""
    folders = attempt_folders(run_dir)[-_MOST_ATTEMPTS:]
    return [times for folder in folders if (times := _noted(folder / "scheduled", run_dir))]


def _noted(path: Path, run_dir: Path) -> Scheduled | None:
    with contextlib.suppress(OSError):
        text = untrusted.read_text(path, limit=_FILE_BYTES, below=run_dir)
        if (queued := _QUEUED.search(text)) and (
            started := _STARTED.search(text, queued.end() - 1)
        ):
            return Scheduled(*map(float, (*queued.groups(), *started.groups())))
    return None


class Schedule:
    """What a scheduler says of the attempts of a run."""

    def __init__(self, times: Iterable[Scheduled]) -> None:
        self._times = sorted(times, key=lambda each: each.started)

    def newest_before(self, moment: float) -> Scheduled | None:
        """Return the times of the attempt that began at a moment: the newest ones then."""
        latest = moment + _TOLERANCE_S
        count = bisect_right(self._times, latest, key=lambda each: each.started)
        return self._times[count - 1] if count else None
