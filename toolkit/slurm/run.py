"""A run on Slurm with one or several jobs; its status comes from squeue and the run directory.

The controller forgets ended jobs within minutes. Forgotten jobs are looked up in their run
directories, and only the rest in the accounting, if the site has one. One query to each serves any
number of runs.
"""

import os
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.runs.evidence.stacks import Exchange
from toolkit.runs.records import log_reader, registry, run_directory
from toolkit.runs.records.log_reader import LogView, Span
from toolkit.runs.run import Run, require_unfinished
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.login.host import LoginNode
from toolkit.slurm.snapshot import Snapshot
from toolkit.slurm.status import JobRow, status_of
from toolkit.slurm.submission import SlurmJob, is_job_id, read_jobs
from toolkit.text.answers import error_line

_STATUS_AGE_S = 1.0
"""Maximum age of an answer for `status` of a single run, in seconds."""

_LIST_AGE_S = 3.0
"""Maximum age of an answer for a list, in seconds."""

_ASK_EVERY_S = 3.0
"""Poll interval of a follower in seconds; clusters limit requests."""

_CLOCK_TICK_S = 0.05
"""Maximum lag of a file's timestamp behind the clock, in seconds."""

CONDITIONS = {"ok": "afterok", "any": "afterany", "fail": "afternotok"}
"""The conditions for the end of another run, and their names in sbatch."""


class SlurmRun(Run):
    """A run of a Slurm cluster."""

    def __init__(self, record: registry.RunRecord, login: LoginNode) -> None:
        super().__init__(record)
        self._login = login
        self.job_id = record.address[2]

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or its mirror if it is on a login node."""
        return self._login.seen(self.record)

    @property
    def jobs(self) -> list[SlurmJob]:
        """The jobs of this run submitted by the toolkit, oldest first."""
        return read_jobs(self.run_dir) or [SlurmJob(job_id=self.job_id)]

    @property
    def batch_key(self) -> Hashable:
        """The snapshot of the run's Slurm cluster."""
        return self._login.snapshots.batch_key

    def status(self) -> RunStatus:
        """Return the status from squeue; for forgotten jobs, from the run directory or sacct."""
        return self.sum_of(self._part_statuses())

    def _part_statuses(self) -> list[RunStatus]:
        """Return the status of each part, by one query."""
        modified = run_directory.changed_at(self.run_dir) if self.run_dir is not None else 0.0
        # An answer of Slurm must be newer than this time.
        changed = max(self.record.created, modified + _CLOCK_TICK_S)
        return self._statuses_of_parts([self], max_age_s=_STATUS_AGE_S, changed=changed)[0]

    def statuses_of(self, runs: Sequence[Run]) -> list[RunStatus]:
        """Return the statuses of all runs, by one query."""
        ours = [run for run in runs if isinstance(run, SlurmRun)]
        assert len(ours) == len(runs)
        changed = max((run.record.created for run in ours), default=0.0)
        of_parts = self._statuses_of_parts(ours, max_age_s=_LIST_AGE_S, changed=changed)
        return [run.sum_of(parts) for run, parts in zip(ours, of_parts, strict=True)]

    def _statuses_of_parts(
        self, runs: "Sequence[SlurmRun]", *, max_age_s: float, changed: float
    ) -> list[list[RunStatus]]:
        """Return the statuses of each run's parts, from an answer newer than `changed`."""
        snapshots = self._login.snapshots
        try:
            snapshot = snapshots.look(max_age_s=max_age_s, changed=changed)
        except LauncherError as error:
            return [[part.unreachable(str(error)) for part in run.parts] for run in runs]
        statuses: dict[SlurmRun, RunStatus] = {}
        others: list[SlurmRun] = []  # runs of other users: their jobs are queried by id
        for run in runs:
            for part, status in zip(run.parts, run.statuses_in(snapshot), strict=True):
                if status is None:
                    others.append(part)
                else:
                    statuses[part] = status
        if others:
            try:
                by_id = snapshots.others([job.job_id for part in others for job in part.jobs])
            except LauncherError as error:
                statuses |= {part: part.unreachable(str(error)) for part in others}
            else:
                statuses |= {part: s for part in others for s in part.statuses_in(by_id) if s}
        statuses |= self._accounted([part for part, s in statuses.items() if s.lost], statuses)
        if snapshot.note:
            for part, status in statuses.items():
                if not status.state.final:
                    reason = "; ".join(filter(None, [status.reason, snapshot.note]))
                    statuses[part] = replace(status, reason=reason)
        return [[statuses[part] for part in run.parts] for run in runs]

    def _accounted(
        self, lost: "Sequence[SlurmRun]", statuses: "Mapping[SlurmRun, RunStatus]"
    ) -> "dict[SlurmRun, RunStatus]":
        """Return the accounting's statuses of runs without any other status."""
        job_ids = [job.job_id.partition("_")[0] for part in lost for job in part.jobs]
        try:
            ended = self._login.snapshots.ended(job_ids) if lost else {}
        except LauncherError as error:
            reasons = {part: f"{statuses[part].reason}; {error}" for part in lost}
            return {p: RunStatus(state=RunState.UNKNOWN, reason=r) for p, r in reasons.items()}
        # `77_[3-5]` is keyed by the id of the array.
        rows = {
            row.whole if "[" in row.job_id else row.job_id: row
            for job_rows in ended.values()
            for row in job_rows
        }
        return {part: s for part in lost if (s := part.by_accounting(rows)) is not None}

    def statuses_in(self, snapshot: Snapshot) -> "Sequence[RunStatus | None]":
        """Return the status of each part from Slurm's answer and the run directory.

        None for a run of another user: its jobs must be queried by id.
        """
        rows = self._rows_in(snapshot)
        jobs = self._jobs_of(rows)
        pairs = [(job, rows[job.job_id]) for job in jobs if job.job_id in rows]
        live = [(job, row) for job, row in pairs if not row.state.final]
        if live:
            started = [pair for pair in live if pair[1].state is not RunState.PENDING]
            if not started and all(job.mode == "chain" for job, _ in live):
                run_dir = self.run_dir
                if run_dir is not None and run_directory.is_over(run_dir):
                    return (self._by_run_dir(),)  # the pending jobs of the chain will end at once
            job, row = (started or live)[0]
            place = snapshot.place(row)
            return (status_of(row, self.run_dir, after=job.after, place=place),)
        if not pairs:
            return (self._forgotten(snapshot),)
        job, row = pairs[-1]
        by_slurm = status_of(row, self.run_dir, after=job.after)
        if len(jobs) == 1:
            return (by_slurm,)
        status = self._by_run_dir()
        # If the script was killed before it recorded the reason, Slurm's reason says more.
        cut_short = row.state is RunState.CANCELLED and status.word == "terminated"
        return (by_slurm if cut_short or status.state is RunState.UNKNOWN else status,)

    def by_accounting(self, rows: Mapping[str, JobRow]) -> RunStatus | None:
        """Return the status of a run known only to sacct."""
        pairs = [(job, rows[i]) for job in self.jobs for i in self._ids(job) if i in rows]
        ours = [(job, row) for job, row in pairs if self._is_ours(row.command)]
        if not ours:
            return None
        started = [pair for pair in ours if pair[1].state is not RunState.CANCELLED]
        job, row = (started or ours)[-1]
        if row.state.final:
            return status_of(row, self.run_dir, after=job.after)
        # The accounting lags behind if a job has just ended, or if it was unreachable at that time.
        reason = f"{row.reason}, and the controller does not know the job"
        return RunStatus(state=RunState.UNKNOWN, reason=reason)

    def _ids(self, job: SlurmJob) -> Sequence[str]:
        """Return the possible ids of a job in the accounting."""
        return (job.job_id,)

    @property
    def _home(self) -> str | None:
        """The path of the run directory in Slurm's commands."""
        run_dir = self.record.run_dir
        return self.record.remote_dir or (None if run_dir is None else str(run_dir))

    def _rows_in(self, snapshot: Snapshot) -> dict[str, JobRow]:
        script = f"{self._home}/{self.record.job}.sbatch"
        rows = snapshot.rows(self.job_id.partition("_")[0], script)
        return {row.job_id: row for row in rows if self._is_ours(row.command)}

    def _is_ours(self, command: str) -> bool:
        """Whether a job with this id is this run: other clusters and later years reuse ids."""
        return self._home is None or self._home in command

    def _jobs_of(self, rows: Mapping[str, JobRow]) -> list[SlurmJob]:
        """Return the jobs of this run, including those that users submitted with `continue`."""
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

    def _forgotten(self, snapshot: Snapshot) -> RunStatus | None:
        """Return the status of a run without jobs in Slurm, or None if it is unknown."""
        status = self._by_run_dir()
        if status.state is RunState.SUCCEEDED:
            return status
        try:
            self._login.snapshots.require_cluster(self.record.address[1])
        except LauncherError as error:
            return self.unreachable(str(error))
        return None if snapshot.mine and self._is_of_another_user() else status

    def _is_of_another_user(self) -> bool:
        try:
            return self.run_dir is not None and self.run_dir.stat().st_uid != os.getuid()
        except OSError:
            return False

    def _rows(self) -> dict[str, JobRow]:
        """Return the rows of the jobs by id; raise LauncherError unless their cluster answers."""
        snapshots = self._login.snapshots
        rows = self._rows_in(snapshots.look(patient=False))
        if not rows and self._by_run_dir().state is not RunState.SUCCEEDED:
            snapshots.require_cluster(self.record.address[1])
            if self._is_of_another_user():
                rows = self._rows_in(snapshots.others([job.job_id for job in self.jobs]))
        return rows

    def _by_run_dir(self) -> RunStatus:
        """Return the status of a run that Slurm has forgotten, from its run directory."""
        run_dir = self.run_dir
        status = None if run_dir is None else run_directory.ended_status(run_dir)
        if status is None or run_dir is None or (status.lost and not run_dir.is_dir()):
            reason = "Slurm does not know the job, and its run directory is not here"
            return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)
        after = self.jobs[-1].after if status.lost else ""
        if after and not run_directory.has_attempts(run_dir):
            reason = f"never started: its dependency ({after}) was not satisfied"
            return RunStatus(state=RunState.CANCELLED, reason=reason)
        return status

    def unreachable(self, reason: str) -> RunStatus:
        """Return a final status that no requeue can follow; any other status is unknown."""
        if self.run_dir is not None and self.run_dir.is_dir():
            status = run_directory.ended_status(self.run_dir)
            outcome = run_directory.outcome(self.run_dir) or {}
            fatal = outcome.get("status") == "fatal" and status.state.final
            if status.state is RunState.SUCCEEDED or (fatal and not self._is_resubmitted()):
                return status
        return RunStatus(state=RunState.UNKNOWN, reason=reason)

    def _is_resubmitted(self) -> bool:
        """Whether a job was submitted after the newest attempt had ended."""
        run_dir, home = self.run_dir, self._recorded_in
        if run_dir is None or home is None or len(read_jobs(home)) < 2:
            return False
        newest = log_reader.attempt_folders(run_dir)[-1:]
        ends = [folder / name for folder in newest for name in ("reason", "exit_status")]
        ended = max(map(log_reader.modified_at, [*ends, run_dir / "outcome.json"]))
        return log_reader.modified_at(home / "jobs.jsonl") > ended

    @property
    def _recorded_in(self) -> Path | None:
        """The folder with the list of the run's jobs."""
        return self.run_dir

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        self._login.fetch(time.time())
        if self.run_dir is None:
            raise LauncherError(f"{self.uri} was not submitted from here; its log is unknown")
        return log_reader.read_run(
            self.run_dir,
            view,
            lambda: self._spans(view),
            ended=lambda: self._ended(view, on_status),
            pause_s=0.5,
            ask_every_s=_ASK_EVERY_S,
        )

    def _spans(self, view: LogView) -> list[Span]:
        assert self.run_dir is not None
        return log_reader.spans_of(self.run_dir, view, self._log(self.run_dir))

    def _log(self, run_dir: Path) -> Path:
        return run_dir / "logs" / "job.log"

    def _ended(self, view: LogView, on_status: Callable[[RunStatus], object]) -> bool:
        if self.run_dir and log_reader.is_followed(self.run_dir, view.attempt):
            return True
        status = self.status()
        on_status(status)
        return status.state.final or status.lost

    def cancel(self) -> None:
        """Signal the script to stop within `stop.grace`; a second call kills the job at once."""
        try:
            rows = self._rows()
        except LauncherError as error:
            if not self.unreachable(str(error)).state.final:
                raise LauncherError(f"{self.uri} cannot be cancelled: {error}") from None
            return
        live = [row for row in rows.values() if not row.state.final]
        waiting = [row.job_id for row in live if row.state is RunState.PENDING]
        started = [row.job_id for row in live if row.state is not RunState.PENDING]
        if not live:
            return
        folder = self.run_dir if self.run_dir is not None and self.run_dir.is_dir() else None
        again = folder is not None and run_directory.cancel_requested(folder)
        if folder is not None:
            # Mark first: the next job of a chain may start just now.
            self._login.request_cancel(self.record)
        try:
            if waiting:
                self._scancel(*self._only_waiting(waiting))
            # The script handles USR2; plain scancel would give the ranks only KillWait.
            if started and folder is not None and not again:
                self._ask_to_stop(started)
            elif started:
                self._scancel(*started)
        except LauncherError:
            if folder is not None and not again:
                self._login.withdraw_cancel(self.record)
            raise
        self._login.snapshots.forget()

    def _only_waiting(self, job_ids: list[str]) -> list[str]:
        """Return scancel's arguments for pending jobs."""
        return job_ids

    def _ask_to_stop(self, job_ids: list[str]) -> None:
        self._scancel("--batch", "--signal=USR2", *job_ids)

    def _scancel(self, *arguments: str, within_s: int | None = None) -> None:
        limit = [] if within_s is None else ["timeout", str(within_s)]
        done = self._login.command([*limit, "scancel", *arguments])
        if within_s is not None and done.returncode == 124:
            return
        if done.returncode != 0 and not re.search("Invalid job id|already complet", done.stderr):
            raise LauncherError(f"scancel refused {self.uri}: {error_line(done.stderr)}")

    def conditions(self, wish: str) -> list[str]:
        """Return the sbatch dependencies on this run's end: ok, any or fail.

        Empty for an ended run: Slurm would treat a forgotten job as successful.

        Raises:
            LauncherError: the run has ended in another way, or its end is unknown.
        """
        rows = self._rows()
        jobs = [job for job in self._jobs_of(rows) if job.job_id in rows]
        if live := [job.job_id for job in jobs if not rows[job.job_id].state.final]:
            return [f"{CONDITIONS[wish]}:{live[-1]}"]  # the last of a chain ends as the run does
        return self._met(wish, self.status())

    def _met(self, wish: str, status: RunStatus) -> list[str]:
        if not status.state.final and wish != "any":
            raise LauncherError(f"after {self.uri}: how it ended is unknown: {status.reason}")
        if wish != "any" and (wish == "ok") != (status.state is RunState.SUCCEEDED):
            expected = "succeed" if wish == "ok" else "fail"
            ended = status.state.upper() + (f" ({status.reason})" if status.reason else "")
            raise LauncherError(
                f"after {self.uri}: it had to {expected}, but it is {ended}; "
                "this job would never start"
            )
        return []

    def _exchange(self) -> Exchange:
        return self._login.exchange(self.record) or super()._exchange()

    def unfinished(self) -> list[int] | None:
        """Return the points to run again, or None for a run without points.

        Raises:
            LauncherError: the run has succeeded, or has not ended.
        """
        live = any(not row.state.final for row in self._rows().values())
        require_unfinished(self, self.status(), live=live)
        return None
