"""Finding where to go on, the newest valid checkpoint that any rank can see, and going on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from train.checkpoints import store
from train.checkpoints.reader import Listing, Stored, differences, listing_of
from train.checkpoints.store import Position, State
from train.errors import CheckpointError
from train.runtime.process_group import RankGroup


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """The checkpoints that one node sees in its run directory."""

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
    listing: Listing
    """Its tensors."""
    source: int | None
    """The rank that reads it for all; None: each rank reads its part."""


def look(run_dir: Path, *, attempt: int) -> Sighting:
    """Find the best whole checkpoint of attempts up to this one; a missing directory holds none."""
    damaged = []
    for position in store.places(run_dir, up_to_attempt=attempt):
        try:
            store.verify(position.path(run_dir))
        except CheckpointError as error:
            damaged.append((position, str(error)))
            continue
        return Sighting(best=position, damaged=tuple(damaged))
    return Sighting(best=None, damaged=tuple(damaged))


def look_together(run_dir: Path, group: RankGroup) -> Sighting:
    """Find the same in a directory that all ranks see: each looks at some of the files."""
    rank_info = group.rank_info
    damaged: list[tuple[Position, str]] = []
    listed = store.places(run_dir, up_to_attempt=rank_info.attempt)
    for position in group.broadcast(listed):
        reason = ""
        try:
            store.verify(position.path(run_dir), share=(rank_info.rank, rank_info.world_size))
        except CheckpointError as error:
            reason = str(error)
        if not (reasons := [text for text in group.gather(reason) if text]):
            return Sighting(best=position, damaged=tuple(damaged))
        damaged.append((position, reasons[0]))
    return Sighting(best=None, damaged=tuple(damaged))


def find(run_dir: Path, group: RankGroup, *, shared: bool) -> tuple[list[Sighting], int | None]:
    """Let every node look, and agree on the lowest rank that sees the best; None: there is none.

    If the run directory is each node's own, one rank per node looks, as all of them would only read
    the same files again.
    """
    nothing = Sighting(best=None, damaged=())
    if shared:
        seen = [look_together(run_dir, group)]
    else:
        looks = group.rank_info.local_rank == 0
        seen = group.gather(look(run_dir, attempt=group.rank_info.attempt) if looks else nothing)
    best = max((sighting.best for sighting in seen if sighting.best), default=None)
    source = None if best is None else [sighting.best for sighting in seen].index(best)
    return seen, source


def describe(
    run_dir: Path, group: RankGroup, position: Position, *, source: int, shared: bool
) -> Resumption:
    """Broadcast the content of a checkpoint on the source rank, without its tensors.

    Raises:
        CheckpointError: on all ranks; it cannot be read.
    """
    resumption: Resumption | str = ""
    if group.rank_info.rank == source:
        path = position.path(run_dir)
        try:
            resumption = Resumption(
                position=position,
                state=store.read_state(path),
                listing=Stored(path).listing(),
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
    """Fill this rank's tensors in place, however the ranks that wrote them were arranged.

    Raises:
        CheckpointError: on all ranks; the checkpoint is of another model, or cannot be read.
    """
    path = resumption.position.path(run_dir)
    if differing := differences(resumption.listing, group.gather(listing_of(tensors))):
        raise CheckpointError(
            f"checkpoint {path} is of another model: give this run another --run-dir, or the "
            "model of the checkpoint:\n" + "\n".join(f"  {line}" for line in differing)
        )
    fill(run_dir, group, resumption, tensors)


def fill(
    run_dir: Path, group: RankGroup, resumption: Resumption, tensors: Mapping[str, Tensor]
) -> None:
    """Fill tensors in place that are known to be the checkpoint's.

    Raises:
        CheckpointError: on all ranks; it cannot be read.
    """
    path = resumption.position.path(run_dir)
    problem = ""
    if resumption.source is None:
        try:
            Stored(path).load(tensors)
        except CheckpointError as error:
            problem = str(error)
    else:
        problem = _serve(path, group, resumption, tensors)
    if problems := [
        f"rank {rank}: {text}" for rank, text in enumerate(group.gather(problem)) if text
    ]:
        raise CheckpointError("; ".join(problems))


def _serve(
    path: Path, group: RankGroup, resumption: Resumption, tensors: Mapping[str, Tensor]
) -> str:
    """Read tensor by tensor on one rank and send it to all; each takes its part."""
    assert resumption.source is not None, "somebody has it"
    mine = group.rank_info.rank == resumption.source
    stored = Stored(path) if mine else None
    for name in resumption.listing:
        whole: dict[str, Tensor] = {}
        problem = ""
        if stored is not None:
            try:
                whole = {name: stored.whole(name)}
            except CheckpointError as error:
                problem = str(error)
        # One at a time: no rank ever holds more than its part and one tensor.
        whole = group.broadcast_tensors(whole, source=resumption.source)
        if name not in whole:
            return problem
        if name in tensors:
            _take(whole[name], tensors[name])
    return ""


def _take(whole: Tensor, own: Tensor) -> None:
    """Copy this rank's part of a tensor in place."""
    target = own.detach()
    if hasattr(own, "__create_chunk_list__"):
        (box,) = own.__create_chunk_list__()
        whole = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        target = target.to_local()  # type: ignore[attr-defined]
    with torch.no_grad():
        target.copy_(whole)
