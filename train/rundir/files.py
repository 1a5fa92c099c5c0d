"""Events, metrics and outcome; their format: `docs/reference/run-directory.md`."""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..runtime.rank import RankInfo
from . import untrusted
from .jsonl import Journal, MetricsLog, dump
from .tensorboard import EventFile

VERSION = 1
LOCK_WITHIN_S = 10.0
"""Timeout for the lock of the outcome; only a hanging process holds it for longer."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The contents of `outcome.json`: the status of the run."""

    status: str
    """`running`, `done`, `preempted`, `retryable` or `fatal`."""
    attempt: int
    """The scheduler's attempt that wrote this."""
    restart: int
    """torchrun's restart within the attempt."""
    step: int
    """Optimizer steps made."""
    steps: int | None
    """Optimizer steps the run has in all; null when it failed before that was known."""
    samples_seen: int
    """Training samples drawn; the whole state of the data order."""
    rank: int | None
    """The rank that failed; null when none did."""
    reason: str
    """The reason for the status, for people."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last loss and the last evaluation."""

    @property
    def try_number(self) -> tuple[int, int]:
        """Attempt and restart: a later try has a higher number."""
        return self.attempt, self.restart


@dataclass(kw_only=True)
class TrainingProgress:
    """Progress of a run: everything that changes from step to step, except tensors."""

    steps: int
    """Optimizer steps the run has in all."""
    step: int = 0
    """Optimizer steps made."""
    samples_seen: int = 0
    """Training samples drawn; the whole state of the data order."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last loss and the last evaluation."""

    def outcome(
        self, rank_info: RankInfo, status: str, reason: str, *, rank: int | None = None
    ) -> Outcome:
        """Describe the current state of the run."""
        return Outcome(
            status=status,
            attempt=rank_info.attempt,
            restart=rank_info.restart,
            step=self.step,
            steps=self.steps,
            samples_seen=self.samples_seen,
            rank=rank,
            reason=reason,
            metrics=dict(self.metrics),
        )


class RunDirectory:
    """The run directory as one process reads and writes it."""

    def __init__(self, path: Path, rank_info: RankInfo) -> None:
        self.path, self.outcome_path = path, path / "outcome.json"
        self.rank_info = rank_info
        # Whether another process has taken the directory from us: see `train.rundir.lock`.
        self.taken_over: Callable[[], bool] = lambda: False
        self._tried = {"attempt": rank_info.attempt, "restart": rank_info.restart}
        self._events = Journal(path / "events.jsonl")
        self._metrics = MetricsLog(path / "metrics.jsonl", {"version": VERSION, **self._tried})
        # Of rank 0, from when it is known which step comes first.
        self.event_file: EventFile | None = None

    def event(self, event: str, *, step: int, **details: object) -> None:
        """Append to `events.jsonl`; only rank 0 does."""
        if self.rank_info.rank == 0:
            self.flush()
            record = {"version": VERSION, "time": time.time(), **self._tried, "event": event}
            self._events.append(dump({**record, "step": step, **details}))

    def metric(self, *, step: int, **values: float) -> None:
        """Append to `metrics.jsonl`, if need be a moment later; only rank 0 does."""
        if self.rank_info.rank == 0:
            self._metrics.note({"step": step, **values})
            if self.event_file:
                self.event_file.note(step, values)

    def flush(self) -> None:
        """Write the metrics that `metric()` still holds back."""
        self._metrics.flush()

    def other_version(self) -> str:
        """Return why the outcome must stay as it is: another version wrote it; '' if none did."""
        try:
            record = untrusted.read_object(self.outcome_path)
        except (OSError, ValueError):
            return ""
        if untrusted.is_of_version(record, VERSION):
            return ""
        shown = untrusted.shown_version(record)
        return f"{self.outcome_path} is of {shown}, and this program writes {VERSION}"

    def read_outcome(self) -> Outcome | None:
        """Read the outcome; None if it is missing, unreadable or of another version."""
        try:
            record = untrusted.read_object(self.outcome_path)
            if not untrusted.is_of_version(record, VERSION):
                return None
            steps, rank = record["steps"], record["rank"]
            metrics = untrusted.mapping(record.get("metrics", {})).items()
            return Outcome(
                status=untrusted.text(record["status"]),
                attempt=untrusted.whole(record["attempt"]),
                restart=untrusted.whole(record["restart"]),
                step=untrusted.whole(record["step"]),
                steps=None if steps is None else untrusted.whole(steps),
                samples_seen=untrusted.whole(record["samples_seen"]),
                rank=None if rank is None else untrusted.whole(rank),
                reason=untrusted.text(record["reason"]),
                metrics={untrusted.printable(k): untrusted.number(v) for k, v in metrics},
            )
        except (OSError, ValueError, KeyError):
            return None

    def write_outcome(self, outcome: Outcome, *, early: bool = False) -> bool:
        """Replace the outcome atomically if `may_replace()`; return whether it was replaced.

        `early`: the directory was not claimed before; the outcome is replaced if `may_forestall()`.
        """
        allowed = may_forestall if early else may_replace
        with self._locked():
            if self.taken_over() or self.other_version():
                return False
            if not allowed(self.read_outcome(), outcome):
                return False
            self._replace_outcome(outcome)
        return True

    def outcome_after(
        self, old: Outcome | None, status: str, reason: str, *, steps: int | None
    ) -> Outcome:
        """Describe the run with the progress that an earlier outcome records, if there is one."""
        progress = TrainingProgress(steps=0)
        if old:
            progress.step, progress.samples_seen = old.step, old.samples_seen
        return replace(progress.outcome(self.rank_info, status, reason), steps=steps)

    def advance(self, outcome: Outcome) -> bool:
        """Record how far this try has come; False if a later one has taken over.

        A failure that a rank of this try has recorded stays.
        """
        with self._locked():
            if self.superseded():
                return False
            old = self.read_outcome()
            if old is None or old.status == "running" or old.try_number < outcome.try_number:
                self._replace_outcome(outcome)
        return True

    def superseded(self) -> bool:
        """Whether a later try, or a later start of the same one, has taken over."""
        old = self.read_outcome()
        mine = self.rank_info.attempt, self.rank_info.restart
        replaced = (old is not None and old.try_number > mine) or bool(self.other_version())
        return replaced or self.taken_over()

    def _replace_outcome(self, outcome: Outcome) -> None:
        record = {"version": VERSION, **asdict(outcome), "time": time.time()}
        write_atomically(self.outcome_path, dump(record, indent=2) + "\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process of this node at a time compare and replace the outcome."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Continue without the lock if it stays taken: a writer holds it for milliseconds, but a
            # hanging attempt may hold it forever, and some network file systems support no locks.
            until_s = time.monotonic() + LOCK_WITHIN_S
            with suppress(OSError):
                while time.monotonic() < until_s:
                    with suppress(BlockingIOError):
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)


def may_replace(old: Outcome | None, new: Outcome) -> bool:
    """Whether an outcome may replace another.

    An older attempt never replaces the outcome of a newer one. Within one try the first genuine
    failure is kept: later reports of other ranks are its echoes. Starting (`running`) replaces any
    outcome of the same attempt, and `done` replaces a failure of the same try: all steps were made.
    """
    if old is None:
        return True
    if old.attempt > new.attempt:
        return False
    same_try = old.try_number == new.try_number
    if same_try and old.status == "fatal":
        return new.status in ("running", "done")
    if same_try and old.status in ("done", "preempted", "retryable") and new.status == "retryable":
        return False
    return not (old.try_number > new.try_number and new.status in ("retryable", "fatal"))


def may_forestall(old: Outcome | None, new: Outcome) -> bool:
    """Whether an end before the claim of the directory may be recorded.

    The directory may belong to another process's run, and a mistyped flag must not write an end
    into that run's outcome. So only the outcome of an earlier try is replaced. The scheduler counts
    attempts, but torchrun counts restarts from 0 in any directory. So a `running` of this attempt
    may belong to another process, and only a stop request replaces that.
    """
    if old is None:
        return True
    if old.status == "done" or old.try_number >= new.try_number:
        return False
    return old.attempt < new.attempt or old.status != "running" or new.status == "preempted"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that readers see the old text or the new one, even after a kill."""
    draft = draft_of(path)
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def draft_of(path: Path) -> Path:
    """Return the temporary name of a file that will replace another one.

    Threads, ranks and machines may write the same file at once, so each gets a unique name.
    """
    host = socket.gethostname()
    return path.with_name(f".{path.name}.{host}.{os.getpid()}.{time.monotonic_ns()}.tmp")


def read_lines(path: Path) -> list[dict[str, object]]:
    """Read `events.jsonl` or `metrics.jsonl`; a missing file is empty.

    Torn lines and lines of another version are skipped.
    """
    lines = untrusted.read_lines(path)
    return [line for line in lines if untrusted.is_of_version(line, VERSION)]
