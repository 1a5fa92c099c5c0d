"""Writing checkpoints in a thread, while training continues."""

import errno
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError, TrainError
from ..runtime.process_group import Channel, RankGroup
from . import safetensors_file, store
from .planner import Planner, Staging
from .safetensors_file import TensorPart
from .store import Position, Proof, State

BESIDE_BYTES = 1 << 16
PAGE_BYTES = 4096
"""Disk space for everything except tensors: state, manifest, and room for the run's outcome. Each
rank's file takes one more page, as files fill whole pages."""


class _DiskFullError(CheckpointError):
    """A checkpoint could not be written because the disk is full."""


@dataclass(frozen=True, kw_only=True)
class SaveTiming:
    """How long a checkpoint took."""

    stall_s: float
    """Seconds for which training has been stalled since the previous checkpoint: the whole `save()`
    call, and waits for the checkpoint up to now."""
    total_s: float
    """Seconds until it was committed."""


@dataclass(frozen=True, kw_only=True)
class WriteFailure:
    """Why a write failed, as reported to other ranks."""

    text: str
    """The error message."""
    full: bool = False
    """Whether the disk is full."""

    @classmethod
    def of(cls, error: Exception) -> "WriteFailure":
        """Describe an exception."""
        if isinstance(error, OSError):
            return cls(text=str(error), full=error.errno in (errno.ENOSPC, errno.EDQUOT))
        return cls(text=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint on its way to the disk; `Checkpointer.save()` explains the other fields."""

    position: Position
    state: State
    parts: Sequence[TensorPart]
    """Tensor parts that this rank writes."""
    tensors: Sequence[Tensor]
    """Copies of these parts, taken at the time of the save."""
    problem: WriteFailure | None
    """Why the parts could not be copied."""
    needed_bytes: int
    """On rank 0: disk space for the files of all ranks."""
    started: float
    """When the save began, by the monotonic clock."""
    stall_s: float
    """How long the call kept training waiting."""
    make_room: Callable[[], str]
    may_go: Callable[[], str]
    may_commit: Callable[[], None]
    committed: Callable[[SaveTiming], None]


class Checkpointer:
    """Copies the contents of a checkpoint at once, and writes them in a thread; one at a time.

    All ranks call `save()` and `wait()` at the same steps. Before the thread ends, they agree
    whether the checkpoint was committed, so the next call raises on all ranks or on none.
    """

    def __init__(self, run_dir: Path, group: RankGroup, *, timeout_s: int = 600) -> None:
        """Connect the ranks' threads; all ranks do so at once, in their main thread."""
        self.run_dir = run_dir
        self._channel = Channel(group, timeout_s=timeout_s)
        self._planner, self._staging = Planner(self._channel), Staging()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Start of a wait outside of a save; end of the part of it that a commit has reported; and
        # the seconds that no commit has reported yet.
        self._waiting_since: float | None = None
        self._reported_until: float | None = None
        self._unreported_s = 0.0

    @cached_property
    def shared(self) -> bool:
        """Whether all ranks see one run directory; all ask at the same time, once it exists."""
        return self._channel.sees_one(self.run_dir)

    def save(
        self,
        position: Position,
        state: State,
        tensors: Mapping[str, Tensor],
        *,
        since: float | None = None,
        make_room: Callable[[], str] = str,
        may_go: Callable[[], str] = str,
        may_commit: Callable[[], None] = lambda: None,
        committed: Callable[[SaveTiming], None] = lambda timing: None,
    ) -> None:
        """Start a checkpoint of the current state; tensors may change as soon as this returns.

        Args:
            position: attempt and step of the checkpoint.
            state: everything in the checkpoint except tensors.
            tensors: this rank's; other ranks may have others, and other parts of the same DTensors.
            since: start of the stall (default: now), monotonic clock.
            make_room: called on rank 0, in the thread, when the disk is full: removes checkpoints
                that this one replaces, and returns their names.
            may_go: called on rank 0, in the thread, when that was not enough: names further
                checkpoints that a user could remove.
            may_commit: called on rank 0, in the thread, when all files are written; raises to
                prevent the commit.
            committed: called on rank 0, in the thread, after the commit.

        Raises:
            CheckpointError: on all ranks; the previous checkpoint could not be written.
            TrainError: on all ranks; raised by `may_commit` of the previous checkpoint.
        """
        started = time.monotonic() if since is None else since
        self._join()
        # If rank 0 must write for all ranks, no other rank need send it the parts it already has.
        shared = self.shared
        parts = self._planner.parts(tensors, evenly=shared)
        copies: Sequence[Tensor] = ()
        problem = None
        try:
            copies = self._staging.copy(parts, tensors)
        except (MemoryError, RuntimeError) as error:
            # The thread reports this to the other ranks: they would wait for a rank that left now.
            problem, parts = WriteFailure(text=f"cannot copy the tensors: {error}"), ()
        unreported_s, self._unreported_s = self._unreported_s, 0.0
        pending = PendingCheckpoint(
            position=position,
            state=state,
            parts=parts,
            tensors=copies,
            problem=problem,
            needed_bytes=(
                self._planner.total_bytes + BESIDE_BYTES + PAGE_BYTES * self._channel.size
            ),
            started=started,
            stall_s=time.monotonic() - started + unreported_s,
            make_room=make_room,
            may_go=may_go,
            may_commit=may_commit,
            committed=committed,
        )
        # A daemon thread: this process must be able to end even if another rank never answers.
        self._thread = threading.Thread(
            target=self._work, args=(pending, shared), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, *, for_next: bool = False) -> None:
        """Wait until nothing is being written; `for_next`: the next save reports the time.

        Raises:
            CheckpointError: on all ranks; the checkpoint could not be written, earlier ones are
                untouched.
            TrainError: on all ranks; raised by `may_commit`.
        """
        if for_next:
            self._join()
            return
        since, self._reported_until = time.monotonic(), None
        self._waiting_since = since
        try:
            self._join()
        finally:
            self._waiting_since = None
            self._unreported_s += time.monotonic() - (self._reported_until or since)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def leave(self, patience_s: float) -> None:
        """Give a checkpoint a last chance to be committed, before this process ends by an error."""
        if self._thread is not None:
            self._thread.join(patience_s)

    def _work(self, pending: PendingCheckpoint, shared: bool) -> None:
        try:
            self._error = self._try(pending, shared)
            if isinstance(self._error, _DiskFullError):
                removed = ""
                if self._channel.rank == 0:
                    # The other ranks wait for an answer even if this fails.
                    with suppress(OSError):
                        removed = pending.make_room()
                if removed := self._channel.broadcast(removed):
                    self._error = self._try(pending, shared, removed)
        except BaseException as error:
            self._error = error

    def _try(
        self, pending: PendingCheckpoint, shared: bool, removed: str = ""
    ) -> TrainError | None:
        """Write and commit; return the error, if any, on all ranks."""
        draft = pending.position.draft(self.run_dir)
        problem: WriteFailure | None = None
        error: TrainError | None = None
        if self._channel.rank == 0:
            if store.free_bytes(draft) < pending.needed_bytes:
                problem = WriteFailure(text="No space left on device", full=True)
            else:
                problem = _attempt(lambda: store.begin(draft))
            error = self._failure(pending, [(0, problem)], removed) if problem else None
        if error := self._channel.broadcast(error):
            return error
        files: dict[str, Proof] = {}
        if shared:
            problem = pending.problem or _attempt(
                lambda: files.update(self._write_own(pending, draft))
            )
        elif self._channel.rank == 0:
            problem = self._write_all(pending, draft, files)
        else:
            # Rank 0 has the directory that counts.
            self._channel.gather(pending.parts)
            for tensor in pending.tensors[: len(pending.parts)]:
                self._channel.send(tensor)
            problem = pending.problem
        reports = self._channel.gather((problem, files))
        if self._channel.rank == 0:
            error = self._commit(pending, draft, reports, removed)
        return self._channel.broadcast(error)

    def _write_own(self, pending: PendingCheckpoint, draft: Path) -> dict[str, Proof]:
        if not pending.parts:
            return {}
        name = store.tensor_file(self._channel.rank)
        return {name: safetensors_file.write(draft / name, pending.parts, pending.tensors)}

    def _write_all(
        self, pending: PendingCheckpoint, draft: Path, files: dict[str, Proof]
    ) -> WriteFailure | None:
        """Write every rank's file on rank 0, as its tensors arrive; return what failed."""
        described = self._channel.gather(pending.parts)
        problem = pending.problem or _attempt(lambda: files.update(self._write_own(pending, draft)))
        for rank, parts in enumerate(described[1:], start=1):
            arriving = (self._channel.receive(part.nbytes, rank) for part in parts)
            if parts and problem is None:
                name = store.tensor_file(rank)
                try:
                    files[name] = safetensors_file.write(draft / name, parts, arriving)
                except OSError as error:
                    problem = WriteFailure.of(error)
            # Receive the remaining parts even after a failure: their sender would hang otherwise.
            for _ in arriving:
                pass
        return problem

    def _commit(
        self,
        pending: PendingCheckpoint,
        draft: Path,
        reports: Sequence[tuple[WriteFailure | None, Mapping[str, Proof]]],
        removed: str,
    ) -> TrainError | None:
        """Turn the draft into a checkpoint if every rank succeeded; else remove it and say why."""
        problems = [(rank, problem) for rank, (problem, _) in enumerate(reports) if problem]
        files = {name: proof for _, own in reports for name, proof in own.items()}
        try:
            if not problems:
                store.write_manifest(draft, pending.state, files)
                pending.may_commit()
                store.commit(draft, pending.position.path(self.run_dir))
                now, waiting_since, stall_s = time.monotonic(), self._waiting_since, pending.stall_s
                if waiting_since is not None:
                    stall_s, self._reported_until = stall_s + now - waiting_since, now
                # The checkpoint exists now: failing to write the event to a full disk, or to remove
                # an old checkpoint, does not undo it.
                with suppress(OSError):
                    pending.committed(SaveTiming(stall_s=stall_s, total_s=now - pending.started))
                return None
        except TrainError as error:
            store.discard(draft)
            return error
        except Exception as error:
            problems = [(0, WriteFailure.of(error))]
        store.discard(draft)
        return self._failure(pending, problems, removed)

    def _failure(
        self, pending: PendingCheckpoint, problems: Sequence[tuple[int, WriteFailure]], removed: str
    ) -> CheckpointError:
        """Describe on rank 0 why the checkpoint failed."""
        alone = self._channel.size == 1
        reasons = [p.text if alone else f"rank {rank}: {p.text}" for rank, p in problems]
        full = any(problem.full for _, problem in problems)
        if full:
            free = store.free_bytes(pending.position.path(self.run_dir))
            room = f", {free:,} are free on that disk" if free < math.inf else ""
            reasons.append(f"it needs {pending.needed_bytes:,} bytes{room}")
            with suppress(OSError):
                reasons += [text for text in (pending.may_go(),) if text]
        reasons.append(removed or "earlier checkpoints are untouched")
        kind = _DiskFullError if full else CheckpointError
        return kind(
            f"cannot write checkpoint {pending.position.path(self.run_dir)}: {'; '.join(reasons)}"
        )


def _attempt(action: Callable[[], None]) -> WriteFailure | None:
    """Run an action; return its failure, if any, to report to other ranks."""
    try:
        action()
    except Exception as error:
        return WriteFailure.of(error)
    return None
