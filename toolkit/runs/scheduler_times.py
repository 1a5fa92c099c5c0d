"""When a scheduler was asked for an attempt's nodes, and when it gave them.

On Slurm, the batch script keeps what the controller says of the job in the attempt's folder
(docs/reference/run-directory.md). On Kubernetes, the pods have them.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from toolkit.runs.log_reader import attempt_folders
from toolkit.text import untrusted

_MOST_ATTEMPTS = 1000
"""Of how many attempts, the newest ones, the times are read."""

_TOLERANCE_S = 2.0
"""By how much an attempt may seem to begin before it was started: times are in whole seconds."""


_OF_SLURM = re.compile(
    r" SubmitTime=(\d{1,11}) EligibleTime=(\d{1,11}) .* StartTime=(\d{1,11}) EndTime="
)
"""In the line of `scontrol -o show job`, with times in seconds since 1970."""


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
        if found := _OF_SLURM.search(untrusted.read_text(path, below=run_dir)):
            return Scheduled(*map(float, found.groups()))
    return None


def newest_before(moment: float, times: Iterable[Scheduled]) -> Scheduled | None:
    """Return the times of the attempt that began at a moment: those that are the newest then."""

    def earlier() -> Iterator[Scheduled]:
        return (each for each in times if each.started <= moment + _TOLERANCE_S)

    return max(earlier(), key=lambda each: each.started, default=None)
