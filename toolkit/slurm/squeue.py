"""Rows of squeue, and the status that follows from a row."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.runs import commands, run_directory
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.status import expected, in_words

__all__ = [
    "Command",
    "Row",
    "ask_jobs",
    "ask_mine",
    "cluster_name",
    "first_line",
    "is_busy",
    "judge",
    "refused",
    "run_command",
]

Command = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command of Slurm and returns its output; tests pass their own."""

_NO_CLUSTER = (
    "`make sandbox-up` starts a cluster on this machine (then `make submit-slurm`, or "
    '`eval "$(slurm/sandbox/sandbox env)"` in this shell); `--to` names another profile'
)

_UNREACHABLE = re.compile(
    "Unable to contact|Could not establish a configuration|Unable to process configuration"
    "|the sandbox in .* is down"
)
"""Messages of Slurm's commands (and the sandbox's) when no cluster is reachable."""

_BUSY = re.compile(
    "Socket timed out|Rate limit exceeded|[Tt]emporarily un|Slurm is busy|Zero Bytes"
    r"|\((receive|send) failure\)"
)
"""Their messages when the controller is overloaded (Slurm, slurm_errno.c)."""

_FORMAT = "==job|%i|%T|%S|%r|%o"
_ROW = re.compile(r"==job\|(\d{1,18}[\w,%\[\]+-]{0,4000})\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)")
"""Text, since Slurm's JSON is another in every version. What people write comes last, and a line
that does not begin like a job belongs to the command above it: arguments may hold newlines."""

_IDS_PER_QUESTION = 5000
"""The kernel takes no argument above 128 KiB."""

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
"""Slurm's job states (squeue manual, JOB STATE CODES); all others are UNKNOWN."""


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
    """The script and, before Slurm 24.11, its arguments."""

    start: str = ""
    """When it has started or is expected to, in the cluster's local time; empty for unknown."""

    @property
    def state(self) -> RunState:
        """What the state means by itself."""
        return _STATES.get(self.word, RunState.UNKNOWN)

    @property
    def whole(self) -> str:
        """The id of the job, or of the array that this is a task of."""
        return self.job_id.partition("_")[0]

    @property
    def goes_on(self) -> bool:
        """Whether it may be a start that goes on with a run; from 24.11 on no argument is shown."""
        return self.command == self.script or self.command.endswith((" continue", " chain"))

    @property
    def script(self) -> str:
        """The path of the batch script, which may hold blanks."""
        match = re.match(r"(.*?\.sbatch)(\s|$)", self.command, re.DOTALL)
        return match[1] if match else self.command.partition(" ")[0]


def run_command(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm; queries have a time limit, sbatch and scancel have none.

    Raises:
        SchedulerMissing: it is not installed here.
        TooLong: it gives no end of an answer.
    """
    if shutil.which(argv[0]) is None:
        raise SchedulerMissing(f"no Slurm here: {argv[0]} is not in PATH. {_NO_CLUSTER}")
    # What people set for their own listings (SQUEUE_PARTITION, …) would hide jobs from us.
    hidden = ("SQUEUE_", "SACCT_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    limit_s = commands.ANSWER_S if commands.only_asks(argv) else math.inf
    return commands.run(argv, environ=environ, limit_s=limit_s)


def ask_mine(command: Command) -> list[Row]:
    """Return all jobs of this user that Slurm still knows, each task of an array by itself.

    One query, and a cheap one for any number of runs: for a list of job ids squeue would
    fetch the jobs of all users.

    Raises:
        LauncherError: nobody answers.
    """
    return _ask(command, "--me")


def ask_jobs(command: Command, job_ids: Iterable[str]) -> list[Row]:
    """Return the rows of these jobs that Slurm still knows, of any user.

    Raises:
        LauncherError: nobody answers.
    """
    wanted = list(dict.fromkeys(job_ids))
    parts = range(0, len(wanted), _IDS_PER_QUESTION)
    each = (wanted[i : i + _IDS_PER_QUESTION] for i in parts)
    return [row for part in each for row in _ask(command, "-j", ",".join(part))]


def _ask(command: Command, *who: str) -> list[Row]:
    # -a: the jobs of hidden partitions, too.
    done = command(["squeue", "-h", "-a", "-r", "-t", "all", *who, "-o", _FORMAT])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return []
        raise LauncherError(first_line(done.stderr) or f"squeue: exit status {done.returncode}")
    return list(_rows(done.stdout))


def _rows(text: str) -> Iterator[Row]:
    row = None
    for line in text.split("\n"):
        if match := _ROW.fullmatch(line):
            if row:
                yield row
            job_id, word, start, reason, argv = match.groups()
            start = "" if start == "N/A" else start
            reason = "" if reason == "None" else reason
            row = Row(job_id=job_id, word=word, start=start, reason=reason, command=argv)
        elif row and line:
            row = replace(row, command=f"{row.command}\n{line}")
    if row:
        yield row


def judge(row: Row, run_dir: Path | None, *, after: str = "") -> RunStatus:
    """Combine Slurm's state with the outcome that the training has written.

    Args:
        row: The row of squeue.
        run_dir: The run directory, where this machine can see it.
        after: The jobs that it waits for, as they were given to sbatch.
    """
    state, reason = row.state, row.reason
    if state is RunState.UNKNOWN:
        return RunStatus(state=state, reason=f"Slurm says {row.word}")
    if reason.startswith("Dependency") and after:
        never = "dependency never satisfied" if "Never" in reason else "Dependency"
        reason = f"{never}: {after}"
    elif (
        state is RunState.CANCELLED
        and run_dir is not None
        and not run_directory.has_attempts(run_dir)
    ):
        reason = "never started"  # Slurm still says what it waited for
    elif state is RunState.PENDING:
        reason = in_words(reason)
    if state is RunState.PENDING:
        last = run_directory.last_reason(run_dir) if run_dir is not None else ""
        words = [reason, expected(row.start), last and f"last attempt: {last}"]
        return RunStatus(
            state=state, reason="; ".join(filter(None, words)), expected_start=row.start
        )
    if state is RunState.FAILED and run_dir is not None and run_dir.is_dir():
        ended = run_directory.ended_status(run_dir)
        word = run_directory.newest_reason(run_dir).word
        if ended.state is RunState.SUCCEEDED and word != "done":
            return ended  # torchrun failed, or was stopped, after all steps were made
        by_slurm = word == "terminated" and row.word != "FAILED"  # as for a lost node
        if ended.state in (RunState.PREEMPTED, RunState.CANCELLED) and not by_slurm:
            return ended
        if ended.state is RunState.FAILED or by_slurm:
            words = [row.word, reason, ended.reason]
            return RunStatus(state=state, reason=": ".join(filter(None, words)))
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


def is_busy(text: str) -> bool:
    """Whether a controller reports overload, so that a retry would make it worse."""
    return bool(_BUSY.search(text))


def cluster_name(config: str) -> str:
    """Return the cluster's name from `scontrol show config`; empty where it does not.

    Raises:
        LauncherError: the answer is not a name: it becomes a part of URIs.
    """
    match = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    if match and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", match[1]):
        raise LauncherError(f"Slurm says that its cluster is called {match[1][:80]!r}: no name")
    return match[1] if match else ""


def first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return text.strip().partition("\n")[0]
