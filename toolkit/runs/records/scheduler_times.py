"""When a scheduler was asked for an attempt's nodes, and when it allocated them.

On Slurm, the batch script stores the controller's description of the job in the attempt's folder
(docs/reference/run-directory.md). On Kubernetes, the pods contain these times.
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
"""Number of newest attempts for which times are read."""

_TOLERANCE_S = 2.0
"""Tolerance for an attempt that seems to begin before its start: times are in whole seconds."""


_FILE_BYTES = 1 << 18
"""Byte limit of `scontrol`'s output for a job: it names every node."""

_QUEUED = re.compile(r" SubmitTime=(\d{1,11}) EligibleTime=(\d{1,11}) ")
_STARTED = re.compile(r" StartTime=(\d{1,11}) EndTime=")
"""Patterns for the line of `scontrol -o show job`, with times in seconds since 1970. They are two,
because a single pattern would search the rest of the line again for each possible beginning."""


class Scheduled(NamedTuple):
    """The scheduler's times of one attempt, each in seconds since 1970."""

    queued: float
    """When it was submitted, or requeued."""

    eligible: float
    """When it became eligible to start: no dependency, begin time or hold blocked it."""

    started: float
    """When its nodes were allocated."""


def scheduled_in(run_dir: Path) -> list[Scheduled]:
    """Return the times recorded by the scripts of a run, by attempt."""
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
    """The scheduler's times of a run's attempts."""

    def __init__(self, times: Iterable[Scheduled]) -> None:
        self._times = sorted(times, key=lambda each: each.started)

    def newest_before(self, moment: float) -> Scheduled | None:
        """Return the times of the attempt that began at a moment: the newest ones before it."""
        latest = moment + _TOLERANCE_S
        count = bisect_right(self._times, latest, key=lambda each: each.started)
        return self._times[count - 1] if count else None
