"""A run on Slurm, of one job or several, told by squeue and by what it has left behind."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.launchers import registry, rundir
from toolkit.launchers.base import Run, RunState, RunStatus, follow_files
from toolkit.launchers.slurm_jobs import SlurmJob, read_jobs
from toolkit.launchers.slurm_queue import Command, Row, ask, first_line, judge
from toolkit.launchers.torchrun_log import without_stop_traces

__all__ = ["CONDITIONS", "SlurmRun"]

_ASK_EVERY_S = 3.0
"""How often a follower asks whether the job has ended; clusters limit requests."""

CONDITIONS = {"ok": "afterok", "any": "afterany", "fail": "afternotok"}
"""What a job may expect of another run, and sbatch's word for it."""


class SlurmRun(Run):
    """A run of a Slurm cluster."""

    def __init__(self, record: registry.RunRecord, command: Command) -> None:
        super().__init__(record)
        self._command = command
        self.job_id = record.uri.rpartition("/")[2]

    @property
    def jobs(self) -> list[SlurmJob]:
        """The jobs of this run, the oldest first."""
        return read_jobs(self.run_dir) or [SlurmJob(job_id=self.job_id)]

    def status(self) -> RunStatus:
        """Ask squeue; what Slurm has forgotten is told by what it left behind."""
        jobs = self.jobs
        try:
            rows = self._rows(jobs)
        except LauncherError as error:
            return self._unreachable(str(error))
        pairs = [(job, rows[job.job_id]) for job in jobs if job.job_id in rows]
        live = [(job, row) for job, row in pairs if not row.state.final]
        if live:
            begun = [pair for pair in live if pair[1].state is not RunState.PENDING]
            if not begun and all(job.mode == "chain" for job, _ in live) and self._is_over():
                return self._left_behind()  # what is left of the chain has nothing to do
            job, row = (begun or live)[0]
            return judge(row, self.run_dir, after=job.after)
        if not pairs or len(jobs) > 1:
            found = self._left_behind()
            if not pairs or found.state is not RunState.UNKNOWN:
                return found
        job, row = pairs[-1]
        return judge(row, self.run_dir, after=job.after)

    def _is_over(self) -> bool:
        return self.run_dir is not None and rundir.is_over(self.run_dir)

    def _rows(self, jobs: Sequence[SlurmJob]) -> dict[str, Row]:
        """Return what Slurm says of the jobs, by id.

        Raises:
            LauncherError: nobody answers.
        """
        rows = ask(self._command, [job.job_id for job in jobs])
        if not rows and len(jobs) == 1 and not self.points:
            # squeue does not show everybody the jobs of all partitions.
            job_id = jobs[0].job_id
            shown = self._command(["scontrol", "-o", "show", "job", job_id]).stdout
            if match := re.search(r"\bJobState=(\S+)", shown):
                found = re.search(r"\bReason=(?!None\b)(\S+)", shown)
                reason = found[1] if found else ""
                rows = [Row(job_id=job_id, word=match[1], reason=reason, command=shown)]
        return {row.job_id: row for row in rows if self._is_ours(row.command)}

    def _is_ours(self, command: str) -> bool:
        """Whether a job of this id is this run: other clusters, and later years, use ids again."""
        return self.run_dir is None or str(self.run_dir) in command

    def _left_behind(self) -> RunStatus:
        if self.run_dir is None or not self.run_dir.is_dir():
            reason = "Slurm does not know the job, and its run directory is not here"
            return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)
        found = rundir.ended_status(self.run_dir)
        after = self.jobs[-1].after
        if found.lost and after and not rundir.has_attempts(self.run_dir):
            reason = f"never started: its dependency ({after}) was not satisfied"
            return RunStatus(state=RunState.CANCELLED, reason=reason)
        return found

    def _unreachable(self, reason: str) -> RunStatus:
        """Believe an end that nothing can follow; otherwise the job may be queued again."""
        if self.run_dir is not None:
            found = rundir.ended_status(self.run_dir)
            said = rundir.outcome(self.run_dir) or {}
            if found.state is RunState.SUCCEEDED or said.get("status") == "fatal":
                return found
        return RunStatus(state=RunState.UNKNOWN, reason=reason)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield what the jobs have printed, all their attempts."""
        log = self._log()
        lines = follow_files(
            lambda: [log],
            ended=lambda: not follow or self._ended(),
            pause_s=0.5,
            ask_every_s=_ASK_EVERY_S,
        )
        return rundir.redacted(without_stop_traces(lines), self._inputs())

    def _log(self) -> Path:
        if self.run_dir is None:
            raise LauncherError(f"{self.uri} was not submitted from here; its log is unknown")
        return self.run_dir / "logs" / "job.log"

    def _inputs(self) -> Path | None:
        """Return the folder with the job file."""
        return self.run_dir

    def _ended(self) -> bool:
        status = self.status()
        return status.state.final or status.lost

    def cancel(self) -> None:
        """Ask the batch script to stop the job within `stop.grace`; asked twice, end it at once."""
        try:
            rows = self._rows(self.jobs)
        except LauncherError as error:
            if not self._unreachable(str(error)).state.final:
                raise LauncherError(f"{self.uri} cannot be cancelled: {error}") from None
            return
        waiting, begun = _living(rows)
        if not waiting and not begun:
            return
        folder = self.run_dir if self.run_dir is not None and self.run_dir.is_dir() else None
        again = folder is not None and rundir.cancel_requested(folder)
        if folder is not None:
            rundir.request_cancel(folder)  # first: the next job of a chain may start just now
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
                rundir.withdraw_cancel(folder)
            raise

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
            LauncherError: it has ended otherwise, or nobody knows how.
        """
        rows = self._rows(self.jobs)
        if living := [job.job_id for job in self.jobs if _lives(rows.get(job.job_id))]:
            return [f"{CONDITIONS[wish]}:{living[-1]}"]  # the last of a chain ends as the run does
        return self._met(wish, self.status())

    def _met(self, wish: str, found: RunStatus) -> list[str]:
        if not found.state.final and wish != "any":
            raise LauncherError(f"after {self.uri}: nobody knows how it ended: {found.reason}")
        if wish != "any" and (wish == "ok") != (found.state is RunState.SUCCEEDED):
            wanted = "succeed" if wish == "ok" else "fail"
            reason = f" ({found.reason})" if found.reason else ""
            raise LauncherError(
                f"after {self.uri}: it was to {wanted}, and it is {found.state.upper()}{reason}; "
                "this job would wait for ever"
            )
        return []

    def unfinished(self) -> list[int] | None:
        """Return which points to run again, None for a run that has none.

        Raises:
            LauncherError: it has succeeded, or has not ended.
        """
        rows = self._rows(self.jobs)
        found = self.status()
        if any(_lives(row) for row in rows.values()) or not (found.state.final or found.lost):
            raise LauncherError(
                f"{self.uri} is {found.state.upper()} and has not ended; `toolkit wait` for it, or "
                "`toolkit cancel` it first"
            )
        if found.state is RunState.SUCCEEDED:
            raise LauncherError(f"{self.uri} has succeeded; there is nothing to do again")
        return None


def _lives(row: Row | None) -> bool:
    return row is not None and not row.state.final


def _living(rows: dict[str, Row]) -> tuple[list[str], list[str]]:
    """Return the ids of the jobs that wait, and of those that have begun."""
    living = [row for row in rows.values() if _lives(row)]
    waiting = [row.job_id for row in living if row.state is RunState.PENDING]
    return waiting, [row.job_id for row in living if row.state is not RunState.PENDING]
