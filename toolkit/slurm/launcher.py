"""Submits to a Slurm cluster, with or without accounting."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.errors import LauncherError, Problem
from toolkit.job.dependencies import Dependency
from toolkit.job.spec import load
from toolkit.planning import plan
from toolkit.planning.slurm import SlurmPlan, array_of
from toolkit.profile import SlurmProfile
from toolkit.rendering import render
from toolkit.runs import registry, run_directory, submission_journal
from toolkit.runs.run import Launcher, Run, new_run_name
from toolkit.runs.run_secrets import require_secrets
from toolkit.slurm.jobs import SlurmJob, as_lines, has_points, write_jobs, write_points
from toolkit.slurm.login.host import Folder, Here, Login
from toolkit.slurm.login.ssh_host import There
from toolkit.slurm.reopen import SETTLED_S, BegunRun
from toolkit.slurm.run import SlurmRun
from toolkit.slurm.site_check import site_findings
from toolkit.slurm.snapshot import Queue, Snapshot, place_of_answers
from toolkit.slurm.squeue import Command, cluster_name, refused, run_command
from toolkit.slurm.submission import Order, Unclear, exported, find, new_token, send
from toolkit.slurm.sweep import SlurmPoint, SlurmSweep

__all__ = ["Command", "SlurmLauncher", "SlurmRun"]


class SlurmLauncher(Launcher[SlurmPlan]):
    """Submits batch scripts."""

    def __init__(
        self,
        profile: SlurmProfile,
        *,
        command: Command | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepare to submit.

        Args:
            profile: The site.
            command: How Slurm's commands are run; without it, on this machine or on the host of the
            profile's `via`.
            environ: Where the user's list of runs is looked for.
        """
        self._profile = profile
        self._environ = environ
        self._intents = registry.intents_folder(environ)
        self._login: Login
        shared = None
        if profile.via is not None and command is None:
            self._login = There.of(profile, environ)
            shared = place_of_answers(environ, host=profile.host)
        else:
            self._login = Here(profile, command or run_command)
            shared = place_of_answers(environ) if command in (None, run_command) else None
        self._command = self._login.command
        self._queue = _Queue(self._login, file=shared)

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
            after: Runs that it waits for, besides those of the job file.
            chain: How many jobs take turns at it, each going on where the one before has ended.
            files: What the job finds in its run directory, by path.

        Raises:
            LauncherError: the site refused, or cannot be reached.
        """
        _refuse_chain(chain, sweep=bool(plan.points))
        plan = plan.in_turns() if chain > 1 else plan
        cluster = self._cluster()
        require_secrets(plan, self._environ)
        registry.check(environ=self._environ)
        waits = self._conditions([*plan.job.after, *after], cluster)
        name = new_run_name(plan.job.name)
        folder = self._login.make(name)
        try:
            script = run_directory.write_inputs(
                folder.here,
                plan.job,
                script=render(plan),
                file_name=f"{plan.job.name}.sbatch",
                files=files,
            )
            if plan.points:
                write_points(folder.here, plan.points)
            self._login.bring(folder)
        except LauncherError:
            self._login.discard(folder, begun=False)
            raise
        modes = ["", *["chain"] * (chain - 1)]
        order = Order(
            folder=folder,
            script=f"{folder.there}/{script.name}",
            log=_log_of(folder, sweep=bool(plan.points)),
            jobs=tuple(
                SlurmJob(job_id="", mode=m, after=waits, folder=folder.start) for m in modes
            ),
            token=new_token(),
        )
        record = registry.RunRecord(
            uri=f"slurm://{cluster}/{name}",
            name=name,
            job=plan.job.name,
            profile=self._profile.model_dump(mode="json", by_alias=True),
            created=time.time(),
            run_dir=folder.here,
            remote_dir=folder.there if self._login.remote else None,
        )
        with self._begin(record, order) as intent:
            try:
                sent = send(self._login, order, secrets=exported(plan, self._environ))
            except Unclear:
                raise
            except LauncherError:
                # We made it. Nothing has run in it, unless the first job of a chain was quick.
                self._login.discard(folder, begun=chain > 1)
                intent.done()
                raise
            return self._submitted(record, order, sent, intent)

    def _begin(self, record: registry.RunRecord, order: Order) -> submission_journal.Intent:
        """Write down the submission, so that a later process finds it if this one is killed."""
        data = {"record": record.as_json(), "order": order.as_json()}
        return submission_journal.begin(self._intents, record.name, data)

    def _submitted(
        self,
        record: registry.RunRecord,
        order: Order,
        sent: Sequence[SlurmJob],
        intent: submission_journal.Intent,
    ) -> SlurmRun:
        """Record the submitted run in the user's list and in the run directory."""
        if record.begun:
            uri = f"{record.uri.removesuffix(record.name)}{sent[0].job_id}"
            record = registry.add(replace(record, uri=uri), environ=self._environ)
        new = self._login.remote and not order.known
        launch = json.dumps(self._login.as_there(record).as_json()) if new else ""
        self._login.keep(order.folder, jobs=as_lines(sent), launch=launch)
        write_jobs(order.folder.here, sent)
        intent.done()
        self._queue.forget()
        return self._opened(record)

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Queue a run again that has ended; of a sweep, the points that did not succeed.

        The script is the one that was submitted, and it goes on from the newest checkpoints.

        Raises:
            LauncherError: it has succeeded or not ended, or the site refused.
        """
        assert isinstance(run, SlurmRun)
        if isinstance(run, BegunRun):
            return self._finish(run, chain)
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
        require_secrets(made, self._environ)
        jobs = whole.jobs
        if chain > 1 and not made.takes_turns and all(job.mode != "chain" for job in jobs):
            raise LauncherError(
                f"{run.uri}: its script is not for a chain; resubmit it without --chain, or submit "
                "the job anew with --chain, or with retries.requeue above 0"
            )
        again = SlurmJob(
            job_id="",
            mode="continue",
            points=None if points is None else tuple(points),
            folder=jobs[-1].folder or self._login.cwd,
        )
        links = [SlurmJob(job_id="", mode="chain", folder=again.folder)] * (chain - 1)
        array = None
        if sweep is not None and points is not None and made.job.sweep is not None:
            array = array_of(points, made.job.sweep)
        there = whole.record.remote_dir or str(run_dir)
        folder = Folder(here=run_dir, there=there, start=again.folder)
        order = Order(
            folder=folder,
            script=f"{there}/{script.name}",
            log=_log_of(folder, sweep=sweep is not None),
            jobs=(again, *links),
            token=new_token(),
            known=tuple(job.job_id for job in jobs),
            array=array,
        )
        marked = run_directory.cancel_requested(run_dir)
        with self._begin(whole.record, order) as intent:
            if sweep is not None and points is not None:
                sweep.withdraw_cancel(points)
            self._login.withdraw_cancel(whole.record)
            try:
                sent = send(self._login, order, secrets=exported(made, self._environ))
            except Unclear:
                raise
            except LauncherError:
                if marked:
                    self._login.request_cancel(whole.record)
                intent.done()
                raise
            self._submitted(whole.record, order, sent, intent)
        return run

    def _finish(self, run: BegunRun, chain: int) -> SlurmRun:
        """Finish an interrupted submission, unless Slurm has received it."""
        _refuse_chain(chain, sweep=chain > 1)
        intent = submission_journal.take(self._intents, run.name)
        if intent is None:
            raise LauncherError(f"{run.name} is being submitted by another process just now")
        with intent:
            order = _order_of(intent, run.record)
            run_directory.require_own(order.folder.here / "job.yaml")
            made = plan(load(order.folder.here / "job.yaml"), self._profile)
            require_secrets(made, self._environ)
            secrets = exported(made, self._environ)
            sent = send(self._login, order, secrets=secrets, begun=True)
            return self._submitted(run.record, order, sent, intent)

    def findings(self, plan: SlurmPlan) -> list[Problem]:
        """Compare the plan with the configuration of the site."""
        self._cluster()
        return site_findings(plan, self._command)

    def open(self, record: registry.RunRecord) -> SlurmRun:
        """Return the handle of an earlier job, or sweep."""
        intent = submission_journal.take(self._intents, record.name)
        if intent is None:
            return self._opened(record)
        with intent:
            return self._recovered(record, intent)

    def _opened(self, record: registry.RunRecord) -> SlurmRun:
        kind = SlurmSweep if has_points(record.run_dir) else SlurmRun
        run = kind(record, self._command, self._queue, self._login)
        _ = run.points  # a sweep of which they cannot be read says so now, by itself
        self._login.watch(run)
        return run

    def _recovered(self, record: registry.RunRecord, intent: submission_journal.Intent) -> SlurmRun:
        """Return a run whose submission was cut short, with the jobs that Slurm has of it."""
        try:
            order = _order_of(intent, record)
            self._queue.require(record.uri.split("/")[2])
            if sent := find(self._login, order):
                return self._submitted(record, order, sent, intent)
            why = ""
        except LauncherError as error:
            why = str(error)
        if record.begun:
            return BegunRun(record, self._command, self._queue, self._login, why=why)
        if not why and time.time() > intent.begun + SETTLED_S:
            intent.done()  # it has never been submitted again
        return self._opened(record)

    def _conditions(self, after: Sequence[Dependency], cluster: str) -> str:
        """Return the value of sbatch's `--dependency`; empty where all of it has ended well."""
        conditions: list[str] = []
        for dependency in after:
            record, point = registry.find_point(dependency.run, environ=self._environ)
            if not record.believed or record.problem:
                raise LauncherError(f"after {dependency.run}: it is not in your list of runs")
            if record.address[:2] != ("slurm", cluster):
                raise LauncherError(
                    f"after {record.uri}: it is not of cluster {cluster!r}, whose jobs can wait "
                    f"only for each other; `toolkit wait {record.name}` and submit then"
                )
            run: Run = self.open(record)
            run = run if point is None else run.point(point)
            assert isinstance(run, SlurmRun)
            conditions += run.conditions(dependency.wish)
        return ",".join(dict.fromkeys(conditions))

    def _cluster(self) -> str:
        """Return the cluster's name; asking also shows whether there is a cluster."""
        answer = self._command(["scontrol", "show", "config"])
        name = cluster_name(answer.stdout)
        if answer.returncode != 0 or not name:
            raise refused("scontrol", answer)
        return name


class _Queue(Queue):
    """Answers together with what the open runs of the same login node have written until then."""

    def __init__(self, login: Login, *, file: Path | None) -> None:
        super().__init__(login.command, file=file)
        self._login = login

    def look(
        self, *, max_age_s: float = 0.0, changed: float = 0.0, patient: bool = True
    ) -> Snapshot:
        """Return the user's jobs; the files that they have left are not older than that."""
        seen = super().look(max_age_s=max_age_s, changed=changed, patient=patient)
        self._login.fetch(seen.asked)
        return seen


def _refuse_chain(chain: int, *, sweep: bool) -> None:
    if chain > 1 and sweep:
        raise LauncherError(
            "--chain is for a single run, and this is a sweep; let its points queue themselves "
            "again (retries.requeue), or `toolkit resubmit` those that are out of time"
        )


def _log_of(folder: Folder, *, sweep: bool) -> str:
    """Return where the jobs print, as sbatch wants it; of a sweep, each point in a file."""
    logs = f"{folder.there}/logs".replace("%", "%%")  # sbatch replaces %j and others
    return f"{logs}/%a.log" if sweep else f"{logs}/job.log"


def _order_of(intent: submission_journal.Intent, record: registry.RunRecord) -> Order:
    """Return the record from its JSON.

    Raises:
        LauncherError: another version has written it.
    """
    try:
        return Order.of_json(intent.data["order"])
    except (KeyError, TypeError, ValueError):
        raise LauncherError(
            f"{record.name}: its submission was cut short, and what was written "
            "down of it cannot be read by this version"
        ) from None
