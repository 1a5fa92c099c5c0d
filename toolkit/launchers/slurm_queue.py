"""What Slurm says of its jobs, and what that means."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.launchers import rundir
from toolkit.launchers.base import RunState, RunStatus

__all__ = ["Command", "Row", "ask", "first_line", "judge", "refused", "run_command"]

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


@dataclass(frozen=True, kw_only=True)
class Row:
    """A job, or a task of a job array, as squeue shows it."""

    job_id: str
    """`1234`, or `1234_7`; `1234` alone for the tasks that were cancelled before they started."""

    word: str
    """Slurm's state."""

    reason: str
    """Why it waits or has ended; empty for none."""

    command: str
    """The script and its arguments."""

    @property
    def state(self) -> RunState:
        """What the state means by itself."""
        return _STATES.get(self.word, RunState.UNKNOWN)


def run_command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm.

    Raises:
        SchedulerMissing: it is not installed here.
    """
    if shutil.which(argv[0]) is None:
        raise SchedulerMissing(f"no Slurm here: {argv[0]} is not in PATH. {_NO_CLUSTER}")
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def ask(command: Command, job_ids: Iterable[str]) -> list[Row]:
    """Return what Slurm still knows of these jobs, each task of an array by itself; one query.

    Raises:
        LauncherError: nobody answers.
    """
    wanted = ",".join(dict.fromkeys(job_ids))
    done = command(["squeue", "-h", "-r", "-t", "all", "-j", wanted, "-o", "%i|%T|%r|%o"])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return []
        raise LauncherError(first_line(done.stderr))
    rows = (line.split("|", 3) for line in done.stdout.splitlines() if line.count("|") >= 3)
    return [
        Row(
            job_id=job_id,
            word=word,
            reason="" if reason == "None" else reason,
            command=argv,
        )
        for job_id, word, reason, argv in rows
    ]


def judge(row: Row, run_dir: Path | None, *, after: str = "") -> RunStatus:
    """Put Slurm's word together with what the training said of its end.

    Args:
        row: What Slurm says.
        run_dir: The run directory, where this machine can see it.
        after: The jobs that it has to wait for, as sbatch was told.
    """
    state, reason = row.state, row.reason
    if state is RunState.UNKNOWN:
        return RunStatus(state=state, reason=f"Slurm says {row.word}")
    if reason.startswith("Dependency") and after:
        never = "dependency never satisfied" if "Never" in reason else "Dependency"
        reason = f"{never}: {after}"
    elif state is RunState.CANCELLED and run_dir is not None and not rundir.has_attempts(run_dir):
        reason = "never started"  # Slurm still says what it waited for
    if state is RunState.PENDING and run_dir is not None:
        words = [reason, rundir.last_reason(run_dir)]
        return RunStatus(state=state, reason="; last attempt: ".join(filter(None, words)))
    if state is RunState.FAILED and run_dir is not None and run_dir.is_dir():
        said = rundir.ended_status(run_dir)
        if said.state in (RunState.PREEMPTED, RunState.CANCELLED):
            return said
        if said.state is RunState.FAILED:
            words = [row.word, reason, said.reason]
            return RunStatus(state=said.state, reason=": ".join(filter(None, words)))
    return RunStatus(state=state, reason=reason if state is not RunState.SUCCEEDED else "")


def refused(program: str, answer: "subprocess.CompletedProcess[str]") -> LauncherError:
    """Return the error for what a command of Slurm did not do, in its own words."""
    text = (answer.stderr + answer.stdout).strip()
    if _UNREACHABLE.search(text):
        return SchedulerMissing(f"no Slurm controller answers: {first_line(text)}. {_NO_CLUSTER}")
    if "Invalid job array specification" in text:
        text += (
            "; a sweep has at most as many points as MaxArraySize of this site says: "
            "`scontrol show config | grep MaxArraySize`"
        )
    return LauncherError(f"{program} refused: {text or f'exit status {answer.returncode}'}")


def first_line(text: str) -> str:
    """Return the first line that says something."""
    return text.strip().partition("\n")[0]
