"""Checkpoints: tensors as safetensors, all else as JSON, and a manifest that proves them whole.

checkpoints/attempt-<A>/step-<NNNNNNNN>/{model.safetensors,optimizer.safetensors,state.json,manifest.json}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from train.errors import CheckpointError
from train.rundir import VERSION, dump

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)


@dataclass(frozen=True, kw_only=True)
class State:
    """What `state.json` holds: everything about a moment of the run that is no tensor."""

    step: int
    """Optimizer steps made."""
    epoch: int
    """Whole passes over the training data."""
    samples_seen: int
    """Training samples drawn; the whole state of the data order."""
    world_size: int
    """How many ranks wrote this; any number may read it."""
    identity: Mapping[str, object]
    """Which run this belongs to."""
    config: Mapping[str, object]
    """The command line that wrote this."""
    rng: str = "sha256(seed, step, shard)"
    """How each step's generators are seeded: a function, so there is no generator state to keep.

    `shard` is the number of a rank's slice of the batch.
    """


@dataclass(frozen=True, kw_only=True, order=True)
class Position:
    """Where a checkpoint lies: a later attempt comes before a higher step."""

    attempt: int
    """The attempt that wrote it."""
    step: int
    """The step after which it was written."""

    def path(self, run_dir: Path) -> Path:
        """Directory of the checkpoint."""
        return attempt_path(run_dir, self.attempt) / f"step-{self.step:08d}"


def attempt_path(run_dir: Path, attempt: int) -> Path:
    """Directory of an attempt's checkpoints; no other attempt writes there."""
    return run_dir / "checkpoints" / f"attempt-{attempt}"


def places(run_dir: Path, *, up_to_attempt: float = math.inf) -> list[Position]:
    """List the committed checkpoints of this attempt and earlier ones, best first."""
    found = []
    for path in run_dir.glob("checkpoints/attempt-*/step-*"):
        attempt, step = path.parent.name.removeprefix("attempt-"), path.name.removeprefix("step-")
        # `step-N.tmp` is a write that a kill cut short.
        if attempt.isdecimal() and step.isdecimal() and int(attempt) <= up_to_attempt:
            found.append(Position(attempt=int(attempt), step=int(step)))
    return sorted(found, reverse=True)


def save(
    path: Path, state: State, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint that is either whole or absent, whenever the power goes.

    Raises:
        CheckpointError: it could not be written; what was there before is untouched.
    """
    draft = path.with_name(path.name + ".tmp")
    replaced = path.with_name(path.name + ".old.tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(_plain(model), draft / MODEL)
        save_file(_plain(optimizer), draft / OPTIMIZER)
        (draft / STATE).write_text(dump({"version": VERSION, **asdict(state)}, indent=2) + "\n")
        files = {name: _measure(draft / name) for name in FILES}
        head = {"version": VERSION, "step": state.step, "samples_seen": state.samples_seen}
        (draft / MANIFEST).write_text(dump({**head, "files": files}, indent=2) + "\n")
        for name in (*FILES, MANIFEST):
            _sync(draft / name)
        _sync(draft)
        if path.exists():
            # Only a damaged one can be there: a whole one would have been resumed from.
            path.rename(replaced)
        draft.rename(path)
        _sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched"
        ) from error


def verify(path: Path, names: Sequence[str] = FILES) -> None:
    """Check every file, or only those named, against the manifest.

    Raises:
        CheckpointError: the first difference.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["version"] != VERSION:
            raise CheckpointError(f"{path}: format version {manifest['version']}, not {VERSION}")
        for name in names:
            expected = files[name]
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{path / name}: {size} bytes, not {expected['bytes']}")
            if _measure(path / name) != expected:
                raise CheckpointError(f"{path / name}: SHA-256 differs from the manifest")
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not a manifest ({error!r})") from error


def load(path: Path) -> tuple[State, dict[str, Tensor], dict[str, Tensor]]:
    """Read a checkpoint that `verify()` has found whole: state, model, optimizer."""
    fields = json.loads((path / STATE).read_text())
    fields.pop("version")
    return State(**fields), load_file(path / MODEL), load_file(path / OPTIMIZER)


def identity(path: Path) -> Mapping[str, object]:
    """Read which run a checkpoint belongs to; its tensors, which may be large, are not looked at.

    Raises:
        CheckpointError: its `state.json` is damaged or missing.
    """
    verify(path, [STATE])
    known: Mapping[str, object] = json.loads((path / STATE).read_text()).get("identity", {})
    return known


def prune(run_dir: Path, newest: Position, *, keep: int) -> None:
    """Remove an attempt's checkpoints but the last `keep`; call only once `newest` is committed.

    Whatever lies beyond `newest` was damaged and is being done again: it counts for nothing, and is
    replaced when that step is reached.
    """
    mine = [
        place
        for place in places(run_dir, up_to_attempt=newest.attempt)
        if place.attempt == newest.attempt and place.step <= newest.step
    ]
    for place in mine[keep:]:
        # Renamed first: one half removed must not look like a checkpoint.
        doomed = place.path(run_dir).with_suffix(".old.tmp")
        place.path(run_dir).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def export(path: Path, model: Mapping[str, Tensor]) -> None:
    """Write the weights to one file that loads without us.

    Raises:
        CheckpointError: it could not be written.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_plain(model), draft)
        _sync(draft)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            draft.unlink()
        raise CheckpointError(f"cannot export to {path}: {error}") from error


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _measure(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    """Force a file, or a directory's entries, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
