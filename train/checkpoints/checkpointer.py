"""Writing checkpoints behind the back of training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from train.checkpoints import disk, tensorfile
from train.checkpoints.channel import Channel
from train.checkpoints.disk import Position, Proof, State
from train.checkpoints.planning import Planner
from train.checkpoints.staging import Staging
from train.checkpoints.tensorfile import Part
from train.distributed import Group
from train.errors import CheckpointError, TrainError


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a checkpoint took."""

    stall_s: float
    """Seconds for which training stood still, with any wait for the checkpoint before."""
    total_s: float
    """Seconds until it was committed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checkpoint to be written."""

    position: Position
    """Where it will lie."""
    state: State
    """What it holds besides tensors."""
    parts: Sequence[Part]
    """What this rank writes."""
    tensors: Sequence[Tensor]
    """The same, copied at the moment of the save."""
    problem: str | None
    """Why they could not be copied."""
    started: float
    """When the save began, by the monotonic clock."""
    stall_s: float
    """How long it kept training waiting."""
    may_commit: Callable[[], None]
    """Raises, on rank 0, what speaks against it."""
    committed: Callable[[Timing], None]
    """Is told, on rank 0, when it is a checkpoint."""


class Checkpointer:
    """Copies what a checkpoint holds at once, and writes it in a thread; one at a time.

    All ranks call `save()` and `wait()` at the same steps. Whether a checkpoint was committed they
    agree on before the thread ends, so the next call raises the same on all of them or on none.
    """

    def __init__(self, run_dir: Path, group: Group, *, timeout_s: int = 600) -> None:
        """Connect the ranks' threads; all ranks do so at once, in their main thread."""
        self.run_dir = run_dir
        self._channel = Channel(group, timeout_s=timeout_s)
        self._planner, self._staging = Planner(self._channel), Staging()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

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
        may_commit: Callable[[], None] = lambda: None,
        committed: Callable[[Timing], None] = lambda timing: None,
    ) -> None:
        """Begin a checkpoint of this moment; tensors may change as soon as this returns.

        Args:
            position: where it shall lie.
            state: what it holds besides tensors.
            tensors: this rank's; other ranks may have others, and other parts of the same DTensors.
            may_commit: called on rank 0, in the thread, when all is written; raises to prevent it.
            committed: called on rank 0, in the thread, when it is a checkpoint.

        Raises:
            CheckpointError: on all ranks; the one before could not be written.
            TrainError: on all ranks; what its `may_commit` raised.
        """
        started = time.monotonic()
        self.wait()
        # Where rank 0 must write for all, what it has itself need not be sent.
        shared = self.shared
        parts = self._planner.parts(tensors, evenly=shared)
        copies: Sequence[Tensor] = ()
        problem = None
        try:
            copies = self._staging.copy(parts, tensors)
        except (MemoryError, RuntimeError) as error:
            # Known to the others soon: a rank that left now would leave them waiting.
            problem, parts = f"cannot copy the tensors: {error}", ()
        job = Job(
            position=position,
            state=state,
            parts=parts,
            tensors=copies,
            problem=problem,
            started=started,
            stall_s=time.monotonic() - started,
            may_commit=may_commit,
            committed=committed,
        )
        # A daemon: if another rank never answers, this process must end all the same.
        self._thread = threading.Thread(
            target=self._work, args=(job, shared), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: on all ranks; it could not be written, earlier ones are untouched.
            TrainError: on all ranks; what its `may_commit` raised.
        """
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
        draft = job.position.draft(self.run_dir)
        problem: str | None = None
        if self._channel.rank == 0:
            problem = _attempt(lambda: disk.begin(draft))
        if problem := self._channel.broadcast(problem):
            raise self._failure(job, [(0, problem)])
        files: dict[str, Proof] = {}
        if shared:
            problem = job.problem or _attempt(lambda: files.update(self._write_own(job, draft)))
        elif self._channel.rank == 0:
            problem = self._write_all(job, draft, files)
        else:
            self._send_own(job)
            problem = job.problem
        reports = self._channel.gather((problem, files))
        verdict = self._commit(job, draft, reports) if self._channel.rank == 0 else None
        if verdict := self._channel.broadcast(verdict):
            raise verdict

    def _write_own(self, job: Job, draft: Path) -> dict[str, Proof]:
        if not job.parts:
            return {}
        name = disk.tensor_file(self._channel.rank)
        return {name: tensorfile.write(draft / name, job.parts, job.tensors)}

    def _send_own(self, job: Job) -> None:
        """Send this rank's tensors to rank 0, which has the directory that counts."""
        self._channel.gather(job.parts)
        for tensor in job.tensors[: len(job.parts)]:
            self._channel.send(tensor)

    def _write_all(self, job: Job, draft: Path, files: dict[str, Proof]) -> str | None:
        """Write every rank's file on rank 0, tensor by tensor as they arrive; give what failed."""
        described = self._channel.gather(job.parts)
        problem = job.problem or _attempt(lambda: files.update(self._write_own(job, draft)))
        for rank, parts in enumerate(described[1:], start=1):
            arriving = (self._channel.receive(part.nbytes, rank) for part in parts)
            if parts and problem is None:
                name = disk.tensor_file(rank)
                try:
                    files[name] = tensorfile.write(draft / name, parts, arriving)
                except OSError as error:
                    problem = _said(error)
            # To the end even so: a sender that nobody listens to would wait for ever.
            for _ in arriving:
                pass
        return problem

    def _commit(
        self, job: Job, draft: Path, reports: Sequence[tuple[str | None, Mapping[str, Proof]]]
    ) -> TrainError | None:
        """Make the draft a checkpoint if all has gone well; else remove it and say why."""
        problems = [(rank, text) for rank, (text, _) in enumerate(reports) if text]
        files = {name: proof for _, own in reports for name, proof in own.items()}
        verdict: TrainError | None = self._failure(job, problems) if problems else None
        try:
            if verdict is None:
                disk.complete(draft, job.state, files)
                job.may_commit()
                disk.commit(draft, job.position.path(self.run_dir))
                total_s = time.monotonic() - job.started
                # It exists now: an event that finds the disk full, or an old checkpoint that
                # cannot be removed, does not undo it.
                with suppress(OSError):
                    job.committed(Timing(stall_s=job.stall_s, total_s=total_s))
        except TrainError as error:
            verdict = error
        except Exception as error:
            verdict = self._failure(job, [(0, _said(error))])
        if verdict is not None:
            disk.discard(draft)
        return verdict

    def _failure(self, job: Job, problems: Sequence[tuple[int, str]]) -> CheckpointError:
        alone = self._channel.size == 1
        reasons = [text if alone else f"rank {rank}: {text}" for rank, text in problems]
        return CheckpointError(
            f"cannot write checkpoint {job.position.path(self.run_dir)}: {'; '.join(reasons)}; "
            "earlier checkpoints are untouched"
        )


def _attempt(action: Callable[[], None]) -> str | None:
    """Do something; give what went wrong, for others to know."""
    try:
        action()
    except Exception as error:
        return _said(error)
    return None


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
