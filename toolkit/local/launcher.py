"""Runs on this machine: N torchrun agents simulate N nodes.

As on a cluster, the rendered script is executed. A supervisor in a separate process manages it, so
that a run outlives the shell that submitted it, and no process outlives the run.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from toolkit.errors import LauncherError, Problem, nearest
from toolkit.job.environment import without_outer_job
from toolkit.local.run import SUPERVISOR, LocalPoint, LocalRun, LocalSweep
from toolkit.planning.local import LocalPlan
from toolkit.planning.plans import refusal
from toolkit.profile import LocalProfile
from toolkit.rendering import render
from toolkit.runs.records import provenance, registry, run_directory
from toolkit.runs.records.points import has_points, write_points
from toolkit.runs.records.run_secrets import require_secrets, secret_problems
from toolkit.runs.run import Launcher, Run, new_run_name, require_unfinished
from toolkit.supervisor import run_lock
from toolkit.supervisor.points import LAUNCHER_LOG, count_gpus
from toolkit.text.own_files import create

_SCRIPT = "run.sh"


class LocalLauncher(Launcher[LocalPlan]):
    """Starts runs on this machine."""

    def __init__(
        self, profile: LocalProfile, *, gpus: Callable[[], int] = count_gpus, tied: bool = False
    ) -> None:
        """Create the launcher.

        Args:
            profile: The profile with the folder for run directories.
            gpus: Returns the number of GPUs of this machine.
            tied: Whether runs end with this process, however it ends.
        """
        self._profile = profile
        self._gpus = gpus
        self._tied = tied

    def submit(self, plan: LocalPlan, *, files: Mapping[str, bytes] = {}) -> LocalRun:
        """Start a new run with `files` in its run directory, and return immediately."""
        if problems := list(self.refusals(plan)):
            raise LauncherError("\n".join(problem.message for problem in problems))
        require_secrets(plan)
        registry.check()
        name = new_run_name(plan.job.name)
        run_dir = run_directory.make(Path(self._profile.runs_dir), name)
        run_directory.write_inputs(
            run_dir, plan.job, script=render(plan), file_name=_SCRIPT, files=files
        )
        if plan.points:
            write_points(run_dir, plan.points)
        try:
            self._supervise(run_dir, plan)
        except OSError as error:
            raise LauncherError(f"{run_dir} cannot be written: {error.strerror}") from error
        record = registry.RunRecord(
            uri=f"local://{name}",
            name=name,
            job=plan.job.name,
            profile=plan.recorded(self._profile),
            created=time.time(),
            provenance=provenance.collect(),
            run_dir=run_dir,
        )
        return self.open(registry.add(record))

    def refusals(self, plan: LocalPlan) -> Iterator[Problem]:
        """Yield why a plan cannot run on this machine now; `toolkit check` also calls this."""
        need = plan.job.resources
        gpus, there = need.max_nodes * need.gpus_per_node, self._gpus()
        if gpus > there:
            yield refusal(
                "gpus-exceed-machine",
                f"{gpus} GPUs are needed ({need.max_nodes} x {need.gpus_per_node}), and this "
                f"machine has {there}; --set resources.gpus_per_node=0 trains on its CPUs",
                *("resources", "gpus_per_node"),
            )
        yield from secret_problems(plan)
        script, folder = plan.job.script, Path(plan.workdir or ".")
        if script is not None and not plan.carried and not (folder / script).is_file():
            message = f"script: no file {script!r} in {str(folder.absolute())!r}"
            first = next((word for word in script.split() if (folder / word).is_file()), None)
            if first is not None:
                message += f"; write script: {first}, and each word after it in args"
            elif meant := nearest(script, [found.name for found in folder.glob("*.py")]):
                message += f"; did you mean {meant!r}?"
            else:
                message += "; a job starts in the folder where you call this, or in `workdir`"
            yield refusal("script-missing", message, "script")

    def open(self, record: registry.RunRecord) -> LocalRun:
        """Return the handle of an earlier run, or sweep.

        Raises:
            LauncherError: its run directory is unknown.
        """
        if record.run_dir is None:
            raise LauncherError(f"{record.uri}: its record names no run directory")
        return LocalSweep(record) if has_points(record.run_dir) else LocalRun(record)

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Raise an error with the command that continues a run: this machine has no queue.

        Raises:
            LauncherError: always; for a run that can continue, with the command to continue it.
        """
        require_unfinished(run, run.status())
        whole = run.sweep if isinstance(run, LocalPoint) else run
        script, folder = shlex.quote(f"{whole.run_dir}/{_SCRIPT}"), shlex.quote(str(run.run_dir))
        raise LauncherError(f"{run.uri} is continued by hand: bash {script} {folder} continue")

    def _supervise(self, run_dir: Path, plan: LocalPlan) -> None:
        """Start the supervisor, which holds the lock from its first instant."""
        tied = [f"--tied-to={os.getpid()}"] if self._tied else []
        limit_s = plan.job.time_limit_s
        limit = [] if limit_s is None else [f"--time-limit={limit_s}"]
        # torchrun is next to this Python interpreter, whether or not its folder is in PATH.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        role = ["keep", str(run_dir)]
        if plan.points:
            role = ["points", str(run_dir), *plan.at_once]
            role += [f"--point={point.name}" for point in plan.points]
        script = ["bash", str(run_dir / _SCRIPT), *([] if plan.points else [str(run_dir)])]
        with run_lock.hold(str(run_dir)) as lock, create(run_dir / LAUNCHER_LOG) as log:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-m", SUPERVISOR, *role, *tied, *limit),
                    *(f"--stop-timeout={plan.stop_timeout_s}", f"--lock={lock.fileno()}", "--"),
                    *script,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[
                    lock.fileno()
                ],  # the lock is held as long as the supervisor, or the script, lives
                start_new_session=True,
                env={**without_outer_job(local=True), "PATH": path},
            )
            run_lock.note_pid(lock, child.pid)
        # No process waits for the supervisor; without this, a discarded Popen object would warn.
        child.returncode = 0
