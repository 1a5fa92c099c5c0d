"""A run on Slurm, of one job or several; its status comes from squeue and the run directory."""

import os
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.profile import SlurmProfile
from toolkit.runs import registry, run_directory
from toolkit.runs.log_reader import (
    LogView,
    Span,
    all_spans,
    attempt_folders,
    attempt_spans,
    follow_files,
    refuse_attempt,
    without_stop_traces,
)
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.batch_status import LIST_AGE_S, STATUS_AGE_S, statuses
from toolkit.slurm.jobs import SlurmJob, is_job_id, read_jobs
from toolkit.slurm.login.host import Here, Login
from toolkit.slurm.snapshot import Queue, Snapshot
from toolkit.slurm.squeue import Command, Row, first_line, judge

__all__ = ["CONDITIONS", "SlurmRun"]

_ASK_EVERY_S = 3.0
"""How often a follower polls whether the job has ended; clusters limit requests."""

_CLOCK_TICK_S = 0.05
"""By how much the time of a file may lie before the moment in which it was written."""

CONDITIONS = {"ok": "afterok", "any": "afterany", "fail": "afternotok"}
"""What a job may expect of another run, and sbatch's word for it."""


class SlurmRun(Run):
    """A run of a Slurm cluster."""

    def __init__(
        self,
        record: registry.RunRecord,
        command: Command,
        queue: Queue | None = None,
        login: Login | None = None,
    ) -> None:
        super().__init__(record)
        self._login = login or Here(SlurmProfile(), command)
        self._command = command
        self._queue = queue or Queue(command)
        self.job_id = record.address[2]

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or its mirror where it lies on a login node."""
        return self._login.seen(self.record)

    @property
    def jobs(self) -> list[SlurmJob]:
        """The jobs of this run that were submitted by the toolkit, the oldest first."""
        return read_jobs(self.run_dir) or [SlurmJob(job_id=self.job_id)]

    @property
    def place(self) -> Hashable:
        """The snapshot of the Slurm cluster that is queried."""
        return self._queue.place

    @property
    def parts(self) -> "Sequence[SlurmRun]":
        """The parts with a state of their own: the points of a sweep, or the run itself."""
        return (self,)

    def status(self) -> RunStatus:
        """Return the status by squeue; of forgotten jobs by the run directory or sacct."""
        (status,) = statuses(self._queue, [self], max_age_s=STATUS_AGE_S, changed=self._changed())
        return status

    def statuses_of(self, runs: Sequence[Run]) -> list[RunStatus]:
        """Return the statuses of all by one query."""
        ours = [run for run in runs if isinstance(run, SlurmRun)]
        assert len(ours) == len(runs)
        changed = max((run.record.created for run in ours), default=0.0)
        return statuses(self._queue, ours, max_age_s=LIST_AGE_S, changed=changed)

    def _changed(self) -> float:
        """Return when something happened to this run that an answer of Slurm must know."""
        left = run_directory.changed_at(self.run_dir) if self.run_dir is not None else 0.0
        return max(self.record.created, left + _CLOCK_TICK_S)

    def told(self, seen: Snapshot) -> "Sequence[RunStatus | None]":
        """Return the status of each part from Slurm's answer and the run directory.

        None for a run of another user, whose jobs must be queried by id.
        """
        rows = self._rows_in(seen)
        jobs = self._jobs_of(rows)
        pairs = [(job, rows[job.job_id]) for job in jobs if job.job_id in rows]
        live = [(job, row) for job, row in pairs if not row.state.final]
        if live:
            begun = [pair for pair in live if pair[1].state is not RunState.PENDING]
            if not begun and all(job.mode == "chain" for job, _ in live) and self._is_over():
                return (self._left_behind(),)  # what is left of the chain has nothing to do
            job, row = (begun or live)[0]
            return (judge(row, self.run_dir, after=job.after),)
        if not pairs:
            return (self._forgotten(seen),)
        job, row = pairs[-1]
        by_slurm = judge(row, self.run_dir, after=job.after)
        if len(jobs) == 1:
            return (by_slurm,)
        status = self._left_behind()
        # A script that was killed before it could find out by whom says less than Slurm.
        cut_short = row.state is RunState.CANCELLED and status.word == "terminated"
        return (by_slurm if cut_short or status.state is RunState.UNKNOWN else status,)

    def recalled(self, rows: Mapping[str, Row]) -> RunStatus | None:
        """Return the status of a run that only sacct still knows."""
        pairs = [(job, rows[i]) for job in self.jobs for i in self._ids(job) if i in rows]
        ours = [(job, row) for job, row in pairs if self._is_ours(row.command)]
        if not ours:
            return None
        begun = [pair for pair in ours if pair[1].state is not RunState.CANCELLED]
        job, row = (begun or ours)[-1]
        if row.state.final:
            return judge(row, self.run_dir, after=job.after)
        # It is late when a job has ended just now, or when the controller could not reach it then.
        reason = f"{row.reason}, and the controller does not know the job"
        return RunStatus(state=RunState.UNKNOWN, reason=reason)

    def _ids(self, job: SlurmJob) -> Sequence[str]:
        """Return by which ids the accounting may know a job."""
        return (job.job_id,)

    def _is_over(self) -> bool:
        return self.run_dir is not None and run_directory.is_over(self.run_dir)

    @property
    def _home(self) -> str | None:
        """The run directory as Slurm's commands name it."""
        run_dir = self.record.run_dir
        return self.record.remote_dir or (None if run_dir is None else str(run_dir))

    def _rows_in(self, seen: Snapshot) -> dict[str, Row]:
        """Return the rows of this run's jobs, by their ids."""
        script = f"{self._home}/{self.record.job}.sbatch"
        rows = seen.rows(self.job_id.partition("_")[0], script)
        return {row.job_id: row for row in rows if self._is_ours(row.command)}

    def _is_ours(self, command: str) -> bool:
        """Whether a job of this id is this run: other clusters, and later years, use ids again."""
        return self._home is None or self._home in command

    def _jobs_of(self, rows: Mapping[str, Row]) -> list[SlurmJob]:
        """Return the jobs of this run, and those that people have submitted with `continue`."""
        if not rows:
            return []
        jobs = self.jobs
        job_ids = {job.job_id.partition("_")[0] for job in jobs}
        by_hand: dict[str, list[int]] = {}
        for row in rows.values():
            if row.whole not in job_ids and row.goes_on and is_job_id(row.job_id):
                by_hand.setdefault(row.whole, []).append(int(row.job_id.partition("_")[2] or -1))
        more = [
            SlurmJob(job_id=job_id, mode="continue", points=tuple(by_hand[job_id]))
            for job_id in sorted(by_hand, key=int)
        ]
        return [*jobs, *more]

    def _forgotten(self, seen: Snapshot) -> RunStatus | None:
        """Return the status of a run whose jobs Slurm does not know, or None if it is unknown."""
        status = self._left_behind()
        if status.state is RunState.SUCCEEDED:
            return status
        try:
            self._queue.require(self._cluster)
        except LauncherError as error:
            return self.unreachable(str(error))
        return None if seen.mine and self._is_of_another_user() else status

    @property
    def _cluster(self) -> str:
        return self.uri.split("/")[2]

    def _is_of_another_user(self) -> bool:
        try:
            return self.run_dir is not None and self.run_dir.stat().st_uid != os.getuid()
        except OSError:
            return False

    def _rows(self) -> dict[str, Row]:
        """Return the current rows of the jobs, by id.

        Raises:
            LauncherError: Slurm does not answer, or another cluster does.
        """
        rows = self._rows_in(self._queue.look(patient=False))
        if not rows and self._left_behind().state is not RunState.SUCCEEDED:
            self._queue.require(self._cluster)
            if self._is_of_another_user():
                rows = self._rows_in(self._queue.others([job.job_id for job in self.jobs]))
        return rows

    def _left_behind(self) -> RunStatus:
        run_dir = self.run_dir
        status = None if run_dir is None else run_directory.ended_status(run_dir)
        if status is None or run_dir is None or (status.lost and not run_dir.is_dir()):
            reason = "Slurm does not know the job, and its run directory is not here"
            return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)
        if (
            status.lost
            and (after := self.jobs[-1].after)
            and not run_directory.has_attempts(run_dir)
        ):
            reason = f"never started: its dependency ({after}) was not satisfied"
            return RunStatus(state=RunState.CANCELLED, reason=reason)
        return status

    def unreachable(self, reason: str) -> RunStatus:
        """Believe an end that nothing can follow; otherwise the job may be queued again."""
        if self.run_dir is not None and self.run_dir.is_dir():
            status = run_directory.ended_status(self.run_dir)
            outcome = run_directory.outcome(self.run_dir) or {}
            if status.state is RunState.SUCCEEDED or outcome.get("status") == "fatal":
                return status
        return RunStatus(state=RunState.UNKNOWN, reason=reason)

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield what the jobs have printed, all their attempts."""
        self._login.fetch(time.time())
        run_dir = self._visible()
        refuse_attempt(run_dir, view)
        lines = follow_files(
            lambda: self._spans(view),
            ended=lambda: not view.follow or self._ended(view, on_status),
            pause_s=0.5,
            ask_every_s=_ASK_EVERY_S,
        )
        return view.of_ranks(without_stop_traces(lines))

    def _visible(self) -> Path:
        if self.run_dir is None:
            raise LauncherError(f"{self.uri} was not submitted from here; its log is unknown")
        return self.run_dir

    def _log(self) -> Path:
        return self._visible() / "logs" / "job.log"

    def _spans(self, view: LogView) -> list[Span]:
        if view.attempt is None:
            return all_spans(self._visible(), self._log())
        return attempt_spans(self._visible(), view.attempt)

    def _ended(self, view: LogView, on_status: Callable[[RunStatus], object]) -> bool:
        if view.attempt is not None and self.run_dir is not None:
            later = attempt_folders(self.run_dir)[view.attempt + 1 :]
            if later:
                return True
        status = self.status()
        on_status(status)
        return status.state.final or status.lost

    def cancel(self) -> None:
        """Signal the script to stop within `stop.grace`; a second call ends the job immediately."""
        try:
            rows = self._rows()
        except LauncherError as error:
            if not self.unreachable(str(error)).state.final:
                raise LauncherError(f"{self.uri} cannot be cancelled: {error}") from None
            return
        waiting, begun = _living(rows)
        if not waiting and not begun:
            return
        folder = self.run_dir if self.run_dir is not None and self.run_dir.is_dir() else None
        again = folder is not None and run_directory.cancel_requested(folder)
        if folder is not None:
            # First: the next job of a chain may start just now.
            self._login.request_cancel(self.record)
        try:
            if waiting:
                self._scancel(*self._only_waiting(waiting))
            if begun:
                # The script answers USR2; plain scancel would leave the ranks KillWait only.
                if folder is not None and not again:
                    self._ask_to_stop(begun)
                else:
                    self._scancel(*begun)
        except LauncherError:
            if folder is not None and not again:
                self._login.withdraw_cancel(self.record)
            raise
        self._queue.forget()

    def _only_waiting(self, job_ids: list[str]) -> list[str]:
        return job_ids

    def _ask_to_stop(self, job_ids: list[str]) -> None:
        self._scancel("--batch", "--signal=USR2", *job_ids)

    def _scancel(self, *words: str, within_s: int | None = None) -> None:
        limit = [] if within_s is None else ["timeout", str(within_s)]
        done = self._command([*limit, "scancel", *words])
        if within_s is not None and done.returncode == 124:
            return
        if done.returncode != 0 and not re.search("Invalid job id|already complet", done.stderr):
            raise LauncherError(f"scancel refused {self.uri}: {first_line(done.stderr)}")

    def conditions(self, wish: str) -> list[str]:
        """Return what sbatch must wait for, so that this run ends as wished: ok, any or fail.

        A run that has ended leaves nothing to wait for; Slurm would take a job that it has
        forgotten for one that ended well.

        Raises:
            LauncherError: it has ended otherwise, or its end is unknown.
        """
        rows = self._rows()
        jobs = self._jobs_of(rows)
        if living := [job.job_id for job in jobs if _lives(rows.get(job.job_id))]:
            return [f"{CONDITIONS[wish]}:{living[-1]}"]  # the last of a chain ends as the run does
        return self._met(wish, self.status())

    def _met(self, wish: str, status: RunStatus) -> list[str]:
        if not status.state.final and wish != "any":
            raise LauncherError(f"after {self.uri}: nobody knows how it ended: {status.reason}")
        if wish != "any" and (wish == "ok") != (status.state is RunState.SUCCEEDED):
            wanted = "succeed" if wish == "ok" else "fail"
            reason = f" ({status.reason})" if status.reason else ""
            raise LauncherError(
                f"after {self.uri}: it was to {wanted}, and it is {status.state.upper()}{reason}; "
                "this job would wait for ever"
            )
        return []

    def unfinished(self) -> list[int] | None:
        """Return which points to run again, None for a run that has none.

        Raises:
            LauncherError: it has succeeded, or has not ended.
        """
        rows = self._rows()
        status = self.status()
        if any(_lives(row) for row in rows.values()) or not (status.state.final or status.lost):
            raise LauncherError(
                f"{self.uri} is {status.state.upper()} and has not ended; `toolkit wait` for it, "
                "or `toolkit cancel` it first"
            )
        if status.state is RunState.SUCCEEDED:
            raise LauncherError(f"{self.uri} has succeeded; there is nothing to do again")
        return None


def _lives(row: Row | None) -> bool:
    return row is not None and not row.state.final


def _living(rows: dict[str, Row]) -> tuple[list[str], list[str]]:
    """Return the ids of the pending jobs, and of those that have started."""
    living = [row for row in rows.values() if _lives(row)]
    waiting = [row.job_id for row in living if row.state is RunState.PENDING]
    return waiting, [row.job_id for row in living if row.state is not RunState.PENDING]
