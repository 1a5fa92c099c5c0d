"""Submits runs to a Slurm cluster, with or without accounting, and opens earlier runs."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from toolkit.errors import LauncherError, Problem
from toolkit.job.spec import Dependency, load
from toolkit.planning import plan
from toolkit.planning.slurm import SlurmPlan, array_of
from toolkit.profile import SlurmProfile
from toolkit.rendering import render
from toolkit.runs.records import provenance, registry, run_directory, submission_journal
from toolkit.runs.records.points import has_points, write_points
from toolkit.runs.records.run_secrets import require_secrets
from toolkit.runs.run import Launcher, Run, new_run_name
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.commands import Command, refused, run_command
from toolkit.slurm.login.host import LoginNode, RunFolder
from toolkit.slurm.login.ssh_host import SshLoginNode
from toolkit.slurm.run import SlurmRun
from toolkit.slurm.site_check import site_findings
from toolkit.slurm.snapshot import Snapshot, snapshot_file
from toolkit.slurm.submission import SlurmJob, Submission, as_lines, find, send, write_jobs
from toolkit.slurm.sweep import SlurmPoint, SlurmSweep

_SETTLED_S = 120.0
"""After this time no submission is in flight: a job that Slurm has not received never arrives."""


class SlurmLauncher(Launcher[SlurmPlan]):
    """Submits batch scripts."""

    def __init__(self, profile: SlurmProfile, *, command: Command | None = None) -> None:
        """Prepare to submit.

        Args:
            profile: The site.
            command: Runs Slurm's commands; by default on this machine, or on the host of the
            profile's `via`.
        """
        self._profile = profile
        self._journal = registry.intents_folder()
        self._login: LoginNode
        if profile.via is not None and command is None:
            self._login = SshLoginNode(profile)
        else:
            file = snapshot_file() if command in (None, run_command) else None
            self._login = LoginNode(profile, command or run_command, file=file)

    def submit(
        self,
        plan: SlurmPlan,
        *,
        after: Sequence[Dependency] = (),
        chain: int = 1,
        files: Mapping[str, bytes] = {},
    ) -> SlurmRun:
        """Queue a new job; the script is the one that `render` shows, byte for byte.

        Args:
            plan: What to submit.
            after: Runs that the job waits for, besides those in the job file.
            chain: Number of successive jobs; each continues where the previous one ended.
            files: Files to write to the run directory, by path.

        Raises:
            LauncherError: the site refused, or cannot be reached.
        """
        _refuse_chain(chain, sweep=bool(plan.points))
        plan = plan.in_turns() if chain > 1 else plan
        cluster = self._cluster()
        secrets = self._secrets(plan)
        registry.check()
        waits = self._conditions([*plan.job.after, *after], cluster)
        name = new_run_name(plan.job.name)
        folder = self._login.make(name)
        file_name = f"{plan.job.name}.sbatch"
        try:
            run_directory.write_inputs(
                folder.here, plan.job, script=render(plan), file_name=file_name, files=files
            )
            if plan.points:
                write_points(folder.here, plan.points)
            self._login.bring(folder)
        except LauncherError:
            self._login.discard(folder, used=False)
            raise
        modes = ["", *["chain"] * (chain - 1)]
        submission = Submission(
            folder=folder,
            script=f"{folder.there}/{file_name}",
            log=_log_of(folder, sweep=bool(plan.points)),
            jobs=tuple(
                SlurmJob(job_id="", mode=m, after=waits, folder=folder.start) for m in modes
            ),
        )
        record = registry.RunRecord(
            uri=f"slurm://{cluster}/{name}",
            name=name,
            job=plan.job.name,
            profile=plan.recorded(self._profile),
            created=time.time(),
            provenance=provenance.collect(),
            run_dir=folder.here,
            remote_dir=folder.there if self._login.remote else None,
        )
        # No job has run in the new folder, unless the first job of a chain started quickly.
        undo = partial(self._login.discard, folder, used=chain > 1)
        return self._send(record, submission, secrets, undo=undo)

    def _send(
        self,
        record: registry.RunRecord,
        submission: Submission,
        secrets: Mapping[str, str],
        *,
        prepare: Callable[[], object] = lambda: None,
        undo: Callable[[], object],
    ) -> SlurmRun:
        """Submit; if Slurm refuses, `undo` the changes of `prepare` or the caller."""
        data = {"record": record.as_json(), "order": submission.as_json()}
        # Journaled first: a later process finds the submission if this one is killed.
        with submission_journal.begin(self._journal, record.name, data) as intent:
            prepare()
            try:
                jobs = send(self._login, submission, secrets=secrets)
            except submission_journal.UnknownOutcome:
                raise
            except LauncherError:
                undo()
                intent.done()
                raise
            return self._submitted(record, submission, jobs, intent)

    def _submitted(
        self,
        record: registry.RunRecord,
        submission: Submission,
        jobs: Sequence[SlurmJob],
        intent: submission_journal.Intent | None,
    ) -> SlurmRun:
        """Record the submitted run in the user's list and in the run directory.

        Without an intent, the journal keeps the submission: some of its jobs are missing.
        """
        if record.begun:
            uri = f"{record.uri.removesuffix(record.name)}{jobs[0].job_id}"
            record = registry.add(replace(record, uri=uri))
        new = None if submission.known else record
        self._login.keep(submission.folder, jobs=as_lines(jobs), record=new)
        write_jobs(submission.folder.here, jobs)
        if intent is not None:
            intent.done()
        self._login.snapshots.forget()
        return self._opened(record)

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Queue an ended run again; for a sweep, the points that did not succeed.

        The submitted script is reused, and continues from the newest checkpoints.

        Raises:
            LauncherError: the run has succeeded or not ended, or the site refused.
        """
        assert isinstance(run, SlurmRun)
        if isinstance(run, InterruptedRun):
            return self._finish(run, chain)
        if self._complete_chain(run):
            return run
        whole = run.sweep if isinstance(run, SlurmPoint) else run
        sweep = whole if isinstance(whole, SlurmSweep) else None
        _refuse_chain(chain, sweep=sweep is not None)
        run_dir = whole.run_dir
        script = (run_dir or Path()) / f"{run.record.job}.sbatch"
        if run_dir is None or not script.is_file():
            raise LauncherError(f"{run.uri}: {script} is not here, so it cannot be submitted again")
        for path in (run_dir, script, run_dir / "job.yaml"):
            run_directory.require_own(path)
        self._cluster()
        points = run.unfinished()
        made = plan(load(run_dir / "job.yaml"), self._profile)
        secrets = self._secrets(made)
        submission = self._continuation(whole, made, points, chain)
        marked = run_directory.cancel_requested(run_dir)

        def withdraw_cancel() -> None:
            if sweep is not None and points is not None:
                sweep.withdraw_cancel(points)
            self._login.withdraw_cancel(whole.record)

        def restore_cancel() -> None:
            if marked:
                self._login.request_cancel(whole.record)

        self._send(whole.record, submission, secrets, prepare=withdraw_cancel, undo=restore_cancel)
        return run

    def _continuation(
        self, run: SlurmRun, plan: SlurmPlan, points: Sequence[int] | None, chain: int
    ) -> Submission:
        """Return the submission that continues a run, or some points of a sweep."""
        jobs = run.jobs
        if chain > 1 and not plan.takes_turns and all(job.mode != "chain" for job in jobs):
            raise LauncherError(
                f"{run.uri}: its script is not for a chain; resubmit it without --chain, or submit "
                "the job anew with --chain, or with retries.requeue above 0"
            )
        assert run.run_dir is not None
        there = run.record.remote_dir or str(run.run_dir)
        start = jobs[-1].folder or self._login.cwd
        folder = RunFolder(here=run.run_dir, there=there, start=start)
        tasks = None if points is None else tuple(points)
        again = SlurmJob(job_id="", mode="continue", points=tasks, folder=start)
        links = [SlurmJob(job_id="", mode="chain", folder=start)] * (chain - 1)
        sweep = plan.job.sweep if isinstance(run, SlurmSweep) else None
        return Submission(
            folder=folder,
            script=f"{there}/{run.record.job}.sbatch",
            log=_log_of(folder, sweep=isinstance(run, SlurmSweep)),
            jobs=(again, *links),
            known=tuple(job.job_id for job in jobs),
            array=array_of(points, sweep) if points is not None and sweep is not None else None,
        )

    def _finish(self, run: "InterruptedRun", chain: int) -> SlurmRun:
        """Finish an interrupted submission, unless Slurm has received it."""
        _refuse_chain(chain, sweep=chain > 1)
        with submission_journal.claim(self._journal, run.name) as intent:
            submission = Submission.of_json(intent.data.get("order"), name=run.name)
            job_file = submission.folder.here / "job.yaml"
            run_directory.require_own(job_file)
            secrets = self._secrets(plan(load(job_file), self._profile))
            jobs = send(self._login, submission, secrets=secrets, interrupted=True)
            return self._submitted(run.record, submission, jobs, intent)

    def _complete_chain(self, run: SlurmRun) -> bool:
        """Submit the missing jobs of an active chain; return whether there were any."""
        intent = submission_journal.take(self._journal, run.name)
        if intent is None:
            return False
        with intent:
            submission = Submission.of_json(intent.data.get("order"), name=run.name)
            jobs = find(self._login, submission)
            if not 0 < len(jobs) < len(submission.jobs):
                return False
            if run.status().state.final:
                intent.done()
                return False
            job_file = submission.folder.here / "job.yaml"
            run_directory.require_own(job_file)
            secrets = self._secrets(plan(load(job_file), self._profile))
            jobs = send(self._login, submission, secrets=secrets, interrupted=True, before=jobs)
            self._submitted(run.record, submission, jobs, intent)
            return True

    def findings(self, plan: SlurmPlan) -> list[Problem]:
        """Compare the plan with the configuration of the site."""
        self._cluster()
        return site_findings(plan, self._login.command)

    def open(self, record: registry.RunRecord) -> SlurmRun:
        """Return the handle of an earlier job, or sweep."""
        intent = submission_journal.take(self._journal, record.name)
        if intent is None:
            return self._opened(record)
        with intent:
            return self._recovered(record, intent)

    def _opened(self, record: registry.RunRecord) -> SlurmRun:
        kind = SlurmSweep if has_points(record.run_dir) else SlurmRun
        run = kind(record, self._login)
        _ = run.points  # raise now if the points of a sweep cannot be read
        self._login.watch(run)
        return run

    def _recovered(self, record: registry.RunRecord, intent: submission_journal.Intent) -> SlurmRun:
        """Return a run with an interrupted submission, and its jobs in Slurm."""
        try:
            submission = Submission.of_json(intent.data.get("order"), name=record.name)
            self._login.snapshots.require_cluster(record.address[1])
            if jobs := find(self._login, submission):
                is_whole = len(jobs) == len(submission.jobs)
                return self._submitted(record, submission, jobs, intent if is_whole else None)
            why = ""
        except LauncherError as error:
            why = str(error)
        if record.begun:
            return InterruptedRun(record, self._login, why=why)
        if not why and time.time() > intent.begun + _SETTLED_S:
            intent.done()  # the run was never resubmitted
        return self._opened(record)

    def _conditions(self, after: Sequence[Dependency], cluster: str) -> str:
        """Return the value of sbatch's `--dependency`; empty if every dependency is already met."""
        conditions: list[str] = []
        for dependency in after:
            record, point = registry.find_point(dependency.run)
            if not record.believed or record.problem:
                raise LauncherError(f"after {dependency.run}: it is not in your list of runs")
            if record.address[:2] != ("slurm", cluster):
                raise LauncherError(
                    f"after {record.uri}: it is not on cluster {cluster!r}. Jobs can wait only "
                    f"for jobs of their own cluster: `toolkit wait {record.name}`, then submit"
                )
            run: Run = self.open(record)
            run = run if point is None else run.point(point)
            assert isinstance(run, SlurmRun)
            conditions += run.conditions(dependency.wish)
        return ",".join(dict.fromkeys(conditions))

    def _cluster(self) -> str:
        """Return the cluster's name; raise LauncherError if no cluster answers."""
        if not (name := self._login.snapshots.cluster()):
            raise refused("scontrol", self._login.command(["scontrol", "show", "config"]))
        return name

    def _secrets(self, plan: SlurmPlan) -> dict[str, str]:
        """Return the secrets that the jobs need; raise LauncherError if one is not set here."""
        require_secrets(plan)
        return {name: os.environ[name] for name in plan.exported_secrets}


class InterruptedRun(SlurmRun):
    """A run with a submission that was interrupted before the job id was recorded."""

    def __init__(self, record: registry.RunRecord, login: LoginNode, *, why: str) -> None:
        super().__init__(record, login)
        self._why = why

    @property
    def jobs(self) -> list[SlurmJob]:
        """Empty: no job of the run is known."""
        return []

    def statuses_in(self, snapshot: Snapshot) -> Sequence[RunStatus]:
        """Return the status from the age of the submission alone."""
        return (self.unreachable(self._why),)

    def unreachable(self, reason: str) -> RunStatus:
        """Return the status without an answer of Slurm."""
        if self.run_dir is not None and run_directory.has_attempts(self.run_dir):
            return run_directory.ended_status(self.run_dir)  # Slurm has forgotten the job
        if reason or time.time() < self.record.created + _SETTLED_S:
            cut = "its submission was cut short, and Slurm has no job of it yet"
            return RunStatus(state=RunState.UNKNOWN, reason=reason or cut)
        return RunStatus(
            state=RunState.FAILED,
            reason="its submission was cut short, and Slurm never received the job; "
            f"`toolkit resubmit {self.name}` submits it",
        )

    def cancel(self) -> None:
        """Raise LauncherError: no job of the run is known."""
        raise LauncherError(f"{self.uri} cannot be cancelled: {self.unreachable(self._why).reason}")


def _refuse_chain(chain: int, *, sweep: bool) -> None:
    if chain > 1 and sweep:
        raise LauncherError(
            "--chain is for a single run, and this is a sweep; let its points queue themselves "
            "again (retries.requeue), or `toolkit resubmit` those that are out of time"
        )


def _log_of(folder: RunFolder, *, sweep: bool) -> str:
    """Return the log path for sbatch; for a sweep, one file per point."""
    logs = f"{folder.there}/logs".replace("%", "%%")  # sbatch replaces %j and others
    return f"{logs}/%a.log" if sweep else f"{logs}/job.log"
