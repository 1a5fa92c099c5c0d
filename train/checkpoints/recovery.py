"""Resuming: finding the newest valid checkpoint that any rank can see, and loading it.

On all ranks, an unreadable checkpoint raises a CheckpointError, and one of another model a
UsageError.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError, UsageError
from ..parallel.base import copy_part
from ..runtime.process_group import RankGroup
from . import store
from .reader import Listing, Stored, differences
from .store import Position, State


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """The checkpoints that one node sees in its run directory."""

    best: Position | None
    """Its best checkpoint that is whole."""
    damaged: tuple[tuple[Position, str], ...] = ()
    """Better ones that are damaged, and why."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The checkpoint from which all ranks resume."""

    position: Position
    """Attempt and step of the checkpoint."""
    state: State
    """Its state."""
    listing: Listing
    """Its tensors."""
    source: int | None
    """The rank that reads it for all; None: each rank reads its part."""


def look(
    run_dir: Path, *, attempt: float, step: int | None = None, together: RankGroup | None = None
) -> Sighting:
    """Find the best whole checkpoint of attempts up to this one; a missing directory holds none.

    Args:
        run_dir: the run directory. The run may still be active and remove checkpoints.
        attempt: the latest attempt to consider.
        step: look at checkpoints of this step only.
        together: all ranks see one directory, and each verifies some of the files.
    """

    def listed() -> list[Position]:
        positions = store.list_committed(run_dir, up_to_attempt=attempt)
        positions = [p for p in positions if step in (None, p.step)]
        return together.broadcast(positions) if together else positions

    share = (together.rank_info.rank, together.rank_info.world_size) if together else (0, 1)
    damaged: dict[Position, str] = {}
    positions = listed()
    while positions:
        position = positions.pop(0)
        reason, gone = "", False
        try:
            store.verify(position.path(run_dir), share=share)
        except CheckpointError as error:
            reason, gone = str(error), not position.path(run_dir).exists()
        if together:
            reports = together.gather((reason, gone))
            reason = next((text for text, _ in reports if text), "")
            gone = any(gone for _, gone in reports)
        if not reason:
            return Sighting(best=position, damaged=tuple(damaged.items()))
        if gone and position not in (there := listed()):
            # A newer checkpoint has replaced it.
            positions = [p for p in there if p not in damaged]
        else:
            damaged[position] = reason
    return Sighting(best=None, damaged=tuple(damaged.items()))


def find(
    run_dir: Path,
    group: RankGroup,
    *,
    shared: bool,
    attempt: float | None = None,
    step: int | None = None,
) -> tuple[list[Sighting], int | None]:
    """Let every node look, and return the lowest rank that sees the best; None: there is none.

    If each node has its own run directory, one rank per node looks, as the others would only read
    the same files again. `attempt` (default: this one) and `step` as in `look()`.
    """
    attempt = group.rank_info.attempt if attempt is None else attempt
    if shared:
        sightings = [look(run_dir, attempt=attempt, step=step, together=group)]
    else:
        looks = group.rank_info.local_rank == 0
        sightings = group.gather(
            look(run_dir, attempt=attempt, step=step) if looks else Sighting(best=None)
        )
    bests = [sighting.best for sighting in sightings]
    best = max((position for position in bests if position), default=None)
    return sightings, None if best is None else bests.index(best)


def describe(
    run_dir: Path, group: RankGroup, position: Position, *, source: int, shared: bool
) -> Resumption:
    """Broadcast a checkpoint's contents from the source rank, except its tensors."""
    resumption: Resumption | str = ""
    if group.rank_info.rank == source:
        path = position.path(run_dir)
        try:
            resumption = Resumption(
                position=position,
                state=store.read_state(path),
                listing=Stored(path).listing,
                source=None if shared else source,
            )
        except CheckpointError as error:
            resumption = str(error)
    resumption = group.broadcast(resumption, source=source)
    if isinstance(resumption, str):
        raise CheckpointError(f"rank {source}: {resumption}")
    return resumption


def load(
    run_dir: Path, group: RankGroup, resumption: Resumption, tensors: Mapping[str, Tensor]
) -> None:
    """Fill this rank's tensors in place, whatever mesh wrote the checkpoint.

    Raises:
        UsageError: on all ranks; the checkpoint holds other tensors, or some of another shape.
    """
    path = resumption.position.path(run_dir)
    own: Listing = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if differing := differences(resumption.listing, group.gather(own)):
        raise UsageError(
            f"checkpoint {path} is of another model: use another --run-dir, or the "
            "model of the checkpoint:\n" + "\n".join(f"  {line}" for line in differing)
        )
    fill(run_dir, group, resumption, tensors)


def fill(
    run_dir: Path, group: RankGroup, resumption: Resumption, tensors: Mapping[str, Tensor]
) -> None:
    """Fill tensors in place after their names and shapes were checked."""
    path = resumption.position.path(run_dir)
    problem = ""
    try:
        if resumption.source is None:
            Stored(path).load(tensors)
        else:
            _distribute(path, group, resumption, tensors)
    except CheckpointError as error:
        problem = str(error)
    if problems := [
        f"rank {rank}: {text}" for rank, text in enumerate(group.gather(problem)) if text
    ]:
        raise CheckpointError("; ".join(problems))


def _distribute(
    path: Path, group: RankGroup, resumption: Resumption, tensors: Mapping[str, Tensor]
) -> None:
    """Read tensor by tensor on one rank and send it to all; each takes its part.

    A failure is raised on the rank that reads; the other ranks just return.
    """
    assert resumption.source is not None, "one rank has it"
    stored: Stored | None = None
    for name in resumption.listing:
        whole: dict[str, Tensor] = {}
        failure: CheckpointError | None = None
        if group.rank_info.rank == resumption.source:
            try:
                stored = stored or Stored(path)
                whole = {name: stored.whole(name)}
            except CheckpointError as error:
                failure = error
        # Send one tensor at a time: no rank ever holds more than its part and one tensor.
        whole = group.broadcast_tensors(whole, source=resumption.source)
        if failure is not None:
            raise failure
        if name not in whole:
            return
        if name in tensors:
            copy_part(whole[name], tensors[name])
