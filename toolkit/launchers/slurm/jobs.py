"""The jobs that a run has had on Slurm: one, several of a chain, or more after `resubmit`.

They stand in `jobs.jsonl` of the run directory, the oldest first, so that every handle of the run
knows them all.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.sweeps import Point

__all__ = [
    "SlurmJob",
    "as_lines",
    "has_points",
    "read_jobs",
    "read_points",
    "write_jobs",
    "write_points",
]

_JOBS, _POINTS = "jobs.jsonl", "points.jsonl"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job that was submitted for a run."""

    job_id: str
    """Slurm's id; that of the whole array for a sweep."""

    mode: str = ""
    """The script's last argument: `continue`, `chain`, or none for a new run."""

    points: tuple[int, ...] | None = None
    """The points that are its tasks; None for all, or where there is no sweep."""

    after: str = ""
    """What it waits for, as sbatch was told."""

    folder: str = ""
    """Where it was submitted: what is relative in a job is below this folder."""


def read_jobs(run_dir: Path | None) -> list[SlurmJob]:
    """Return the jobs of a run, the oldest first; none where they were not written down."""
    found = []
    for line in _lines(run_dir, _JOBS):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            known = json.loads(line)
            if known.pop("version") == _VERSION:
                points = known.pop("points")
                found.append(SlurmJob(**known, points=points if points is None else tuple(points)))
    return found


def as_lines(jobs: Iterable[SlurmJob]) -> list[str]:
    """Return jobs as they stand in the file."""
    return [json.dumps({"version": _VERSION, **asdict(job)}) for job in jobs]


def write_jobs(run_dir: Path, jobs: Iterable[SlurmJob]) -> None:
    """Add jobs to those of a run, except those that it knows.

    Raises:
        LauncherError: they cannot be written.
    """
    known = {job.job_id for job in read_jobs(run_dir)}
    lines = [f"{line}\n" for line in as_lines(job for job in jobs if job.job_id not in known)]
    try:
        with (run_dir / _JOBS).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
    except OSError as error:
        raise LauncherError(
            f"the jobs are submitted, but {run_dir / _JOBS} cannot be written: {error.strerror}"
        ) from error


def write_points(run_dir: Path, points: Sequence[Point]) -> None:
    """Write which points a sweep has.

    Raises:
        LauncherError: they cannot be written.
    """
    lines = [
        json.dumps(
            {"version": _VERSION, "index": p.index, "name": p.name, "settings": dict(p.settings)}
        )
        for p in points
    ]
    try:
        (run_dir / _POINTS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise LauncherError(f"{run_dir} cannot be written: {error.strerror}") from error


def has_points(run_dir: Path | None) -> bool:
    """Whether a run is a sweep."""
    path = f"{run_dir}/{_POINTS}"
    return run_dir is not None and os.path.exists(path)  # noqa: PTH110  # for each of many runs


def read_points(run_dir: Path | None) -> list[tuple[str, dict[str, str | bool]]]:
    """Return name and settings of each point of a sweep; none where the run is none."""
    known = [json.loads(line) for line in _lines(run_dir, _POINTS)]
    return [(point["name"], point["settings"]) for point in known]


def _lines(run_dir: Path | None, name: str) -> list[str]:
    try:
        if run_dir is None:
            return []
        with open(f"{run_dir}/{name}", encoding="utf-8") as file:  # noqa: PTH123  # asked for each run of a long list
            return file.read().splitlines()
    except OSError:
        return []
