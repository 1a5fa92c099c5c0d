"""Writing checkpoints behind the back of training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from torch import Tensor

from train.checkpoints import safetensors_file, store
from train.checkpoints.job import Job, Timing, WriteFailure, room_beside
from train.checkpoints.planner import Planner
from train.checkpoints.process_group import Channel
from train.checkpoints.staging import Staging
from train.checkpoints.store import Position, Proof, State
from train.errors import CheckpointError, TrainError
from train.runtime.process_group import RankGroup


class Checkpointer:
    """Copies what a checkpoint holds at once, and writes it in a thread; one at a time.

    All ranks call `save()` and `wait()` at the same steps. Whether a checkpoint was committed they
    agree on before the thread ends, so the next call raises the same on all of them or on none.
    """

    def __init__(self, run_dir: Path, group: RankGroup, *, timeout_s: int = 600) -> None:
        """Connect the ranks' threads; all ranks do so at once, in their main thread."""
        self.run_dir = run_dir
        self._channel = Channel(group, timeout_s=timeout_s)
        self._planner, self._staging = Planner(self._channel), Staging()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Since when training waits outside of a save; up to when a commit has reported that; and
        # bytes that are not reported yet.
        self._waiting_since: float | None = None
        self._told_until: float | None = None
        self._untold_s = 0.0

    @cached_property
    def shared(self) -> bool:
        """Whether all ranks see one run directory; asked by all at once, once it exists."""
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
        committed: Callable[[Timing], None] = lambda timing: None,
    ) -> None:
        """Begin a checkpoint of this moment; tensors may change as soon as this returns.

        Args:
            position: where it shall lie.
            state: its content besides tensors.
            tensors: this rank's; other ranks may have others, and other parts of the same DTensors.
            since: from when on training stands still for it (default: now), monotonic clock.
            make_room: called on rank 0, in the thread, when the disk is full: removes the
            checkpoints that this one makes superfluous, and returns them.
            may_go: called on rank 0, in the thread, when that was not enough: names those that
            could be removed.
            may_commit: called on rank 0, in the thread, when all is written; raises to prevent it.
            committed: called on rank 0, in the thread, when it is a checkpoint.

        Raises:
            CheckpointError: on all ranks; the one before could not be written.
            TrainError: on all ranks; what its `may_commit` raised.
        """
        started = time.monotonic() if since is None else since
        self._join()
        # Where rank 0 must write for all, what it has itself need not be sent.
        shared = self.shared
        parts = self._planner.parts(tensors, evenly=shared)
        copies: Sequence[Tensor] = ()
        problem = None
        try:
            copies = self._staging.copy(parts, tensors)
        except (MemoryError, RuntimeError) as error:
            # Known to the others soon: a rank that left now would leave them waiting.
            problem, parts = WriteFailure(text=f"cannot copy the tensors: {error}"), ()
        untold_s, self._untold_s = self._untold_s, 0.0
        job = Job(
            position=position,
            state=state,
            parts=parts,
            tensors=copies,
            problem=problem,
            needed_bytes=self._planner.total_bytes + room_beside(self._channel.size),
            started=started,
            stall_s=time.monotonic() - started + untold_s,
            make_room=make_room,
            may_go=may_go,
            may_commit=may_commit,
            committed=committed,
        )
        # A daemon: if another rank never answers, this process must end all the same.
        self._thread = threading.Thread(
            target=self._work, args=(job, shared), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, *, for_next: bool = False) -> None:
        """Wait until nothing is being written.

        Args:
            for_next: a save follows whose `since` was before this; it reports the time.

        Raises:
            CheckpointError: on all ranks; it could not be written, earlier ones are untouched.
            TrainError: on all ranks; what its `may_commit` raised.
        """
        if for_next:
            self._join()
            return
        since, self._told_until = time.monotonic(), None
        self._waiting_since = since
        try:
            self._join()
        finally:
            self._waiting_since = None
            self._untold_s += time.monotonic() - (self._told_until or since)

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

    def _work(self, job: Job, shared: bool) -> None:
        try:
            self._write(job, shared)
        except BaseException as error:
            self._error = error

    def _write(self, job: Job, shared: bool) -> None:
        verdict, full = self._try(job, shared)
        if full:
            gone = ""
            if self._channel.rank == 0:
                # The others wait for an answer, also if it fails.
                with suppress(OSError):
                    gone = job.make_room()
            if gone := self._channel.broadcast(gone):
                verdict, _ = self._try(job, shared, gone)
        if verdict is not None:
            raise verdict

    def _try(self, job: Job, shared: bool, gone: str = "") -> tuple[TrainError | None, bool]:
        """Write and commit; say on all ranks why not, and whether for want of room."""
        draft = job.position.draft(self.run_dir)
        refused: tuple[TrainError, bool] | None = None
        if self._channel.rank == 0 and (problem := self._prepare(job, draft)):
            refused = self._failure(job, [(0, problem)], gone), problem.full
        if refused := self._channel.broadcast(refused):
            return refused
        files: dict[str, Proof] = {}
        if shared:
            problem = job.problem or _attempt(lambda: files.update(self._write_own(job, draft)))
        elif self._channel.rank == 0:
            problem = self._write_all(job, draft, files)
        else:
            self._send_own(job)
            problem = job.problem
        reports = self._channel.gather((problem, files))
        ending: tuple[TrainError | None, bool] = (None, False)
        if self._channel.rank == 0:
            ending = self._commit(job, draft, reports, gone)
        return self._channel.broadcast(ending)

    def _prepare(self, job: Job, draft: Path) -> WriteFailure | None:
        """Make a directory for the draft, if it has room."""
        if store.free_bytes(draft) < job.needed_bytes:
            return WriteFailure(text="No space left on device", full=True)
        return _attempt(lambda: store.begin(draft))

    def _write_own(self, job: Job, draft: Path) -> dict[str, Proof]:
        if not job.parts:
            return {}
        name = store.tensor_file(self._channel.rank)
        return {name: safetensors_file.write(draft / name, job.parts, job.tensors)}

    def _send_own(self, job: Job) -> None:
        """Send this rank's tensors to rank 0, which has the directory that counts."""
        self._channel.gather(job.parts)
        for tensor in job.tensors[: len(job.parts)]:
            self._channel.send(tensor)

    def _write_all(self, job: Job, draft: Path, files: dict[str, Proof]) -> WriteFailure | None:
        """Write every rank's file on rank 0, tensor by tensor as they arrive; give what failed."""
        described = self._channel.gather(job.parts)
        problem = job.problem or _attempt(lambda: files.update(self._write_own(job, draft)))
        for rank, parts in enumerate(described[1:], start=1):
            arriving = (self._channel.receive(part.nbytes, rank) for part in parts)
            if parts and problem is None:
                name = store.tensor_file(rank)
                try:
                    files[name] = safetensors_file.write(draft / name, parts, arriving)
                except OSError as error:
                    problem = WriteFailure.of(error)
            # To the end even so: a sender without a receiver would wait for ever.
            for _ in arriving:
                pass
        return problem

    def _commit(
        self,
        job: Job,
        draft: Path,
        reports: Sequence[tuple[WriteFailure | None, Mapping[str, Proof]]],
        gone: str,
    ) -> tuple[TrainError | None, bool]:
        """Make the draft a checkpoint if all has gone well; else remove it and say why."""
        problems = [(rank, problem) for rank, (problem, _) in enumerate(reports) if problem]
        files = {name: proof for _, own in reports for name, proof in own.items()}
        try:
            if not problems:
                store.complete(draft, job.state, files)
                job.may_commit()
                store.commit(draft, job.position.path(self.run_dir))
                # It exists now: an event that finds the disk full, or an old checkpoint that
                # cannot be removed, does not undo it.
                with suppress(OSError):
                    job.committed(self._timing(job))
                return None, False
        except TrainError as error:
            store.discard(draft)
            return error, False
        except Exception as error:
            problems = [(0, WriteFailure.of(error))]
        store.discard(draft)
        full = any(problem.full for _, problem in problems)
        return self._failure(job, problems, gone), full

    def _timing(self, job: Job) -> Timing:
        now, waiting_since = time.monotonic(), self._waiting_since
        waited_s = 0.0
        if waiting_since is not None:
            waited_s, self._told_until = now - waiting_since, now
        return Timing(stall_s=job.stall_s + waited_s, total_s=now - job.started)

    def _failure(
        self, job: Job, problems: Sequence[tuple[int, WriteFailure]], gone: str
    ) -> CheckpointError:
        """Describe on rank 0 why the checkpoint failed."""
        alone = self._channel.size == 1
        reasons = [p.text if alone else f"rank {rank}: {p.text}" for rank, p in problems]
        if any(problem.full for _, problem in problems):
            free = store.free_bytes(job.position.path(self.run_dir))
            there = f", {free:,} are free on that disk" if free < math.inf else ""
            reasons.append(f"it needs {job.needed_bytes:,} bytes{there}")
            with suppress(OSError):
                reasons += [text for text in (job.may_go(),) if text]
        reasons.append(gone or "earlier checkpoints are untouched")
        return CheckpointError(
            f"cannot write checkpoint {job.position.path(self.run_dir)}: {'; '.join(reasons)}"
        )


def _attempt(action: Callable[[], None]) -> WriteFailure | None:
    """Do something; give what went wrong, for others to know."""
    try:
        action()
    except Exception as error:
        return WriteFailure.of(error)
    return None
