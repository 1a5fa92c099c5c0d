"""What a rank does when its run fails: record it, and say it."""

from __future__ import annotations

import dataclasses
import traceback
from contextlib import suppress
from pathlib import Path

from train.errors import (
    EXIT_FAILED,
    CheckpointError,
    FencedError,
    NonFiniteLoss,
    PeerError,
    TrainError,
    is_collateral,
)
from train.failure.diagnose import describe, is_note, part_of
from train.failure.report import tell, tell_echo
from train.rundir.files import RunDirectory, TrainingProgress
from train.tasks.base import Task


def fail(
    error: BaseException,
    directory: RunDirectory,
    task: Task | None,
    progress: TrainingProgress | None,
) -> int:
    """Record a failure and say it; give the exit status."""
    # With the frames of its traceback, and what they hold. To free what DDP has given to gloo may
    # wait for ever: a thread that still has it waits for Python's lock meanwhile.
    _kept.append(error)
    rank_info = directory.rank_info
    if rank_info.world_size > 1 and is_collateral(error) and not is_ours_alone(error):
        text = lost(error, progress)
        reason = str(error) if isinstance(error, PeerError) else text
        record(directory, progress, "retryable", reason, rank=rank_info.rank)
        tell_echo(rank_info, text)
        return EXIT_FAILED
    if isinstance(error, TrainError):
        # All ranks raise this one at the same step: none of them is the culprit, and rank 0 writes.
        agreed = isinstance(error, (NonFiniteLoss, FencedError, CheckpointError))
        if not isinstance(error, FencedError) and not (agreed and rank_info.rank != 0):
            rank = None if agreed else rank_info.rank
            record(directory, progress, "fatal", str(error), rank=rank)
        tell(rank_info, str(error))
        return error.exit_status
    if problem := unwritable(error, directory.path):
        record(directory, progress, "fatal", problem, rank=rank_info.rank)
        tell(rank_info, problem)
        return EXIT_FAILED
    text = explain(error, task, progress)
    summary = f"{in_short(error)}\n{text}"
    record(directory, progress, "fatal", summary.replace("\n", "; "), rank=rank_info.rank)
    tell(rank_info, text, trace="".join(traceback.format_exception(error)), summary=summary)
    return EXIT_FAILED


def explain(error: BaseException, task: Task | None, progress: TrainingProgress | None) -> str:
    """Return a line about the failure; an error of the diagnosis must not hide it."""
    with suppress(Exception):
        return describe(error, task, progress)
    return "the run failed"


def is_ours_alone(error: BaseException) -> bool:
    """Say whether an error that looks like another rank's has come up where only this one works."""
    with suppress(Exception):
        return part_of(error).alone
    return False


_kept: list[BaseException] = []


def lost(error: BaseException, progress: TrainingProgress | None) -> str:
    """Say what a rank knows when another one has gone."""
    if isinstance(error, PeerError):
        return f"ends because of others: {error}"
    moment = "before the first step"
    if progress is not None:
        moment = f"while this one was at step {progress.step + 1} of {progress.steps}"
    raw = " ".join(str(error).split())
    return (
        f"another rank went away {moment} (its own output says why, or its node's); start again to "
        f"go on from the newest checkpoint [{raw}]"
    )


def unwritable(error: BaseException, run_dir: Path) -> str:
    """Return the fault of a file of the run directory, if the error concerns one."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return ""
    if not Path(error.filename).is_relative_to(run_dir):
        return ""
    return (
        f"cannot use {error.filename}: {error.strerror}; whole checkpoints are untouched, start "
        "again when this is mended"
    )


def in_short(error: BaseException) -> str:
    """Give an exception's type and message; of a process that reads ahead, those of its own."""
    text = f"{type(error).__name__}: {error}"
    if not text.partition(": ")[2].startswith("Caught "):
        return text
    return [line for line in text.splitlines() if line and not is_note(line)][-1]


def record(
    directory: RunDirectory,
    progress: TrainingProgress | None,
    status: str,
    reason: str,
    *,
    rank: int | None,
) -> None:
    """Record a failure: `fatal` for a cause, `retryable` for the echo of one elsewhere."""
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
        directory.write_outcome(outcome)
    with suppress(OSError, TrainError):
        directory.event("error", step=outcome.step, status=outcome.status, reason=outcome.reason)
