"""Choosing, checking and loading the checkpoint for evaluation or prediction.

Nothing is written to the run directory, not even temporarily: it may be read-only, or an active run
may be using it and removing checkpoints.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..checkpoints import recovery, store
from ..checkpoints.reader import MODEL, differences, weights
from ..checkpoints.store import Position, State
from ..cli.config import Config
from ..errors import CheckpointError, UsageError
from ..parallel.base import Strategy
from ..rundir import claim, untrusted
from ..rundir.console import Console
from ..runtime.process_group import RankGroup

TRIES = 5
"""Number of tries to find a checkpoint, as an active run may remove one before it is read."""
_SETTINGS = {field.name for field in fields(Config)} - {"task"}
"""Fields of a run's identity that describe how it was trained, not the task."""


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The checkpoint that a strategy's weights come from."""

    path: Path
    """Directory of the checkpoint."""
    step: int
    """Optimizer steps made."""
    manifest_sha256: str
    """Digest of its manifest, which contains a digest of each file."""


def load(
    strategy: Strategy, group: RankGroup, identity: Mapping[str, object], console: Console
) -> LoadedCheckpoint:
    """Load the newest whole checkpoint, or that of `--checkpoint`, into a strategy's model.

    All ranks call this at once.

    Args:
        strategy: its model is filled in place, whatever mesh wrote the checkpoint.
        group: the ranks.
        identity: of the task; the checkpoint must have the same, or name the task of `--adopt`.
        console: reports damaged checkpoints that are skipped.

    Raises:
        UsageError: on all ranks; no checkpoint was found, or it belongs to another task or model.
        CheckpointError: on all ranks; the checkpoint cannot be read.
    """
    config = strategy.parts.config
    for last in [False] * (TRIES - 1) + [True]:
        shared = _all_see_one(config, group)
        position, source = _choose(config, group, console, shared=shared)
        path = position.path(config.directory)
        try:
            resumption = recovery.describe(
                config.directory, group, position, source=source, shared=shared
            )
            _check_task(resumption.state, identity, config, path)
            resumption = replace(resumption, listing=weights(resumption.listing))
            tensors = {MODEL + name: tensor for name, tensor in strategy.model_state().items()}
            own = group.gather({name: (t.shape, t.dtype) for name, t in tensors.items()})
            if differing := differences(resumption.listing, own):
                raise UsageError(
                    f"checkpoint {path} is of another model: give the --task of the checkpoint, or "
                    "its version:\n" + "\n".join(f"  {line}" for line in differing)
                )
            recovery.fill(config.directory, group, resumption, tensors)
            digest = group.broadcast(
                _digest(path) if group.rank_info.rank == source else "", source=source
            )
        except CheckpointError:
            gone = group.broadcast(not path.exists(), source=source)
            if last or not gone:
                raise
            continue
        strategy.load_model_state({n.removeprefix(MODEL): t for n, t in tensors.items()})
        return LoadedCheckpoint(path=path, step=position.step, manifest_sha256=digest)
    raise AssertionError("the last try returns or raises")


def _all_see_one(config: Config, group: RankGroup) -> bool:
    """Whether all ranks see the same files; unlike training, this leaves no mark in the folder."""
    seen: tuple[object, ...] | None = None
    for position in store.list_committed(config.directory)[:1]:
        try:
            path = position.path(config.directory) / store.MANIFEST
            status = path.stat()
            # Copies on other nodes differ in inode number or modification time.
            seen = (position, status.st_ino, status.st_mtime_ns, _digest(path.parent))
        except (OSError, CheckpointError):
            continue
    sightings = group.gather(seen)
    return None not in sightings and len({*sightings}) == 1


def _choose(
    config: Config, group: RankGroup, console: Console, *, shared: bool
) -> tuple[Position, int]:
    """Agree on a checkpoint, and on the rank that reads it if not all can."""
    run_dir, step = config.directory, config.checkpoint
    sightings, source = recovery.find(run_dir, group, shared=shared, attempt=math.inf, step=step)
    damage = sorted({reason for sighting in sightings for _, reason in sighting.damaged})
    if source is not None and (best := sightings[source].best) is not None:
        for reason in damage:
            console.complain(f"skipping a damaged checkpoint: {reason}")
        return best, source
    lists = group.gather({p.step for p in store.list_committed(run_dir)})
    steps = sorted({step for one in lists for step in one})
    if damage:
        problem = f"{run_dir} has no whole checkpoint" + (
            "" if step is None else f" of step {step}"
        )
        problem += "".join(f"\n  {reason}" for reason in damage)
    elif step is not None and steps:
        listed = ", ".join(map(str, steps[-16:]))
        problem = f"--checkpoint {step}: {run_dir} has none of that step; there are {listed}"
    else:
        there = "holds no checkpoint" if any(group.gather(run_dir.is_dir())) else "does not exist"
        problem = f"{run_dir} {there}: give --run-dir the directory of a run that has written one"
    raise UsageError(problem)


def _check_task(state: State, identity: Mapping[str, object], config: Config, path: Path) -> None:
    """Refuse a checkpoint of another task; training settings may differ."""
    there = {name: value for name, value in state.identity.items() if name not in _SETTINGS}
    if config.adopt is not None and there.get("task") == config.adopt:
        return
    if lines := claim.differences(there, identity):
        task = untrusted.printable(str(there.get("task")))
        raise UsageError(
            f"checkpoint {path} is of another task: give its --task, or, if this one has the same "
            f"model, add --adopt {task}:\n" + "\n".join(f"  {line}" for line in lines)
        )


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(untrusted.read_bytes(path / store.MANIFEST)).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path / store.MANIFEST}: {error.strerror}") from error
