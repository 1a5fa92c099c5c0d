"""Submits to a Slurm cluster, with or without accounting."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.dependencies import Dependency
from toolkit.errors import LauncherError, Problem
from toolkit.launchers import registry, rundir
from toolkit.launchers.base import Launcher, Run, new_run_name, require_secrets
from toolkit.launchers.slurm_jobs import SlurmJob, send, write_jobs, write_points
from toolkit.launchers.slurm_queue import Command, refused, run_command
from toolkit.launchers.slurm_run import SlurmRun
from toolkit.launchers.slurm_site import site_findings
from toolkit.launchers.slurm_sweep import SlurmPoint, SlurmSweep
from toolkit.planning import SlurmPlan, array_of, plan
from toolkit.profile import SlurmProfile
from toolkit.rendering import render
from toolkit.spec import load

__all__ = ["Command", "SlurmLauncher", "SlurmRun"]


class SlurmLauncher(Launcher[SlurmPlan]):
    """Submits batch scripts."""

    def __init__(
        self,
        profile: SlurmProfile,
        *,
        command: Command = run_command,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepare to submit.

        Args:
            profile: The site.
            command: How Slurm's commands are run.
            environ: Where the user's list of runs is looked for.
        """
        self._profile = profile
        self._command = command
        self._environ = environ

    def submit(
        self, plan: SlurmPlan, *, after: Sequence[Dependency] = (), chain: int = 1
    ) -> SlurmRun:
        """Queue a new job; the script is the one that `render` shows, byte for byte.

        Args:
            plan: What to submit.
            after: Runs that it waits for, besides those of the job file.
            chain: How many jobs take turns at it, each going on where the one before has ended.

        Raises:
            LauncherError: the site refused, or cannot be reached.
        """
        _refuse_chain(chain, sweep=bool(plan.points))
        cluster = self._cluster()
        require_secrets(plan, self._environ)
        self._require_venv()
        registry.check(environ=self._environ)
        waits = self._conditions([*plan.job.after, *after], cluster)
        name = new_run_name(plan.job.name)
        run_dir = rundir.make(Path(self._profile.runs_dir), name)
        script = rundir.write_inputs(
            run_dir, plan.job, script=render(plan), file_name=f"{plan.job.name}.sbatch"
        )
        modes = ["", *["chain"] * (chain - 1)]
        jobs = [SlurmJob(job_id="", mode=m, after=waits, folder=str(Path.cwd())) for m in modes]
        try:
            if plan.points:
                write_points(run_dir, plan.points)
            log = _log_of(run_dir, sweep=bool(plan.points))
            sent = send(self._command, script, run_dir, log=log, jobs=jobs)
        except LauncherError:
            # We made it. Nothing has run in it, unless the first job of a chain was quick.
            shutil.rmtree(run_dir, ignore_errors=chain > 1)
            raise
        record = registry.remember(
            uri=f"slurm://{cluster}/{sent[0].job_id}",
            name=name,
            job=plan.job.name,
            profile=self._profile,
            run_dir=run_dir,
            environ=self._environ,
        )
        write_jobs(run_dir, sent)
        return self.open(record)

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Queue a run again that has ended; of a sweep, the points that did not succeed.

        The script is the one that was submitted, and it goes on from the newest checkpoints.

        Raises:
            LauncherError: it has succeeded or not ended, or the site refused.
        """
        assert isinstance(run, SlurmRun)
        whole = run.sweep if isinstance(run, SlurmPoint) else run
        sweep = whole if isinstance(whole, SlurmSweep) else None
        _refuse_chain(chain, sweep=sweep is not None)
        run_dir = whole.run_dir
        script = (run_dir or Path()) / f"{run.record.job}.sbatch"
        if run_dir is None or not script.is_file():
            raise LauncherError(f"{run.uri}: {script} is not here, so it cannot be submitted again")
        self._cluster()
        points = run.unfinished()
        made = plan(load(run_dir / "job.yaml"), self._profile)
        require_secrets(made, self._environ)
        last = whole.jobs[-1]
        again = SlurmJob(
            job_id="",
            mode="continue",
            points=None if points is None else tuple(points),
            folder=last.folder or str(Path.cwd()),
        )
        links = [SlurmJob(job_id="", mode="chain", folder=again.folder)] * (chain - 1)
        array = None
        if sweep is not None and points is not None and made.job.sweep is not None:
            array = array_of(points, made.job.sweep)
        marked = rundir.cancel_requested(run_dir)
        if sweep is not None and points is not None:
            sweep.withdraw_cancel(points)
        rundir.withdraw_cancel(run_dir)
        try:
            log = _log_of(run_dir, sweep=sweep is not None)
            jobs = [again, *links]
            sent = send(self._command, script, run_dir, log=log, jobs=jobs, array=array)
        except LauncherError:
            if marked:
                rundir.request_cancel(run_dir)
            raise
        write_jobs(run_dir, sent)
        return run

    def findings(self, plan: SlurmPlan) -> list[Problem]:
        """Compare the plan with what the site says of itself."""
        self._cluster()
        return site_findings(plan, self._command)

    def open(self, record: registry.RunRecord) -> SlurmRun:
        """Return the handle of an earlier job, or sweep."""
        sweep = SlurmSweep(record, self._command)
        return sweep if sweep.points else SlurmRun(record, self._command)

    def _conditions(self, after: Sequence[Dependency], cluster: str) -> str:
        """Return what sbatch is told to wait for; empty where all of it has ended well."""
        found: list[str] = []
        for dependency in after:
            record, point = registry.find_point(dependency.run, environ=self._environ)
            if not record.uri.startswith(f"slurm://{cluster}/"):
                raise LauncherError(
                    f"after {record.uri}: it is not of cluster {cluster!r}, whose jobs can wait "
                    f"only for each other; `toolkit wait {record.name}` and submit then"
                )
            run: Run = self.open(record)
            run = run if point is None else run.point(point)
            assert isinstance(run, SlurmRun)
            found += run.conditions(dependency.wish)
        return ",".join(dict.fromkeys(found))

    def _require_venv(self) -> None:
        """Refuse a relative virtual environment that is not below the submit folder."""
        venv = Path(self._profile.venv or "/")
        if not venv.is_absolute() and not (venv / "bin/activate").is_file():
            raise LauncherError(
                f"venv {str(venv)!r} of profile {self._profile.name!r} is not below {Path.cwd()}; "
                "submit from the project's folder, or write an absolute path into the profile"
            )

    def _cluster(self) -> str:
        """Return the cluster's name; asking also shows whether there is a cluster."""
        answer = self._command(["scontrol", "show", "config"])
        match = re.search(r"^ClusterName\s*=\s*(\S+)", answer.stdout, re.MULTILINE)
        if answer.returncode != 0 or match is None:
            raise refused("scontrol", answer)
        return match[1]


def _refuse_chain(chain: int, *, sweep: bool) -> None:
    if chain > 1 and sweep:
        raise LauncherError(
            "--chain is for a single run, and this is a sweep; let its points queue themselves "
            "again (retries.requeue), or `toolkit resubmit` those that are out of time"
        )


def _log_of(run_dir: Path, *, sweep: bool) -> str:
    """Return where the jobs print, as sbatch wants it; of a sweep, each point in a file."""
    folder = str(run_dir / "logs").replace("%", "%%")  # sbatch replaces %j and others
    return f"{folder}/%a.log" if sweep else f"{folder}/job.log"
