"""A job as Slurm shows it, and the resulting status of a run."""

import re
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from toolkit.runs.records import log_reader, run_directory
from toolkit.runs.state import RunState, RunStatus
from toolkit.supervisor.evidence.cause import program_error

_STATES = {
    slurm_state: state
    for state, slurm_states in {
        RunState.PENDING: "CONFIGURING PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT",
        RunState.RUNNING: "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED",
        RunState.SUCCEEDED: "COMPLETED",
        RunState.PREEMPTED: "PREEMPTED TIMEOUT",
        RunState.CANCELLED: "CANCELLED",
        RunState.FAILED: "BOOT_FAIL DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY",
    }.items()
    for slurm_state in slurm_states.split()
}
"""Slurm's job states (squeue manual, JOB STATE CODES); all others are UNKNOWN.

TIMEOUT is PREEMPTED: the time limit also stops a run from outside, with a checkpoint.
"""

_EXPLANATIONS = {
    "AssocGrp.*|AssocMax.*|Max.*PerAccount": "a limit of your account is reached",
    "BadConstraints": "no node meets its requirements, so it never starts",
    "BeginTime": "its begin time has not been reached",
    "BurstBuffer.*": "waits for the burst buffer",
    "Cleaning": "the cleanup after its last start is running",
    "Dependency": "waits for other jobs",
    "DependencyNeverSatisfied": "its dependency ended differently, so it never starts",
    "InvalidAccount|InvalidQOS": "this account or QOS may not be used, so it never starts",
    "JobArrayTaskLimit": "the limit of points that run at once is reached",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; `scontrol release JOB_ID` releases it",
    "job requeued in held state": (
        "it was queued again and is held; `scontrol release JOB_ID` releases it"
    ),
    "JobHoldMaxRequeue|JobLaunchFailure|.*requeued held": (
        "it could not be started and is held; `scontrol release JOB_ID` tries again"
    ),
    "Licenses": "waits for licences",
    "NodeDown": "a required node is down",
    "PartitionConfig": "its partition cannot meet its requirements, such as the number of nodes",
    "PartitionDown|PartitionInactive": "its partition accepts no jobs now",
    "PartitionNodeLimit": "it requests more nodes than its partition allows, so it never starts",
    "PartitionTimeLimit": "it requests more time than its partition allows, so it never starts",
    "Priority": "other jobs have a higher priority",
    "QOSNotAllowed|QOSJobLimit|QOS.*Limit|QOSGrp.*|QOSMax.*": "a limit of the QOS is reached",
    "QOSUsageThreshold|QOSTimeLimit": "the QOS has no time left for it",
    "ReqNodeNotAvail.*": "a required node is down, drained or reserved",
    "Reservation": "its reservation has not started",
    "Resources": "waits for nodes to become free",
}
"""Slurm's reasons (squeue manual, JOB REASON CODES), for readers new to Slurm."""


_AFTER_REQUEUE = (
    "BeginTime: requeued; it starts within seconds, or after a lost node or a long epilog when its "
    "earlier credentials have expired (cred_expire, 120 s by default)"
)

WAITS_FOR_TURN = re.compile("Priority|Resources")
"""The reasons of jobs that only wait for their turn."""


class Place(NamedTuple):
    """The queue position of a pending job in its partition; 1 is next."""

    number: int
    of: int
    """Number of jobs that squeue shows; a site may hide those of other users (PrivateData)."""

    partition: str

    def __str__(self) -> str:
        return f"queue position {self.number} of {self.of} in partition {self.partition}"


class JobRow(NamedTuple):
    """A job, or a task of a job array, as squeue or sacct shows it."""

    job_id: str
    """`1234`, or `1234_7`; `1234` alone for all tasks that were cancelled before they started."""

    word: str
    """Slurm's job state."""

    reason: str
    """Why it waits or has ended; empty without a reason."""

    command: str
    """The script and, before Slurm 24.11, its arguments."""

    start: str = ""
    """Actual or expected start time, in ISO 8601 with an offset; empty if unknown."""

    @property
    def state(self) -> RunState:
        """The run state for Slurm's job state alone."""
        return _STATES.get(self.word, RunState.UNKNOWN)

    @property
    def whole(self) -> str:
        """The id of the job; for a task, the id of its array."""
        return self.job_id.partition("_")[0]

    @property
    def goes_on(self) -> bool:
        """Whether it may continue an earlier job of the run; Slurm 24.11 hides arguments."""
        return self.command == self.script or self.command.endswith((" continue", " chain"))

    @property
    def script(self) -> str:
        """The path of the batch script; it may contain blanks."""
        match = re.match(r"(.*?\.sbatch)(\s|$)", self.command, re.DOTALL)
        return match[1] if match else self.command.partition(" ")[0]


_LOG_BYTES = 1 << 16
_NO_VENV = (
    "; `venv` wants a folder made by `python -m venv`; for conda, write `environment: conda:NAME`"
)

_SCRIPT_WAS_KILLED = (
    "FAILED: the batch script was killed, or could not write why it ended; "
    "`toolkit resubmit` continues from the last checkpoint"
)
"""The reason of a FAILED job without an end recorded by its script."""

_KILLED_AT_ONCE = re.compile(r"JobLaunchFailure|RaisedSignal:.*")
"""Slurm's reasons for a script ended by a signal, and (as signal 53) whose log it could not open.

The first one is that of Slurm before 24.11, and also of a script that Slurm could not start."""


def status_of(
    row: JobRow, run_dir: Path | None, *, after: str = "", place: Place | None = None
) -> RunStatus:
    """Combine Slurm's state with the outcome in the run directory.

    Args:
        row: The job.
        run_dir: The run directory, if this machine can see it.
        after: The dependency that was passed to sbatch.
        place: Its queue position, if it is known.
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
        reason = "never started"  # Slurm still shows the reason for waiting
    elif state is RunState.CANCELLED and run_dir is not None:
        written = run_directory.newest_reason(run_dir)
        if written.word == "cancelled":
            reason = written.text
        elif not reason or in_words(reason) != reason:  # cancelled while it was waiting
            who = "toolkit cancel" if run_directory.cancel_requested(run_dir) else "scancel"
            reason = f"cancelled: by {who}"
    elif state is RunState.PENDING and reason == "BeginTime" and _began(run_dir):
        reason = _AFTER_REQUEUE
    elif state is RunState.PENDING:
        reason = in_words(reason)
    elif row.word in ("SUSPENDED", "STOPPED"):
        reason = f"{row.word}: `scontrol resume {row.job_id}` resumes it"
    if state is RunState.PENDING:
        last = run_directory.last_reason(run_dir) if run_dir is not None else ""
        queue = str(place or "")
        reasons = [reason, queue, expected(row.start), last and f"last attempt: {last}"]
        text = "; ".join(filter(None, reasons))
        number = place.number if place else None
        return RunStatus(state=state, reason=text, expected_start=row.start, place_in_queue=number)
    if state is RunState.PREEMPTED and run_dir is not None:
        ended = run_directory.ended_status(run_dir)
        if ended.state is RunState.SUCCEEDED:
            return ended  # the time limit or preemption grace expired just at its end
    if state is RunState.FAILED and run_dir is not None and not run_dir.is_dir():
        reason = f"{reason}: {run_dir} is gone"  # Slurm could not even open the log
    elif state is RunState.FAILED and run_dir is not None:
        ended = run_directory.ended_status(run_dir)
        word = run_directory.newest_reason(run_dir).word
        if ended.state is RunState.SUCCEEDED and word != "done":
            return ended  # torchrun failed, or was stopped, after the last step
        if row.word == "FAILED" and run_directory.ended_silently(run_dir):
            full = run_directory.reason_did_not_fit(run_dir)
            said = f"FAILED: no space was left for {run_dir}" if full else _SCRIPT_WAS_KILLED
            return RunStatus(state=state, reason=said)
        if not run_directory.has_attempts(run_dir) and (error := _error_of_script(run_dir)):
            return RunStatus(state=state, reason=f"fatal: the script ended at once: {error}")
        if _KILLED_AT_ONCE.fullmatch(reason) and _awaits_a_start(run_dir):
            killed = (
                "FAILED: the batch script ended before its first line, by a signal, or because its "
                f"node could not open its log ({reason}); `toolkit resubmit` starts it again"
            )
            return RunStatus(state=state, reason=killed)
        by_slurm = word == "terminated" and row.word != "FAILED"  # as for a lost node
        if ended.state in (RunState.PREEMPTED, RunState.CANCELLED) and not by_slurm:
            return ended
        if ended.state is RunState.FAILED or by_slurm:
            word = "" if row.word == "FAILED" else row.word
            reason = ": ".join(filter(None, [word, word and reason, ended.reason]))
    return RunStatus(state=state, reason=reason if state is not RunState.SUCCEEDED else "")


def _awaits_a_start(run_dir: Path) -> bool:
    """Whether the job's last start has left nothing: no attempt, or one that was queued again."""
    last = run_directory.newest_reason(run_dir).text
    return not run_directory.has_attempts(run_dir) or "; queued again" in last


def _error_of_script(run_dir: Path) -> str:
    """Return the error of a program or the shell from the log of a job without an attempt."""
    span = log_reader.Span(path=run_dir / "logs/job.log", below=run_dir)
    try:
        lines = log_reader.end_of(span, _LOG_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    error = program_error(lines)
    is_no_venv = "bin/activate: No such file" in error
    return error + (_NO_VENV if is_no_venv else "")


def _began(run_dir: Path | None) -> bool:
    return run_dir is not None and run_directory.has_attempts(run_dir)


def in_words(reason: str) -> str:
    """Return Slurm's reason, with an explanation if it needs one.

    >>> in_words("Priority")
    'Priority: other jobs have a higher priority'
    >>> in_words("Nodes required for job are DOWN")
    'Nodes required for job are DOWN'
    """
    for pattern, explanation in _EXPLANATIONS.items():
        if re.fullmatch(pattern, reason):
            return f"{reason}: {explanation}"
    return reason


def expected(start: str, *, now: datetime | None = None) -> str:
    """Return when a job is expected to start, or "" if the time is unknown or past.

    The time is shown in this machine's time zone; a time without an offset is assumed to be in it.

    >>> expected("2026-11-05T14:05:00", now=datetime(2026, 11, 5, 13, 0))
    'expected to start 14:05'
    >>> expected("2026-11-06T09:00:00", now=datetime(2026, 11, 5, 13, 0))
    'expected to start Nov 6 09:00'
    """
    try:
        at = datetime.fromisoformat(start).astimezone()
    except (ValueError, OverflowError):
        return ""
    now = (now or datetime.now()).astimezone()
    if at <= now:
        return ""
    day = "" if at.date() == now.date() else f"{at:%b} {at.day} "
    return f"expected to start {day}{at:%H:%M}"
