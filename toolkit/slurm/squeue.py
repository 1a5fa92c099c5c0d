"""Slurm's commands: how they are run, and the rows of squeue and sacct.

squeue shows the jobs that the controller knows; sacct, at sites with accounting, those that the
controller has forgotten. Text is parsed, since Slurm's JSON is another in every version.
"""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.runs import commands
from toolkit.slurm.status import JobRow

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

_SQUEUE_FORMAT = "==job|%i|%T|%S|%r|%o"
_SQUEUE_ROW = re.compile(
    r"==job\|(\d{1,18}[\w,%\[\]+-]{0,4000})\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)"
)
"""What people write comes last. A line that does not begin like a job belongs to the command above
it: arguments may hold newlines."""

_SACCT_FORMAT = "JobID,State,ExitCode,SubmitLine"
_SACCT_ROW = re.compile(r"(\d{1,18}[\w,%\[\].+-]{0,4000})\|([A-Z_]+)[^|]*\|(\d+):(\d+)\|(.*)")
"""`CANCELLED by 0` is CANCELLED; what people write comes last, and may hold newlines."""

_NO_ACCOUNTING = re.compile(
    "accounting storage is disabled|not running a supported accounting_storage"
)
_IDS_PER_QUERY = 5000
"""The kernel takes no argument above 128 KiB."""


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


def ask_mine(command: Command) -> list[JobRow]:
    """Return all jobs of this user that Slurm still knows, each task of an array by itself.

    One query, and a cheap one for any number of runs: for a list of job ids squeue would
    fetch the jobs of all users.

    Raises:
        LauncherError: the controller does not answer.
    """
    return _squeue(command, "--me")


def ask_jobs(command: Command, job_ids: Iterable[str]) -> list[JobRow]:
    """Return the rows of these jobs that Slurm still knows, of any user.

    Raises:
        LauncherError: the controller does not answer.
    """
    return [row for ids in _batches(job_ids) for row in _squeue(command, "-j", ids)]


def _batches(job_ids: Iterable[str]) -> Iterator[str]:
    """Yield the ids in arguments of a length that the kernel takes."""
    ids = list(dict.fromkeys(job_ids))
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ",".join(ids[start : start + _IDS_PER_QUERY])


def _squeue(command: Command, *selection: str) -> list[JobRow]:
    # -a: the jobs of hidden partitions, too.
    done = command(["squeue", "-h", "-a", "-r", "-t", "all", *selection, "-o", _SQUEUE_FORMAT])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return []
        raise LauncherError(first_line(done.stderr) or f"squeue: exit status {done.returncode}")
    rows: list[JobRow] = []
    for line in done.stdout.split("\n"):
        if match := _SQUEUE_ROW.fullmatch(line):
            job_id, word, start, reason, argv = match.groups()
            start = "" if start == "N/A" else start
            reason = "" if reason == "None" else reason
            rows.append(JobRow(job_id=job_id, word=word, start=start, reason=reason, command=argv))
        elif rows and line:
            rows[-1] = rows[-1]._replace(command=f"{rows[-1].command}\n{line}")
    return rows


def ask_accounting(command: Command, job_ids: Iterable[str]) -> list[JobRow] | None:
    """Return sacct's rows of these jobs, one for each task of an array; None without accounting.

    Raises:
        LauncherError: the accounting does not answer now, but may later.
    """
    rows: list[JobRow] = []
    for ids in _batches(job_ids):
        done = command(["sacct", "-n", "-P", "-X", "-j", ids, "-o", _SACCT_FORMAT])
        if done.returncode != 0:
            if _NO_ACCOUNTING.search(done.stderr + done.stdout):
                return None
            raise LauncherError(f"the accounting does not answer: {first_line(done.stderr)}")
        for match in filter(None, map(_SACCT_ROW.fullmatch, done.stdout.split("\n"))):
            job_id, word, status, signal, argv = match.groups()
            # sacct before 26.05 keeps seven bits of a status, so that 0 may be a failure, too.
            how = f", exit status {status}" * (status != "0")
            how += f", signal {signal}" * (signal != "0")
            reason = "" if word == "COMPLETED" else f"the accounting says {word}{how}"
            rows.append(JobRow(job_id=job_id, word=word, reason=reason, command=argv))
    return rows


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
    """Return the cluster's name from `scontrol show config`; empty where it is missing.

    Raises:
        LauncherError: the answer is not a name; it would become a part of URIs.
    """
    match = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    if match and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", match[1]):
        raise LauncherError(f"Slurm says that its cluster is called {match[1][:80]!r}: no name")
    return match[1] if match else ""


def first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return text.strip().partition("\n")[0]
