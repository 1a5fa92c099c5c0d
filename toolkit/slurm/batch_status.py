"""Where many runs on Slurm stand: one question to the controller, and one to the accounting.

The controller forgets ended jobs within minutes. Jobs that it has forgotten are looked up in their
run directories, and only the rest in the accounting, if the site has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toolkit.errors import LauncherError
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.snapshot import Queue
from toolkit.slurm.squeue import Row

if TYPE_CHECKING:
    from toolkit.slurm.run import SlurmRun

__all__ = ["LIST_AGE_S", "STATUS_AGE_S", "statuses", "statuses_of_parts"]

STATUS_AGE_S = 1.0
"""Maximum age of an answer for `status` of a single run, in seconds."""

LIST_AGE_S = 3.0
"""How old an answer may be for a list."""


@dataclass
class _Part:
    """A run, or a point of a sweep, and where it stands as far as is known."""

    run: "SlurmRun"
    status: RunStatus | None
    """None for another user's run whose job ids have not been looked up."""


def statuses(
    queue: Queue, runs: "Sequence[SlurmRun]", *, max_age_s: float, changed: float
) -> list[RunStatus]:
    """Return where runs stand, of a sweep the sum of its points.

    Args:
        queue: The snapshot that answers for all of them.
        runs: The runs, of one Slurm.
        max_age_s: How old an answer may be.
        changed: When one of them changed that the answer must know.
    """
    collected = statuses_of_parts(queue, runs, max_age_s=max_age_s, changed=changed)
    pairs = zip(runs, collected, strict=True)
    return [run.sum_of(parts) if run.points else parts[0] for run, parts in pairs]


def statuses_of_parts(
    queue: Queue, runs: "Sequence[SlurmRun]", *, max_age_s: float, changed: float
) -> list[list[RunStatus]]:
    """Return where the points of each run stand; a run that is no sweep is its own only part."""
    try:
        seen = queue.look(max_age_s=max_age_s, changed=changed)
    except LauncherError as error:
        return [[part.unreachable(str(error)) for part in run.parts] for run in runs]
    collected = [list(map(_Part, run.parts, run.told(seen))) for run in runs]
    flat = [part for parts in collected for part in parts]
    _ask_for_others(queue, [part for part in flat if part.status is None])
    _ask_accounting(queue, [part for part in flat if part.status and part.status.lost])
    return [[_noted(part.status, seen.note) for part in parts] for parts in collected]


def _ask_for_others(queue: Queue, parts: Sequence[_Part]) -> None:
    """Query the jobs of other users by their ids."""
    if not parts:
        return
    try:
        seen = queue.others([job.job_id for part in parts for job in part.run.jobs])
    except LauncherError as error:
        for part in parts:
            part.status = part.run.unreachable(str(error))
        return
    for part in parts:
        (part.status,) = part.run.told(seen)


def _ask_accounting(queue: Queue, parts: Sequence[_Part]) -> None:
    """Query the accounting for jobs that are lost otherwise."""
    if not parts:
        return
    wholes = [job.job_id.partition("_")[0] for part in parts for job in part.run.jobs]
    try:
        ended = queue.ended(wholes)
    except LauncherError as error:
        for part in parts:
            assert part.status is not None
            reason = f"{part.status.reason}; {error}"
            part.status = RunStatus(state=RunState.UNKNOWN, reason=reason)
        return
    rows = {_key(row): row for ended_rows in (ended or {}).values() for row in ended_rows}
    for part in parts:
        part.status = part.run.recalled(rows) or part.status


def _key(row: Row) -> str:
    """Return the id by which a row is looked for: that of the array for `77_[3-5]`."""
    return row.whole if "[" in row.job_id else row.job_id


def _noted(status: RunStatus | None, note: str) -> RunStatus:
    assert status is not None
    if not note or status.state.final:
        return status
    return replace(status, reason="; ".join(filter(None, [status.reason, note])))
