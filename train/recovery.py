"""Finding where to go on: the newest valid checkpoint that any rank can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from train import checkpoint
from train.checkpoint import Position, State
from train.distributed import Group
from train.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What one node sees in its run directory."""

    best: Position | None
    """Its best checkpoint that is whole."""
    damaged: tuple[tuple[Position, str], ...]
    """Better ones that are not, and why."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What all ranks go on from."""

    position: Position
    """Which checkpoint."""
    state: State
    """Its state."""
    model: dict[str, Tensor]
    """Its model tensors, on this rank's device."""
    optimizer: dict[str, Tensor]
    """Its optimizer tensors, on this rank's device."""
    source: int
    """The rank that read it."""


def look(run_dir: Path, *, attempt: int) -> Sighting:
    """Find the best whole checkpoint of attempts up to this one; a missing directory holds none."""
    damaged = []
    for position in checkpoint.places(run_dir, up_to_attempt=attempt):
        try:
            checkpoint.verify(position.path(run_dir))
        except CheckpointError as error:
            damaged.append((position, str(error)))
            continue
        return Sighting(best=position, damaged=tuple(damaged))
    return Sighting(best=None, damaged=tuple(damaged))


def find(run_dir: Path, group: Group) -> tuple[list[Sighting], int | None]:
    """Let every node look, and agree on the rank that shall read; None: start from the beginning.

    The run directory may be each node's own. One rank per node looks, as all of them would only
    read the same files again.
    """
    nothing = Sighting(best=None, damaged=())
    looks = group.place.local_rank == 0
    seen = group.gather(look(run_dir, attempt=group.place.attempt) if looks else nothing)
    best = max((sighting.best for sighting in seen if sighting.best), default=None)
    source = None if best is None else [sighting.best for sighting in seen].index(best)
    return seen, source


def read(run_dir: Path, group: Group, seen: Sequence[Sighting], source: int) -> Resumption:
    """Read the best checkpoint on one rank and give it to all."""
    position = seen[source].best
    assert position is not None, "find() chose a rank that has one"
    state: State | None = None
    model: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    if group.place.rank == source:
        state, model, optimizer = checkpoint.load(position.path(run_dir))
    state = group.broadcast(state, source=source)
    assert state is not None, "the source rank has read it"
    return Resumption(
        position=position,
        state=state,
        model=group.broadcast_tensors(model, source=source),
        optimizer=group.broadcast_tensors(optimizer, source=source),
        source=source,
    )
