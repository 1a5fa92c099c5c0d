"""The jobs that a run has had on Slurm: one, several of a chain, or more after `resubmit`.

They stand in `jobs.jsonl` of the run directory, the oldest first, so that every handle of the run
knows them all.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import LauncherError
from toolkit.job.sweep import Point
from toolkit.text import untrusted

__all__ = [
    "SlurmJob",
    "as_lines",
    "has_points",
    "is_job_id",
    "read_jobs",
    "read_points",
    "write_jobs",
    "write_points",
]

_JOBS, _POINTS = "jobs.jsonl", "points.jsonl"
_VERSION = 1
_BYTES = 64 << 20
_MODES = ("", "continue", "chain")
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?", re.ASCII)
_AFTER = re.compile(r"[a-z0-9:,_?+]{0,100000}", re.ASCII)
_POINT = re.compile(r"(?!\.)[^/\x00-\x1f]{1,255}")
"""A point's name is that of its folder in the sweep's run directory."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job that was submitted for a run."""

    job_id: str
    """Slurm's id; that of the whole array for a sweep."""

    mode: str = ""
    """The script's last argument: `continue`, `chain`, or none for a new run."""

    points: tuple[int, ...] | None = None
    """The points that are its tasks; None for all, or without a sweep."""

    after: str = ""
    """The dependency, as it was given to sbatch."""

    folder: str = ""
    """Where it was submitted: relative paths in a job are below this folder."""


def read_jobs(run_dir: Path | None) -> list[SlurmJob]:
    """Return the jobs of a run, the oldest first; none where they were not written down."""
    return [job for line in _lines(run_dir, _JOBS) if (job := _job(line)) is not None]


def is_job_id(text: object) -> bool:
    """Whether a text is an id of Slurm: `1234`, or `1234_7` for a task.

    >>> is_job_id("1234_7"), is_job_id("-1"), is_job_id("1; rm")
    (True, False, False)
    """
    return isinstance(text, str) and _JOB_ID.fullmatch(text) is not None


def _job(line: Any) -> SlurmJob | None:
    """Return the job of a line of the file; None if the line does not describe one."""
    data = untrusted.mapping(line)
    texts = {name: data.get(name, "") for name in ("job_id", "mode", "after", "folder")}
    points = data.get("points")
    good = (
        data.get("version") == _VERSION
        and is_job_id(texts["job_id"])
        and all(
            isinstance(text, str) and untrusted.printable(text) == text for text in texts.values()
        )
        and texts["mode"] in _MODES
        and _AFTER.fullmatch(texts["after"])
        and (points is None or isinstance(points, list))
        and all(untrusted.whole(point) is not None for point in points or ())
    )
    return SlurmJob(**texts, points=None if points is None else tuple(points)) if good else None


def as_lines(jobs: Iterable[SlurmJob]) -> list[str]:
    """Return jobs as they stand in the file."""
    return [json.dumps({"version": _VERSION, **asdict(job)}) for job in jobs]


def write_jobs(run_dir: Path, jobs: Iterable[SlurmJob]) -> None:
    """Add jobs to those of a run, except those that it knows.

    Raises:
        LauncherError: they cannot be written.
    """
    job_ids = {job.job_id for job in read_jobs(run_dir)}
    lines = [f"{line}\n" for line in as_lines(job for job in jobs if job.job_id not in job_ids)]
    try:
        untrusted.append_bytes(run_dir / _JOBS, "".join(lines).encode())
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
        untrusted.write_bytes(run_dir / _POINTS, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise LauncherError(f"{run_dir} cannot be written: {error.strerror}") from error


def has_points(run_dir: Path | None) -> bool:
    """Whether a run is a sweep."""
    path = f"{run_dir}/{_POINTS}"
    return run_dir is not None and os.path.exists(path)  # noqa: PTH110  # for each of many runs


def read_points(run_dir: Path | None) -> list[tuple[str, dict[str, str | bool]]]:
    """Return name and settings of each point of a sweep; none where the run is none.

    Raises:
        LauncherError: one of them cannot be read: the points after it would be taken for others.
    """
    if run_dir is None or not has_points(run_dir):
        return []
    try:
        lines = untrusted.read_bytes(run_dir / _POINTS, limit=_BYTES).split(b"\n")
        points = [_point(line) for line in lines if line]
        if not points:  # a sweep has one at least
            raise ValueError(_POINTS)
        return points
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is torn, or none of ours"
        raise LauncherError(f"the points of the sweep cannot be read: {_POINTS}: {why}") from None


def _point(line: bytes) -> tuple[str, dict[str, str | bool]]:
    data = untrusted.mapping(untrusted.parse_json(line))
    name, settings = data.get("name"), data.get("settings")
    if not isinstance(name, str) or not _POINT.fullmatch(name) or not isinstance(settings, dict):
        raise ValueError(line)
    if not all(isinstance(value, str | bool) for value in settings.values()):
        raise ValueError(line)
    return name, settings


def _lines(run_dir: Path | None, name: str) -> list[Any]:
    if run_dir is None:
        return []
    return list(untrusted.lines_of_json(f"{run_dir}/{name}", limit=_BYTES))
