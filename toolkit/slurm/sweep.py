"""A sweep on Slurm: a job array; each task is a point with a separate run directory."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.runs.records import run_directory
from toolkit.runs.records.log_reader import LogView, follow_points
from toolkit.runs.records.log_reader import read_points as read_lines_of
from toolkit.runs.records.points import read_points, record_of_point
from toolkit.runs.run import unfinished_of
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.run import CONDITIONS, SlurmRun
from toolkit.slurm.snapshot import Snapshot
from toolkit.slurm.status import JobRow, status_of
from toolkit.slurm.submission import SlurmJob, jobs_stamp


class SlurmSweep(SlurmRun):
    """All points of a sweep."""

    _known: tuple[Snapshot, object, Mapping[str, JobRow], Mapping[int, SlurmJob]] | None = None
    _known_jobs: tuple[object, Mapping[int, SlurmJob]] | None = None

    @cached_property
    def points(self) -> "tuple[SlurmPoint, ...]":
        """The points of the sweep; each is a run."""
        points = read_points(self.record.run_dir)
        return tuple(
            SlurmPoint(self, index, name, settings) for index, (name, settings) in enumerate(points)
        )

    def statuses(self) -> list[RunStatus]:
        """Return the status of each point, from one query and the run directories."""
        return self._part_statuses()

    def statuses_in(self, snapshot: Snapshot) -> "Sequence[RunStatus | None]":
        """Return the status of each point from Slurm's answer and its run directory."""
        rows, newest = self.known_in(snapshot)
        return [point.status_in(rows, newest[point.index], snapshot) for point in self.points]

    def known_in(self, snapshot: Snapshot) -> tuple[Mapping[str, JobRow], Mapping[int, SlurmJob]]:
        """Return the rows and newest jobs of the sweep in an answer, once for all points."""
        stamp = jobs_stamp(self.run_dir)
        if self._known is None or self._known[0] is not snapshot or self._known[1] != stamp:
            rows = self._rows_in(snapshot)
            self._known = snapshot, stamp, rows, self.newest(rows)
        return self._known[2:]

    def newest(self, rows: Mapping[str, JobRow]) -> Mapping[int, SlurmJob]:
        """Return the newest job of each point, including jobs that users submitted."""
        if jobs := self._jobs_of(rows):
            return self._by_point(jobs)
        # Every point calls this; read the job file again only if it has changed.
        stamp = jobs_stamp(self.run_dir)
        if self._known_jobs is None or self._known_jobs[0] != stamp:
            self._known_jobs = stamp, self._by_point(self.jobs)
        return self._known_jobs[1]

    def _by_point(self, jobs: Sequence[SlurmJob]) -> Mapping[int, SlurmJob]:
        return {
            index: job
            for job in jobs
            for index in (range(len(self.points)) if job.points is None else job.points)
        }

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield the output of the points, each line prefixed with its point's name."""
        self._login.fetch(time.time())
        spans = {point.uri: point._spans for point in self.points}
        if view.follow:
            return follow_points(self, view, spans, on_status)
        return read_lines_of(self.points, view, spans)

    def _only_waiting(self, job_ids: list[str]) -> list[str]:
        return ["--state=PENDING", *dict.fromkeys(i.partition("_")[0] for i in job_ids)]

    def conditions(self, wish: str) -> list[str]:
        """Return the sbatch dependencies on the end of all points."""
        statuses, rows = self.statuses(), self._rows()
        newest, several = self.newest(rows), len(self._jobs_of(rows) or self.jobs) > 1
        pairs = list(zip(self.points, statuses, strict=True))
        live = [point for point, status in pairs if not (status.state.final or status.lost)]
        if wish == "ok":
            for point, status in pairs:
                if point not in live:
                    point._met(wish, status)
        elif not live:
            return self._met(wish, self.sum_of(statuses))
        jobs = list(dict.fromkeys(newest[point.index].job_id for point in live))
        if not several:
            return [f"{CONDITIONS[wish]}:{job_id}" for job_id in jobs]
        if wish == "fail":
            raise LauncherError(
                f"after {self.uri}: some of its points were submitted again, so Slurm cannot tell "
                "whether one of them fails; wait for it with `toolkit wait`"
            )
        tasks = [f"{newest[point.index].job_id}_{point.index}" for point in live]
        return [":".join([CONDITIONS[wish], *tasks])] if tasks else []

    def unfinished(self) -> list[int]:
        """Return the points that ended without success."""
        return unfinished_of(self, self.statuses())

    def withdraw_cancel(self, points: list[int]) -> None:
        """Clear the cancellation of the sweep for these points; the others stay cancelled."""
        assert self.run_dir is not None
        whole = run_directory.cancel_requested(self.run_dir)
        for point in self.points:
            if point.index in points:
                self._login.withdraw_cancel(point.record)
            elif whole and not run_directory.has_attempts(point.run_dir):
                self._login.request_cancel(point.record)
        self._login.withdraw_cancel(self.record)


class SlurmPoint(SlurmRun):
    """A point of a sweep: a task of the array."""

    def __init__(
        self, sweep: SlurmSweep, index: int, folder: str, settings: Mapping[str, str | bool]
    ) -> None:
        self.sweep = sweep
        self.index = index
        self.settings = settings
        super().__init__(record_of_point(sweep.record, index, folder), sweep._login)

    @property
    def run_dir(self) -> Path:
        """The point's own run directory."""
        folder = super().run_dir
        assert folder is not None
        return folder

    @property
    def jobs(self) -> list[SlurmJob]:
        """The newest task of this point."""
        newest = self.sweep.newest({})[self.index]
        return [replace(newest, job_id=f"{newest.job_id}_{self.index}")]

    def statuses_in(self, snapshot: Snapshot) -> "Sequence[RunStatus | None]":
        """Return the status of this point."""
        rows, newest = self.sweep.known_in(snapshot)
        return (self.status_in(rows, newest[self.index], snapshot),)

    def status_in(
        self, rows: Mapping[str, JobRow], job: SlurmJob, snapshot: Snapshot
    ) -> RunStatus | None:
        """Return the status of the point from Slurm's rows and its run directory."""
        row = rows.get(f"{job.job_id}_{self.index}")
        if row is None and not run_directory.has_attempts(self.run_dir):
            row = rows.get(job.job_id)  # one row for all tasks cancelled before they started
        if row is None:
            return self._forgotten(snapshot)
        # The task itself creates the folder of its point: without it, the task failed earlier.
        failed_before = row.state is RunState.FAILED and not self.run_dir.is_dir()
        run_dir = None if failed_before else self.run_dir
        return status_of(row, run_dir, after=job.after, place=snapshot.place(row))

    def _ids(self, job: SlurmJob) -> Sequence[str]:
        whole = job.job_id.partition("_")[0]
        return (job.job_id,) if run_directory.has_attempts(self.run_dir) else (job.job_id, whole)

    def _rows(self) -> dict[str, JobRow]:
        rows = super()._rows()
        job_id = self.sweep.newest(rows)[self.index].job_id
        return {i: row for i, row in rows.items() if i == f"{job_id}_{self.index}"}

    def _by_run_dir(self) -> RunStatus:
        if run_directory.has_attempts(self.run_dir):
            return run_directory.ended_status(self.run_dir)
        folders = (self.run_dir, self.record.run_dir.parent if self.record.run_dir else None)
        if any(folder and run_directory.cancel_requested(folder) for folder in folders):
            return RunStatus(state=RunState.CANCELLED, reason="never started")
        return super()._by_run_dir()

    def unreachable(self, reason: str) -> RunStatus:
        """Return a final status that no requeue can follow; any other status is unknown."""
        if not run_directory.has_attempts(self.run_dir):
            return RunStatus(state=RunState.UNKNOWN, reason=reason)
        return super().unreachable(reason)

    @property
    def _home(self) -> str | None:
        return self.sweep._home

    @property
    def _recorded_in(self) -> Path | None:
        return self.sweep.run_dir

    def _log(self, run_dir: Path) -> Path:
        return run_dir.parent / "logs" / f"{self.index}.log"

    def cancel(self) -> None:
        """Request this point to stop with a checkpoint, or never to start."""
        self.run_dir.mkdir(exist_ok=True)
        super().cancel()

    def _ask_to_stop(self, job_ids: list[str]) -> None:
        # While other tasks of the array wait, slurmctld signals this task but reports a failure:
        # scancel would repeat the signal after 5 s, and again for a minute and a half.
        self._scancel("--batch", "--signal=USR2", *job_ids, within_s=4)

    def conditions(self, wish: str) -> list[str]:
        """Return the sbatch dependencies on this point's end."""
        live = [task for task, row in self._rows().items() if not row.state.final]
        if live:
            return [f"{CONDITIONS[wish]}:{live[-1]}"]
        return self._met(wish, self.status())

    def unfinished(self) -> list[int]:
        """Return this point if it ended without success."""
        super().unfinished()
        return [self.index]
