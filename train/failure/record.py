"""Recording and reporting a failure of the run.

Each machine reports to people once. Each rank also reports to torchrun, through its error file:
torchrun prints these files at its end, and takes the earliest one for the root cause.
"""

import dataclasses
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import (
    EXIT_FAILED,
    CheckpointError,
    FencedError,
    NonFiniteLoss,
    PeerError,
    ProofError,
    ReplicaError,
    TrainError,
    is_collateral,
    may_pass,
)
from ..rundir import untrusted
from ..rundir.files import RunDirectory, TrainingProgress
from ..runtime.rank import RankInfo

if TYPE_CHECKING:
    from ..tasks.base import Task

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ECHO_S = 10
"""An echo is dated this much later, so that its cause comes first: torchrun counts in seconds, and
dates a killed rank by the time when it notices the end of the process."""

_AGREED = (NonFiniteLoss, FencedError, CheckpointError, ProofError, ReplicaError)
"""Errors that all ranks raise together."""
_kept: list[BaseException] = []


def fail(
    error: BaseException,
    directory: RunDirectory,
    task: "Task | None",
    progress: TrainingProgress | None,
    *,
    claimed: bool = True,
) -> int:
    """Record and report a failure; return the exit status.

    `claimed`: the directory is ours; before that, it may belong to another process's run.
    """
    # Import this late, as it imports torch.
    from .diagnose import explain, in_short, is_ours_alone

    # The traceback's frames hold tensors that DDP has given to gloo. Freeing them may deadlock: a
    # thread that still uses them waits for the GIL meanwhile.
    _kept.append(error)
    rank_info = directory.rank_info
    if rank_info.world_size > 1 and is_collateral(error) and not is_ours_alone(error):
        text = lost(error, progress)
        reason = str(error) if isinstance(error, PeerError) else text
        record(directory, progress, "retryable", reason, rank=rank_info.rank, claimed=claimed)
        tell_echo(rank_info, text)
        return EXIT_FAILED
    status = "retryable" if may_pass(error) else "fatal"
    if isinstance(error, TrainError):
        # All ranks raise these errors at the same step: none is the cause, and rank 0 records it.
        agreed = isinstance(error, _AGREED)
        if not isinstance(error, FencedError) and not (agreed and rank_info.rank != 0):
            rank = None if agreed else rank_info.rank
            record(directory, progress, status, str(error), rank=rank, claimed=claimed)
        tell(rank_info, str(error))
        return error.exit_status
    if problem := unwritable(error, directory.path):
        record(directory, progress, status, problem, rank=rank_info.rank, claimed=claimed)
        tell(rank_info, problem)
        return EXIT_FAILED
    text = explain(error, task, progress)
    summary = f"{in_short(error)}\n{text}"
    reason = summary.replace("\n", "; ")
    record(directory, progress, status, reason, rank=rank_info.rank, claimed=claimed)
    tell(rank_info, text, trace="".join(traceback.format_exception(error)), summary=summary)
    return EXIT_FAILED


def report(error: BaseException, rank_info: RankInfo, task: "Task | None") -> int:
    """Report a failure of a process that records nothing; return the exit status."""
    from .diagnose import explain, in_short, is_ours_alone

    _kept.append(error)
    if rank_info.world_size > 1 and is_collateral(error) and not is_ours_alone(error):
        cause = str(error) if isinstance(error, PeerError) else "another rank went away"
        tell_echo(rank_info, f"ends because of others: {cause}; start again")
        return EXIT_FAILED
    if isinstance(error, TrainError):
        tell(rank_info, str(error))
        return error.exit_status
    text = explain(error, task, None)
    summary = f"{in_short(error)}\n{text}"
    tell(rank_info, text, trace="".join(traceback.format_exception(error)), summary=summary)
    return EXIT_FAILED


def lost(error: BaseException, progress: TrainingProgress | None) -> str:
    """Describe the loss of another rank, as seen by this one."""
    if isinstance(error, PeerError):
        return f"ends because of others: {error}"
    moment = "before the first step"
    if progress is not None:
        moment = f"while this one was at step {progress.step + 1} of {progress.steps}"
    raw = " ".join(str(error).split())
    return (
        f"another rank went away {moment} (its own output says why, or its node's); start again to "
        f"continue from the newest checkpoint [{raw}]"
    )


def unwritable(error: BaseException, run_dir: Path) -> str:
    """Describe the problem with a file in the run directory, if that is the cause; else ''."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return ""
    if not Path(error.filename).is_relative_to(run_dir):
        return ""
    return (
        f"cannot use {error.filename}: {error.strerror}; complete checkpoints are "
        "untouched: fix this, then start again"
    )


def record(
    directory: RunDirectory,
    progress: TrainingProgress | None,
    status: str,
    reason: str,
    *,
    rank: int | None,
    claimed: bool = True,
) -> None:
    """Record a failure: `retryable` if another start may succeed, else `fatal`."""
    old = directory.read_outcome()
    if progress is None:
        progress = TrainingProgress(steps=0)
    if progress.step == 0 and old:
        progress.step, progress.samples_seen = old.step, old.samples_seen
    outcome = dataclasses.replace(
        progress.outcome(directory.rank_info, status, reason, rank=rank),
        steps=progress.steps or None,
    )
    # A missing directory (another node's) or a full disk must not hide the error itself.
    with suppress(OSError, TrainError):
        if not directory.write_outcome(outcome, early=not claimed) and not claimed:
            return
    with suppress(OSError, TrainError):
        directory.event("error", step=outcome.step, status=outcome.status, reason=outcome.reason)


def tell(rank_info: RankInfo, text: str, *, trace: str = "", summary: str = "") -> None:
    """Print an error, unless another rank of this machine has; report to torchrun in any case.

    Args:
        rank_info: the rank that has the error.
        text: the message.
        trace: a traceback to print before the message, for an error of this rank.
        summary: the message for torchrun, if it differs from the text.
    """
    reporter = _first_reporter(rank_info, text, own=bool(trace))
    if not reporter:
        _print(rank_info, text, own=bool(trace), trace=trace)
    tell_torchrun(f"the same as {reporter}" if reporter else summary or text, echo=bool(reporter))


def tell_echo(rank_info: RankInfo, text: str) -> None:
    """Print and report an error that is only the echo of another rank's."""
    if not _first_reporter(rank_info, "echo", own=True):
        _print(rank_info, text, own=True)
    tell_torchrun(text, echo=True)


def tell_torchrun(text: str, *, echo: bool = False) -> None:
    """Leave a text for torchrun's report; an echo is never its root cause."""
    if not (error_file := os.environ.get(ERROR_FILE)):
        return
    date = int(time.time()) + (ECHO_S if echo else 0)
    record = {"message": {"message": text, "extraInfo": {"timestamp": str(date)}}}
    with suppress(OSError):
        Path(error_file).write_text(json.dumps(record), encoding="utf-8")


def _print(rank_info: RankInfo, text: str, *, own: bool, trace: str = "") -> None:
    origin = ""
    if own and rank_info.world_size > 1:
        origin = f"rank {rank_info.rank}: "
    elif rank_info.rank != rank_info.local_rank:
        origin = f"on {socket.gethostname()}: "
    # Use one write: otherwise ranks that share a terminal would mix their lines.
    print(f"{trace}train: {origin}{text}\n", end="", file=sys.stderr, flush=True)


def _first_reporter(rank_info: RankInfo, text: str, *, own: bool) -> str:
    """Return the rank of this machine that has already reported the same; empty for none."""
    common = _common_path(rank_info)
    if common is None:
        # Ranks cannot see each other's reports: rank 0 reports an error of all ranks.
        return "" if own or rank_info.rank == 0 else "rank 0"
    note = common.with_name(f"{common.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    try:
        with note.open("x", encoding="utf-8") as file:
            file.write(f"rank {rank_info.rank}")
    except FileExistsError:
        with suppress(OSError):
            name = untrusted.read_bytes(note, limit=100).decode("utf-8", "replace")
            return name or "another rank"
        return "another rank"
    except OSError:
        pass  # reporting twice is better than never
    return ""


def _common_path(rank_info: RankInfo) -> Path | None:
    """Find a path that only the ranks of this machine share in this try."""
    if error_file := os.environ.get(ERROR_FILE):
        own = Path(error_file).parent
        # torchrun's FOLDER/attempt_0/LOCAL_RANK/error.json. When attempt_0 was changed last tells
        # others when these ranks have begun: nothing is added to it.
        start = own.parent
        return (
            start.with_name(f"said-{start.name}") if own.name == str(rank_info.local_rank) else None
        )
    if rank_info.meeting and rank_info.meeting.startswith("file://"):
        return Path(rank_info.meeting.removeprefix("file://")).with_name("said")
    return None
