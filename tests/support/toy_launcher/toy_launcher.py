"""A launcher of another package, for the small batch system beside it (toyq.py).

Found by its entry point, in the folder beside this file. The script is that of this machine, so
that the supervisor does there what it does here: attempts, restarts, logs, watchdog, the stop with
a checkpoint. The package adds how the scheduler is asked; by an exit status the script asks it for
another attempt.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import toyq  # type: ignore[import-not-found]  # in the folder of the package

import toolkit
from toolkit.errors import LauncherError
from toolkit.job.environment import without_outer_job
from toolkit.planning.local import LocalPlan
from toolkit.profile.base import SiteProfile
from toolkit.runs.records import log_reader, registry, run_directory
from toolkit.runs.records.log_reader import LogView
from toolkit.runs.records.run_secrets import require_secrets
from toolkit.runs.run import Launcher, Run, new_run_name
from toolkit.runs.state import RunState, RunStatus

_SCRIPT = "run.sh"
_LOG = "launcher.log"


class ToyProfile(SiteProfile):
    """A site of the toy batch system."""

    kind: Literal["toy"] = "toy"
    """What the profile is for."""

    runs_dir: str = "runs"
    """Where run directories are made."""

    spool: str
    """The folder of the daemon's socket."""


class ToyRun(Run):
    """A job of the toy batch system."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        assert self.record.run_dir is not None
        return self.record.run_dir

    @property
    def batch_key(self) -> str:
        """One question answers for all runs of a daemon."""
        return str(self.record.profile["spool"])

    def status(self) -> RunStatus:
        """Return the status; of a job that has ended, from its run directory."""
        return self._status_in(_ask(self.batch_key, do="list"))

    def statuses_of(self, runs: Sequence[Run]) -> list[RunStatus]:
        """Return the statuses of several runs."""
        jobs = _ask(self.batch_key, do="list")
        return [run._status_in(jobs) for run in runs if isinstance(run, ToyRun)]

    def _status_in(self, jobs: dict[str, dict[str, Any]]) -> RunStatus:
        job = jobs.get(self.record.uri.rpartition("/")[2])
        if job is None:
            return RunStatus(state=RunState.UNKNOWN, reason="toyq has forgotten it", lost=True)
        if job["state"] == "QUEUED":
            return RunStatus(state=RunState.PENDING, reason=f"{job['ahead']} jobs are ahead of it")
        if job["state"] == "RUNNING":
            return RunStatus(state=RunState.RUNNING)
        if job["state"] == "CANCELLED":
            return RunStatus(state=RunState.CANCELLED)
        status = run_directory.ended_status(self.run_dir)
        if status.state is RunState.UNKNOWN:  # before its supervisor could write why
            return RunStatus(state=RunState.FAILED, reason=f"it has ended; see logs/{_LOG}")
        return status

    def cancel(self) -> None:
        """Have the daemon stop the job."""
        if not self.status().state.final:
            run_directory.request_cancel(self.run_dir)
            _ask(self.batch_key, do="cancel", job=self.record.uri.rpartition("/")[2])

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        return log_reader.read_run(
            self.run_dir,
            view,
            lambda: log_reader.spans_of(self.run_dir, view, self.run_dir / "logs" / _LOG),
            ended=lambda: self.status().state.final,
        )


class ToyLauncher(Launcher[LocalPlan]):
    """Submits to the toy batch system."""

    def __init__(self, profile: ToyProfile) -> None:
        """Prepare to launch."""
        self._profile = profile

    def submit(self, plan: LocalPlan) -> ToyRun:
        """Queue a new run."""
        require_secrets(plan)
        registry.check()
        name = new_run_name(plan.job.name)
        run_dir = run_directory.make(Path(self._profile.runs_dir), name)
        script = toolkit.render(plan)
        run_directory.write_inputs(run_dir, plan.job, script=script, file_name=_SCRIPT)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # has python3 and torchrun
        job = _ask(
            self._profile.spool,
            do="submit",
            name=name,
            argv=["bash", str(run_dir / _SCRIPT), str(run_dir)],
            output=str(run_dir / "logs" / _LOG),
            grace_s=plan.stop_timeout_s,
            environ={**without_outer_job(local=True), "PATH": path},
        )
        record = registry.RunRecord(
            uri=f"toy://{job}",
            name=name,
            job=plan.job.name,
            profile=plan.recorded(self._profile),  # type: ignore[arg-type]
            created=time.time(),
            run_dir=run_dir,
        )
        return ToyRun(registry.add(record))

    def open(self, record: registry.RunRecord) -> ToyRun:
        """Return the handle of an earlier run."""
        return ToyRun(record)


class Toy:
    """What the entry point names."""

    profile = ToyProfile

    def plan(self, job: toolkit.JobSpec, profile: ToyProfile) -> LocalPlan:
        """Plan as for this machine."""
        here = toolkit.LocalProfile(name=profile.name, runs_dir=profile.runs_dir)
        plan = toolkit.plan(job, here)
        return replace(plan, profile=profile, again_status=toyq.AGAIN)  # type: ignore[arg-type]

    def render(self, plan: LocalPlan) -> str:
        """Render as for this machine."""
        here = toolkit.LocalProfile(name=plan.profile.name, runs_dir=plan.profile.runs_dir)
        return toolkit.render(replace(plan, profile=here))

    def launcher(self, profile: ToyProfile) -> ToyLauncher:
        """Return the launcher."""
        return ToyLauncher(profile)


def _ask(spool: str, **request: Any) -> Any:
    try:
        return toyq.ask(Path(spool), **request)
    except OSError as error:
        raise LauncherError(f"toyq does not answer on {spool}: {error.strerror}") from None
