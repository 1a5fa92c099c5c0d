"""The jobs that a run has had on Slurm: one, several of a chain, or more after `resubmit`.

They stand in `jobs.jsonl` of the run directory, the oldest first, so that every handle of the run
knows them all.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.launchers.slurm_queue import Command, refused
from toolkit.sweeps import Point

__all__ = ["SlurmJob", "read_jobs", "read_points", "send", "write_jobs", "write_points"]

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


def write_jobs(run_dir: Path, jobs: Iterable[SlurmJob]) -> None:
    """Add jobs to those of a run.

    Raises:
        LauncherError: they cannot be written.
    """
    lines = [json.dumps({"version": _VERSION, **asdict(job)}) + "\n" for job in jobs]
    try:
        with (run_dir / _JOBS).open("a") as file:
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
        (run_dir / _POINTS).write_text("".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise LauncherError(f"{run_dir} cannot be written: {error.strerror}") from error


def read_points(run_dir: Path | None) -> list[tuple[str, dict[str, str | bool]]]:
    """Return name and settings of each point of a sweep; none where the run is none."""
    known = [json.loads(line) for line in _lines(run_dir, _POINTS)]
    return [(point["name"], point["settings"]) for point in known]


def _lines(run_dir: Path | None, name: str) -> list[str]:
    try:
        return [] if run_dir is None else (run_dir / name).read_text().splitlines()
    except OSError:
        return []


def send(
    command: Command,
    script: Path,
    run_dir: Path,
    *,
    log: str,
    jobs: Sequence[SlurmJob],
    array: str | None = None,
) -> list[SlurmJob]:
    """Submit one job, or a chain of them in which each waits for the one before.

    Args:
        command: How Slurm's commands are run.
        script: The batch script.
        run_dir: Its first argument.
        log: Where it prints, as sbatch wants it.
        jobs: What to submit; their ids are not known yet.
        array: The tasks of a sweep, where they are not all of the script's.

    Raises:
        LauncherError: sbatch refused one of them; those before it are cancelled.
    """
    sent: list[SlurmJob] = []
    for job in jobs:
        waits = [job.after] if job.after else []
        waits += [f"afterany:{sent[-1].job_id}"] if sent else []
        options = [f"--output={log}"]
        if job.folder != str(Path.cwd()):
            options.append(f"--chdir={job.folder}")
        if waits:
            options += [f"--dependency={','.join(waits)}", "--kill-on-invalid-dep=yes"]
        if array is not None:
            options.append(f"--array={array}")
        words = [job.mode] if job.mode else []
        answer = command(["sbatch", "--parsable", *options, str(script), str(run_dir), *words])
        match = re.fullmatch(r"(\d+)(;.*)?", answer.stdout.strip())
        if answer.returncode != 0 or match is None:
            if sent:
                command(["scancel", *(job.job_id for job in sent)])
            raise refused("sbatch", answer)
        known = asdict(job) | {"job_id": match[1], "after": ",".join(waits)}
        sent.append(SlurmJob(**known))
    return sent
