"""A checkpoint on its way to the disk, and what may become of it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from train.checkpoints.safetensors_file import TensorPart
from train.checkpoints.store import Position, State

# Beside the tensors: state, manifest, and room in which to say how it has ended.
BESIDE_BYTES = 1 << 16
PAGE_BYTES = 4096
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a checkpoint took."""

    stall_s: float
    """Seconds for which training stood still since the one before: all of the call that began it,
    and waits for it up to now."""
    total_s: float
    """Seconds until it was committed."""


@dataclass(frozen=True, kw_only=True)
class WriteFailure:
    """Why something could not be written, for other ranks to know."""

    text: str
    """In words."""
    full: bool = False
    """Whether the disk is full."""

    @classmethod
    def of(cls, error: Exception) -> WriteFailure:
        """Describe an exception."""
        if isinstance(error, OSError):
            return cls(text=str(error), full=error.errno in FULL)
        return cls(text=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checkpoint to be written."""

    position: Position
    """Where it will lie."""
    state: State
    """Everything but the tensors."""
    parts: Sequence[TensorPart]
    """What this rank writes."""
    tensors: Sequence[Tensor]
    """The same, copied at the moment of the save."""
    problem: WriteFailure | None
    """Why they could not be copied."""
    needed_bytes: int
    """On rank 0: how much room all ranks' files take on the disk."""
    started: float
    """When the save began, by the monotonic clock."""
    stall_s: float
    """How long the call kept training waiting."""
    make_room: Callable[[], str]
    """Removes, on rank 0, checkpoints that the new one replaces; returns their names."""
    may_go: Callable[[], str]
    """Names, on rank 0, further checkpoints that a user could remove."""
    may_commit: Callable[[], None]
    """Raises, on rank 0, what speaks against it."""
    committed: Callable[[Timing], None]
    """Called on rank 0 after the commit."""


def room_beside(ranks: int) -> int:
    """Say how many bytes a checkpoint takes beside its tensors: a file fills whole pages."""
    return ranks * PAGE_BYTES + BESIDE_BYTES
