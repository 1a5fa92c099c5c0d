"""The start of an attempt on Slurm: its folder, and the end of the previous attempt.

Slurm counts the starts of a job; the folders count the attempts of the run, over all its jobs.
"""

import contextlib
import errno
import os
from typing import List, NamedTuple, Optional, Sequence

from .attempt import Attempt, Refused, folder_of
from .evidence import job_log
from .evidence.files import open_regular, read
from .evidence.job_log import JobLog
from .evidence.outcome import Outcome
from .schedulers.slurm import Slurm

RESERVE_BYTES = 65536
"""Disk space for the reason of an attempt that fills the disk."""

_LAST = ("done", "fatal", "cancelled", "no_progress", "gave_up")
"""Status words after which no job of a chain continues the run."""

KILLED = "killed soon after"
"""Suffix of a reason written in case Slurm kills the script before the end of its step."""


class NothingToDo(Exception):
    """The run that this job of a chain would continue has ended."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class Failed(Exception):
    """The attempt cannot begin. `logs`: its folder, if there is one."""

    def __init__(self, why: str, attempt: Optional[Attempt] = None) -> None:
        super().__init__(why)
        self.attempt = attempt


class Start(NamedTuple):
    """A start of a job, and the run that it belongs to."""

    run_dir: str
    mode: str
    """`continue`, `chain` or ""."""
    restarts: int
    """How often Slurm has queued this job again."""
    point: str
    """The name of this sweep point, or ""."""
    takes_turns: bool
    """Whether several jobs may continue the run in turn."""
    after: Optional[int] = None
    """The previous attempt of this job start, on the same nodes; None: none."""

    @property
    def follows(self) -> bool:
        """Whether this job has already made an attempt."""
        return self.restarts > 0 or self.after is not None


def log_from_here() -> JobLog:
    """Return the batch script's log from its current end; /dev/null without a log."""
    try:
        path = os.readlink("/proc/self/fd/2")
        if os.path.isfile(path):
            return JobLog(path, os.stat(path).st_size)
    except OSError:
        pass
    return JobLog(os.devnull, 0)


def restarts_of(slurm: Slurm) -> int:
    """Return how often Slurm has queued the job again.

    The count in the environment may belong to a job that called sbatch.
    """
    counted = slurm.environ.get("SLURM_RESTART_COUNT", "0")
    restarts = int(counted) if counted.isdigit() else 0
    return 0 if restarts and slurm.show_job().restarts == 0 else restarts


def open_batch_attempt(start: Start, log: JobLog) -> Attempt:
    """Make the folder of the next attempt.

    Raises:
        Refused: the directory holds a run, and `mode` does not say what to do with it.
        NothingToDo: this job of a chain has nothing to continue, or another start has taken over.
        Failed: the run directory was removed, or is full.
    """
    run_dir = start.run_dir
    number = 0
    while os.path.lexists(folder_of(run_dir, number)):
        number += 1
    if number and not start.follows and start.mode not in _modes(start):
        raise Refused(f"{run_dir} already holds a run; to go on with it: {_by_hand(start)}")
    before = folder_of(run_dir, number - 1)
    since = number  # the limits of retries count from this attempt on
    if start.follows:
        _require_previous_attempt(start, number, log)
        if start.after is not None and number != start.after + 1:
            raise NothingToDo(f"attempt {number - 1} has taken over", 1)
        since = _number_in(before + "/since", number - start.restarts)
    if start.mode == "chain":
        since = _continue_chain(run_dir, number, since)
    attempt = Attempt(run_dir, number, since)
    try:
        os.makedirs(os.path.join(run_dir, "logs"), exist_ok=True)
        os.mkdir(attempt.logs)
        if read(before + "/reason", 1) == "" and os.path.exists(before + "/reason"):
            _write(before + "/reason", f"fatal: no space was left for {run_dir}")
        attempt.write("since", str(since))
        attempt.write("log", f"{log.begin} {log.path}")
        with open(attempt.path("reserve"), "wb") as file:
            file.write(b" " * RESERVE_BYTES)
    except OSError as error:
        _remove(attempt.path("reserve"))
        raise Failed(_why_not(error, run_dir), attempt) from error
    _remove(before + "/reserve")
    return attempt


def _modes(start: Start) -> Sequence[str]:
    return ("continue", "chain") if start.takes_turns else ("continue",)


def _by_hand(start: Start) -> str:
    if not start.point:
        return f"sbatch FILE {start.run_dir} continue"
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "N")
    return f"sbatch --array={task} FILE {os.path.dirname(start.run_dir)} continue"


def _why_not(error: OSError, run_dir: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left for {run_dir}"
    return f"{run_dir}: {error.strerror}"


def _require_previous_attempt(start: Start, number: int, log: JobLog) -> None:
    """Refuse a run directory that was removed after an earlier start of this job.

    Slurm also counts a start that never reached the script, on a node that did not come up.
    """
    run_dir = start.run_dir
    if os.path.exists(folder_of(run_dir, number - 1) + "/since"):
        return
    if number or _says(log.path, b": attempt 0 on "):
        attempt = Attempt(run_dir, number, 0)
        os.makedirs(attempt.logs, exist_ok=True)
        raise Failed(
            f"{run_dir} was removed during the run; to begin at step 0: "
            f"sbatch FILE {run_dir} continue",
            attempt,
        )


def _says(path: str, words: bytes) -> bool:
    try:
        with open_regular(path) as file:
            return any(words in line for line in iter(lambda: file.readline(1 << 16), b""))
    except OSError:
        return False


def _continue_chain(run_dir: str, number: int, since: int) -> int:
    """Return the attempt from which limits count, in a chain of jobs."""
    before = folder_of(run_dir, number - 1)
    if os.path.exists(os.path.join(run_dir, "cancel_requested")):
        raise NothingToDo("cancelled; this job of the chain has nothing to do", 1)
    reason = read(before + "/reason", 4096).strip()
    if reason.partition(":")[0] in _LAST:
        status = read(before + "/exit_status", 100).strip()
        why = f"attempt {number - 1} was the last ({reason})"
        raise NothingToDo(
            f"{why}; this job of the chain has nothing to do",
            int(status) if status.isdigit() else 1,
        )
    return _number_in(before + "/since", since)


def _number_in(path: str, otherwise: int) -> int:
    text = read(path, 100).strip()
    return int(text) if text.lstrip("-").isdigit() else otherwise


def is_cancelled(start: Start, attempt: Attempt) -> bool:
    """Whether `toolkit cancel` has left a mark since the end of the previous attempt.

    The cancel signal may have arrived while the job was being queued again.
    """
    folders = [attempt.run_dir, *([os.path.dirname(attempt.run_dir)] if start.point else [])]
    before = folder_of(attempt.run_dir, attempt.number - 1)
    answered = read(before + "/reason", 100).startswith("cancelled:")
    for folder in folders:
        mark = os.path.join(folder, "cancel_requested")
        if start.follows and not answered and _newer(mark, before + "/since"):
            return True
        ended = before + "/exit_status"
        if (os.path.exists(ended) or start.mode != "continue") and _newer(mark, ended):
            return True
    return False


def withdraw_cancel(run_dir: str) -> None:
    """Remove the mark of an earlier cancellation, which the mode `continue` revokes."""
    _remove(os.path.join(run_dir, "cancel_requested"))


def _newer(path: str, than: str) -> bool:
    """Whether a file exists and is newer than another file, if that exists."""
    try:
        changed_ns = os.stat(path).st_mtime_ns
    except OSError:
        return False
    try:
        return changed_ns > os.stat(than).st_mtime_ns
    except OSError:
        return True


# ---- The previous attempt


def complete_previous(attempt: Attempt, slurm: Slurm, log: JobLog, outcome: Outcome) -> str:
    """Complete the records of the previous attempt; return its reason.

    Its script was killed or suspended before it wrote them. `outcome`: the record as it is now.
    """
    folder = folder_of(attempt.run_dir, attempt.number - 1)
    path = folder + "/reason"
    reason = read(path, 4096).strip()
    lines = _log_of(folder, log).read_on()
    cause = job_log.cause_of_end(lines)
    if not reason and cause in ("JOB", "PREEMPTION"):
        said = {
            "JOB": "requeued: by an operator",
            "PREEMPTION": "preempted: Slurm has taken the nodes",
        }
        reason = f"{said[cause]}; {KILLED}"
        _write(path, reason)
    if reason.endswith("; deciding"):
        reason = reason[: -len("deciding")] + KILLED
        _write(path, reason)
    killed = not reason or reason.endswith("; " + KILLED)
    if not reason or reason.startswith("terminated:"):
        reason = _after_a_kill(folder, reason, cause, slurm, lines)
    if killed:
        began = outcome.attempt == str(attempt.number - 1)
        counts = began or reason.partition(":")[0] not in ("preempted", "requeued", "fenced")
        save_step(folder, outcome.step if counts else "")
    return reason


def _after_a_kill(folder: str, reason: str, cause: str, slurm: Slurm, lines: Sequence[str]) -> str:
    """Return the reason for a script that was killed: the loss of a node, if one is down."""
    nodes = read(folder + "/nodes", 1 << 20).split()
    down: List[str] = slurm.down_nodes(",".join(nodes)) if nodes else []
    if not down and cause == "NODE":
        down = job_log.failed_nodes(lines)  # it may be back already
    if reason and not down:
        return reason
    named = "down: " + " ".join(down)
    if reason:
        reason = f"node_failure: {named}; killed before it could say so"
    else:
        reason = "lost: the batch script was killed" + (f"; {named}" if down else "")
    _write(folder + "/reason", reason)
    _write(folder + "/failing_node", "\n".join(down or nodes[:1]))
    return reason


def _log_of(folder: str, now: JobLog) -> JobLog:
    begin, _, path = read(folder + "/log", 4096).rstrip("\n").partition(" ")
    if not begin.isdigit():
        return JobLog(os.devnull, 0)
    return JobLog(path, int(begin), now.begin if path == now.path else None)


def save_step(folder: str, step: str) -> None:
    """Write the last step of an attempt, if known."""
    if step:
        _write(folder + "/step", step)
    else:
        _remove(folder + "/step")


def _write(path: str, line: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(line + "\n")
    except OSError:
        pass  # the disk may be full


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)
