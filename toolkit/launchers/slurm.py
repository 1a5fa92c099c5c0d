"""Runs on a Slurm cluster, with or without accounting."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.errors import LauncherError, Problem, SchedulerMissing
from toolkit.launchers import registry, rundir
from toolkit.launchers.base import (
    Launcher,
    Run,
    RunState,
    RunStatus,
    follow_files,
    new_run_name,
    require_secrets,
)
from toolkit.launchers.slurm_site import site_findings
from toolkit.launchers.torchrun_log import without_stop_traces
from toolkit.planning import SlurmPlan
from toolkit.profile import SlurmProfile
from toolkit.rendering import render

__all__ = ["Command", "SlurmLauncher", "SlurmRun"]

Command = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command of Slurm and returns what it printed; tests pass their own."""

_NO_CLUSTER = (
    "`make sandbox-up` starts a cluster on this machine (then `make submit-slurm`, or "
    '`eval "$(slurm/sandbox/sandbox env)"` in this shell); `--to` names another profile'
)

_UNREACHABLE = re.compile(
    "Unable to contact|Could not establish a configuration|Unable to process configuration"
    "|the sandbox in .* is down"
)
"""What Slurm's commands (and the sandbox's) say when there is no cluster to talk to."""

_ASK_EVERY_S = 3.0
"""How often a follower asks whether the job has ended; clusters limit requests."""

_STATES = {
    "BOOT_FAIL": RunState.FAILED,
    "CANCELLED": RunState.CANCELLED,
    "COMPLETED": RunState.SUCCEEDED,
    "COMPLETING": RunState.RUNNING,
    "CONFIGURING": RunState.PENDING,
    "DEADLINE": RunState.FAILED,
    "FAILED": RunState.FAILED,
    "NODE_FAIL": RunState.FAILED,
    "OUT_OF_MEMORY": RunState.FAILED,
    "PENDING": RunState.PENDING,
    "PREEMPTED": RunState.PREEMPTED,
    "REQUEUED": RunState.PENDING,
    "REQUEUE_FED": RunState.PENDING,
    "REQUEUE_HOLD": RunState.PENDING,
    "RESIZING": RunState.RUNNING,
    "RUNNING": RunState.RUNNING,
    "SIGNALING": RunState.RUNNING,
    "SPECIAL_EXIT": RunState.PENDING,
    "STAGE_OUT": RunState.RUNNING,
    "STOPPED": RunState.RUNNING,
    "SUSPENDED": RunState.RUNNING,
    "TIMEOUT": RunState.PREEMPTED,
}
"""Slurm's job states (squeue manual, JOB STATE CODES); what is not here is UNKNOWN."""


def _run_command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    if shutil.which(argv[0]) is None:
        raise SchedulerMissing(f"no Slurm here: {argv[0]} is not in PATH. {_NO_CLUSTER}")
    return subprocess.run(argv, capture_output=True, text=True, check=False)


class SlurmRun(Run):
    """A job of a Slurm cluster."""

    def __init__(self, record: registry.RunRecord, command: Command) -> None:
        super().__init__(record)
        self._command = command
        self.job_id = record.uri.rpartition("/")[2]

    def status(self) -> RunStatus:
        """Ask squeue, then scontrol; when both have forgotten the job, read what it left behind."""
        try:
            queue = self._command(
                ["squeue", "-h", "-t", "all", "-j", self.job_id, "-o", "%T|%r|%o"]
            )
        except SchedulerMissing as error:
            return self._unreachable(str(error))
        if queue.returncode == 0 and "|" in queue.stdout:
            word, reason, command = queue.stdout.splitlines()[0].split("|", 2)
            if self._is_ours(command):
                return self._judge(word, reason)
            return self._left_behind()
        if queue.returncode != 0 and "Invalid job id" not in queue.stderr:
            return self._unreachable(_first_line(queue.stderr))
        shown = self._command(["scontrol", "-o", "show", "job", self.job_id]).stdout
        if (match := re.search(r"\bJobState=(\S+)", shown)) and self._is_ours(shown):
            found = re.search(r"\bReason=(\S+)", shown)
            return self._judge(match[1], found[1] if found else "")
        return self._left_behind()

    def _is_ours(self, command: str) -> bool:
        """Whether a job of this id is this run: other clusters, and later years, use ids again."""
        return self.run_dir is None or str(self.run_dir) in command

    def _left_behind(self) -> RunStatus:
        if self.run_dir is None or not self.run_dir.is_dir():
            reason = "Slurm does not know the job, and its run directory is not here"
            return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)
        return rundir.ended_status(self.run_dir)

    def _unreachable(self, reason: str) -> RunStatus:
        """Believe an end that nothing can follow; otherwise the job may be queued again."""
        if self.run_dir is not None:
            found = rundir.ended_status(self.run_dir)
            said = rundir.outcome(self.run_dir) or {}
            if found.state is RunState.SUCCEEDED or said.get("status") == "fatal":
                return found
        return RunStatus(state=RunState.UNKNOWN, reason=reason)

    def _judge(self, word: str, reason: str) -> RunStatus:
        """Put Slurm's word together with what the training said of its end."""
        state = _STATES.get(word, RunState.UNKNOWN)
        reason = "" if reason == "None" else reason
        if state is RunState.UNKNOWN:
            return RunStatus(state=state, reason=f"Slurm says {word}")
        if state is RunState.PENDING and self.run_dir is not None:
            words = [reason, rundir.last_reason(self.run_dir)]
            return RunStatus(state=state, reason="; last attempt: ".join(filter(None, words)))
        if state is RunState.FAILED and self.run_dir is not None:
            said = rundir.ended_status(self.run_dir)
            if said.state in (RunState.PREEMPTED, RunState.CANCELLED):
                return said
            if said.state is RunState.FAILED:
                words = [word, reason, said.reason]
                return RunStatus(state=said.state, reason=": ".join(filter(None, words)))
        return RunStatus(state=state, reason=reason if state is not RunState.SUCCEEDED else "")

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield what the job has printed, all its attempts."""
        if self.run_dir is None:
            raise LauncherError(f"{self.uri} was not submitted from here; its log is unknown")
        log = self.run_dir / "logs" / "job.log"
        lines = follow_files(
            lambda: [log],
            ended=lambda: not follow or self._ended(),
            pause_s=0.5,
            ask_every_s=_ASK_EVERY_S,
        )
        return rundir.redacted(without_stop_traces(lines), self.run_dir)

    def _ended(self) -> bool:
        status = self.status()
        return status.state.final or status.lost

    def cancel(self) -> None:
        """Ask the batch script to stop the job within `stop.grace`; asked twice, end it at once."""
        status = self.status()
        if status.state.final or status.lost:
            return
        if status.state is RunState.UNKNOWN:
            raise LauncherError(f"{self.uri} cannot be cancelled: {status.reason}")
        known = self.run_dir is not None and self.run_dir.is_dir()
        gently = known and status.state is RunState.RUNNING
        if gently and self.run_dir is not None and not rundir.cancel_requested(self.run_dir):
            # The script answers USR2; plain scancel would leave the ranks KillWait only.
            done = self._command(["scancel", "--batch", "--signal=USR2", self.job_id])
        else:
            done = self._command(["scancel", self.job_id])
        if done.returncode != 0 and not re.search("Invalid job id|already complet", done.stderr):
            raise LauncherError(f"scancel refused {self.uri}: {_first_line(done.stderr)}")
        if known and self.run_dir is not None:
            rundir.request_cancel(self.run_dir)


class SlurmLauncher(Launcher[SlurmPlan]):
    """Submits batch scripts."""

    def __init__(
        self,
        profile: SlurmProfile,
        *,
        command: Command = _run_command,
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

    def submit(self, plan: SlurmPlan) -> SlurmRun:
        """Queue a new job; the script is the one that `render` shows, byte for byte."""
        cluster = self._cluster()
        require_secrets(plan, self._environ)
        self._require_venv()
        registry.check(environ=self._environ)
        name = new_run_name(plan.job.name)
        run_dir = rundir.make(Path(self._profile.runs_dir), name)
        script = rundir.write_inputs(
            run_dir, plan.job, script=render(plan), file_name=f"{plan.job.name}.sbatch"
        )
        log = str(run_dir / "logs" / "job.log").replace("%", "%%")  # sbatch replaces %j and others
        argv = ["sbatch", "--parsable", f"--output={log}", str(script), str(run_dir)]
        try:
            answer = self._command(argv)
            match = re.fullmatch(r"(\d+)(;.*)?", answer.stdout.strip())
            if answer.returncode != 0 or match is None:
                raise _refused("sbatch", answer)
        except LauncherError:
            shutil.rmtree(run_dir)  # we made it, and nothing has run in it
            raise
        record = registry.remember(
            uri=f"slurm://{cluster}/{match[1]}",
            name=name,
            job=plan.job.name,
            profile=self._profile,
            run_dir=run_dir,
            environ=self._environ,
        )
        return SlurmRun(record, self._command)

    def findings(self, plan: SlurmPlan) -> list[Problem]:
        """Compare the plan with what the site says of itself."""
        self._cluster()
        return site_findings(plan, self._command)

    def open(self, record: registry.RunRecord) -> SlurmRun:
        """Return the handle of an earlier job."""
        return SlurmRun(record, self._command)

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
            raise _refused("scontrol", answer)
        return match[1]


def _refused(program: str, answer: "subprocess.CompletedProcess[str]") -> LauncherError:
    text = (answer.stderr + answer.stdout).strip()
    if _UNREACHABLE.search(text):
        return SchedulerMissing(f"no Slurm controller answers: {_first_line(text)}. {_NO_CLUSTER}")
    return LauncherError(f"{program} refused: {text or f'exit status {answer.returncode}'}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
