"""Runs on this machine: N torchrun agents stand for N nodes.

The rendered script is what runs, as on a cluster. A supervisor of its own process keeps it, so that
a run outlives the shell that submitted it, and nothing outlives the run.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from toolkit.errors import LauncherError, Problem
from toolkit.job.environment import without_outer_job
from toolkit.local import run_lock
from toolkit.planning.local import LocalPlan
from toolkit.planning.plans import refusal
from toolkit.profile import LocalProfile
from toolkit.rendering import render
from toolkit.runs.records import log_reader, provenance, registry, run_directory
from toolkit.runs.records.log_reader import LogView, Span
from toolkit.runs.records.run_secrets import require_secrets, secret_problems
from toolkit.runs.run import Launcher, Run, new_run_name, require_unfinished
from toolkit.runs.state import RunState, RunStatus
from toolkit.text import untrusted
from toolkit.text.own_files import create

_EXEC_S = 5.0
"""Seconds to wait for a command line: it is empty for an instant after exec (Linux, fs/exec.c)."""
_SCRIPT = "run.sh"
_SUPERVISOR = "toolkit.supervisor"
_LAUNCHER_LOG = "launcher.log"
"""The script's own output, such as a refusal to start."""


def count_gpus() -> int:
    """Return how many NVIDIA GPUs there are for us, without loading torch."""
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(chosen.split(","))
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdecimal()])


class LocalRun(Run):
    """A run on this machine."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        assert self.record.run_dir is not None
        return self.record.run_dir

    def status(self) -> RunStatus:
        """Return the status: running if the lock is held, else from the run directory."""
        if self._supervisor() is not None:
            return RunStatus(state=RunState.RUNNING)
        if not self.run_dir.is_dir():
            reason = f"{self.run_dir} is gone"
            return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)
        status = run_directory.ended_status(self.run_dir)
        explained = status.word or run_directory.outcome(self.run_dir) is not None
        if status.state is not RunState.FAILED or explained:
            return status
        lines: list[str] = []
        with contextlib.suppress(OSError):
            log = self.run_dir / "logs" / _LAUNCHER_LOG
            lines = untrusted.read_text(log, below=self.run_dir).split("\n")
        refusal = next((line for line in reversed(lines) if line), "")
        return RunStatus(state=status.state, reason=refusal) if refusal else status

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        launcher_log = self.run_dir / "logs" / _LAUNCHER_LOG
        # The supervisor has started the first attempt only; users may continue the run by hand.
        first = [Span(path=launcher_log, below=self.run_dir)] if view.attempt == 0 else []
        return log_reader.read_run(
            self.run_dir,
            view,
            lambda: [*first, *log_reader.spans_of(self.run_dir, view, launcher_log)],
            ended=lambda: self._supervisor() is None,
        )

    def cancel(self) -> None:
        """Signal the supervisor to stop the run with a checkpoint."""
        if pid := self._supervisor():
            if not self._is_supervisor(pid):
                raise LauncherError(
                    f"{self.uri} is not stopped: by {self.run_dir / run_lock.NAME}, process {pid} "
                    "keeps it, but that is none of yours which supervises this run"
                )
            run_directory.request_cancel(self.run_dir)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _is_supervisor(self, pid: int) -> bool:
        """Whether a process is this user's, and supervises this run.

        The files of a run directory may be forged: a process id of -1 would be everyone.
        """
        if not 1 < pid < 1 << 31:
            return False
        process = Path(f"/proc/{pid}")
        try:
            if not process.parent.joinpath("self").exists():  # a system without /proc
                return os.getpgid(pid) == pid
            if process.stat().st_uid != os.getuid():
                return False
            deadline = time.monotonic() + _EXEC_S
            while not (command := (process / "cmdline").read_bytes().rstrip(b"\0")):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except FileNotFoundError:
            return True  # it has ended this instant
        except OSError:
            return False
        argv = command.split(b"\0")
        return _SUPERVISOR.encode() in argv and os.fsencode(self.run_dir) == argv[-1]

    def _supervisor(self) -> int | None:
        """Return the supervisor's process id while it lives; 0 in the instant before it is known.

        A lock ends with its holder, so that a process id which the system gave away again is not
        taken for ours.
        """
        with (
            contextlib.suppress(OSError),  # not there, or nothing that a supervisor can hold
            untrusted.open_untrusted(f"{self.run_dir}/{run_lock.NAME}") as lock,
        ):
            if run_lock.is_held(lock):
                pid = lock.read(len(run_lock.NO_PID))
                return int(pid) if pid.isdigit() else 0
        return None


class LocalLauncher(Launcher[LocalPlan]):
    """Starts runs on this machine."""

    def __init__(
        self, profile: LocalProfile, *, gpus: Callable[[], int] = count_gpus, tied: bool = False
    ) -> None:
        """Prepare to launch.

        Args:
            profile: Where run directories are made.
            gpus: How many GPUs this machine has.
            tied: Whether runs end with this process, however it ends.
        """
        self._profile = profile
        self._gpus = gpus
        self._tied = tied

    def submit(self, plan: LocalPlan, *, files: Mapping[str, bytes] = {}) -> LocalRun:
        """Start a new run, which finds `files` in its run directory, and return at once."""
        if problems := list(self.refusals(plan)):
            raise LauncherError("\n".join(problem.message for problem in problems))
        require_secrets(plan)
        registry.check()
        name = new_run_name(plan.job.name)
        run_dir = run_directory.make(Path(self._profile.runs_dir), name)
        run_directory.write_inputs(
            run_dir, plan.job, script=render(plan), file_name=_SCRIPT, files=files
        )
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
        return LocalRun(registry.add(record))

    def refusals(self, plan: LocalPlan) -> Iterator[Problem]:
        """Yield why a plan cannot run on this machine as it is now; `toolkit check` asks, too."""
        need = plan.job.resources
        gpus, there = need.max_nodes * need.gpus_per_node, self._gpus()
        if gpus > there:
            yield refusal(
                "gpus-exceed-machine",
                f"{need.max_nodes} nodes with {need.gpus_per_node} GPUs make {gpus}, and this "
                f"machine has {there}; --set resources.gpus_per_node=0 trains on its CPUs",
                *("resources", "gpus_per_node"),
            )
        yield from secret_problems(plan)
        script, folder = plan.job.script, Path(plan.workdir or ".")
        if script is not None and not plan.carried and not (folder / script).is_file():
            message = f"script: there is no file {script!r} in {str(folder.absolute())!r}"
            yield refusal("script-missing", message, "script")

    def open(self, record: registry.RunRecord) -> LocalRun:
        """Return the handle of an earlier run.

        Raises:
            LauncherError: its run directory is unknown.
        """
        if record.run_dir is None:
            raise LauncherError(f"{record.uri}: its record names no run directory")
        return LocalRun(record)

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Say how a run goes on here: nothing of this machine would queue it again.

        Raises:
            LauncherError: always; of a run that can go on, with the command that continues it.
        """
        require_unfinished(run, run.status())
        folder = shlex.quote(str(run.run_dir))
        raise LauncherError(
            f"{run.uri} is continued by hand: bash {folder}/{_SCRIPT} {folder} continue"
        )

    def _supervise(self, run_dir: Path, plan: LocalPlan) -> None:
        """Start the supervisor, which holds the lock from its first instant on."""
        tied = [f"--tied-to={os.getpid()}"] if self._tied else []
        limit_s = plan.job.time_limit_s
        limit = [] if limit_s is None else [f"--time-limit={limit_s}"]
        # torchrun lies beside the Python that runs us, whether or not its folder is in PATH.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        with run_lock.hold(run_dir) as lock, create(run_dir / "logs" / _LAUNCHER_LOG) as log:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-m", _SUPERVISOR, "keep", str(run_dir), *tied, *limit),
                    *(f"--stop-timeout={plan.stop_timeout_s}", f"--lock={lock.fileno()}", "--"),
                    *("bash", str(run_dir / _SCRIPT), str(run_dir)),
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
        # No process waits for the supervisor; a Popen object that is thrown away would complain.
        child.returncode = 0
