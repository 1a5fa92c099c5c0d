"""What a checkpoint is on disk: where it lies, when it is whole, when it goes.

checkpoints/attempt-<A>/step-<NNNNNNNN>/{rank-<NNNNN>.safetensors,state.json,manifest.json}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from train.errors import CheckpointError
from train.jsontext import dump
from train.rundir import VERSION

STATE = "state.json"
MANIFEST = "manifest.json"
# Size and SHA-256 of a file, as the manifest has them.
Proof = Mapping[str, object]


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
    scaler: Mapping[str, float] = field(default_factory=dict)
    """The loss scale, if there is one."""
    rng: str = "sha256(seed, step, *axes)"
    """How each step's generators are seeded: a function, so there is no generator state to keep.

    `axes` are a rank's coordinates along which it must draw numbers of its own.
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

    def draft(self, run_dir: Path) -> Path:
        """Directory in which it is written until it is whole."""
        path = self.path(run_dir)
        return path.with_name(path.name + ".tmp")


def attempt_path(run_dir: Path, attempt: int) -> Path:
    """Directory of an attempt's checkpoints; no other attempt writes there."""
    return run_dir / "checkpoints" / f"attempt-{attempt}"


def tensor_file(rank: int) -> str:
    """Name of the file with the tensors that a rank has written."""
    return f"rank-{rank:05d}.safetensors"


def places(run_dir: Path, *, up_to_attempt: float = math.inf) -> list[Position]:
    """List the committed checkpoints of this attempt and earlier ones, best first."""
    found = []
    for attempt, path in _listed(run_dir, up_to_attempt):
        step = path.name.removeprefix("step-")
        # `step-N.tmp` is a write that a kill cut short.
        if step.isdecimal():
            found.append(Position(attempt=attempt, step=int(step)))
    return sorted(found, reverse=True)


def _listed(run_dir: Path, up_to_attempt: float) -> Iterator[tuple[int, Path]]:
    for path in run_dir.glob("checkpoints/attempt-*/step-*"):
        attempt = path.parent.name.removeprefix("attempt-")
        if attempt.isdecimal() and int(attempt) <= up_to_attempt:
            yield int(attempt), path


def begin(draft: Path) -> None:
    """Make an empty directory to write into, which a loss of power does not take back."""
    shutil.rmtree(draft, ignore_errors=True)
    new = [path for path in (draft, *draft.parents) if not path.exists()]
    draft.mkdir(parents=True)
    for path in new:
        sync(path.parent)


def complete(draft: Path, state: State, files: Mapping[str, Proof]) -> None:
    """Add to the files of tensors, which are on the disk already, state and manifest.

    Raises:
        OSError: one of them could not be written, or does not look as its writer says.
    """
    for name, proof in files.items():
        # Written by another node, perhaps: is it the same directory?
        if (size := (draft / name).stat().st_size) != proof["bytes"]:
            raise OSError(f"{draft / name} has {size} bytes here, {proof['bytes']} were written")
    (draft / STATE).write_text(dump({"version": VERSION, **asdict(state)}, indent=2) + "\n")
    files = {**files, STATE: measure(draft / STATE)}
    head = {"version": VERSION, "step": state.step, "samples_seen": state.samples_seen}
    (draft / MANIFEST).write_text(dump({**head, "files": files}, indent=2) + "\n")
    for name in (STATE, MANIFEST):
        sync(draft / name)
    sync(draft)


def commit(draft: Path, path: Path) -> None:
    """Give a complete draft its name: from now on it is a checkpoint, whenever the power goes."""
    replaced = path.with_name(path.name + ".old.tmp")
    if path.exists():
        # Only a damaged one can be there: a whole one would have been resumed from.
        path.rename(replaced)
    draft.rename(path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def verify(
    path: Path,
    names: Sequence[str] | None = None,
    *,
    share: tuple[int, int] = (0, 1),
    by_size: bool = False,
) -> None:
    """Check every file, or only those named, against the manifest.

    Args:
        path: the checkpoint.
        names: files to look at; all of them if None, and then there must be no others.
        share: (k, n) looks only at the k-th of every n files: n ranks share the work.
        by_size: read none of them, which is quick and finds what was cut short or is missing.

    Raises:
        CheckpointError: the first difference.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: Mapping[str, Proof] = manifest["files"]
        if manifest["version"] != VERSION:
            raise CheckpointError(f"{path}: format version {manifest['version']}, not {VERSION}")
        if names is None:
            # Nothing of it would be read; but what is it doing there?
            if strange := {child.name for child in path.iterdir()} - {*files, MANIFEST}:
                raise CheckpointError(f"{path / min(strange)}: not in the manifest")
            first, every = share
            names = sorted(files)[first::every]
        for name in names:
            _check(path / name, files[name], by_size=by_size)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not a manifest ({error!r})") from error


def _check(path: Path, expected: Proof, *, by_size: bool) -> None:
    if (size := path.stat().st_size) != expected["bytes"]:
        raise CheckpointError(f"{path}: {size} bytes, not {expected['bytes']}")
    if not by_size and measure(path) != expected:
        raise CheckpointError(f"{path}: SHA-256 differs from the manifest")


def read_state(path: Path) -> State:
    """Read the state of a checkpoint that `verify()` has found whole."""
    fields = json.loads((path / STATE).read_text())
    fields.pop("version")
    return State(**fields)


def identity(path: Path) -> Mapping[str, object]:
    """Read which run a checkpoint belongs to; its tensors, which may be large, are not looked at.

    Raises:
        CheckpointError: its `state.json` is damaged or missing.
    """
    verify(path, [STATE])
    known: Mapping[str, object] = json.loads((path / STATE).read_text()).get("identity", {})
    return known


def prune(
    run_dir: Path, newest: Position, *, keep: int, damaged: Collection[Position] = ()
) -> None:
    """Remove what lies behind the last `keep` whole checkpoints; call once `newest` is committed.

    Of its own attempt and of earlier ones: these are fenced, so that no draft of theirs becomes a
    checkpoint any more. A later attempt's are its own. Whatever lies beyond `newest` was damaged
    and is being done again: it counts for nothing, and stays until that step is reached.

    Args:
        run_dir: where they lie.
        newest: the last one.
        keep: how many to keep that are whole, as far as their files' sizes tell.
        damaged: some that are known not to be.
    """
    for _, path in list(_listed(run_dir, newest.attempt)):
        if path.suffix == ".tmp":
            discard(path)
    whole = 0
    for place in places(run_dir, up_to_attempt=newest.attempt):
        path = place.path(run_dir)
        if place.step > newest.step:
            continue
        if whole < keep:
            whole += place not in damaged and looks_whole(path)
            continue
        # Renamed first: one half removed must not look like a checkpoint.
        doomed = path.with_suffix(".old.tmp")
        with suppress(OSError):
            path.rename(doomed)
            shutil.rmtree(doomed)


def looks_whole(path: Path) -> bool:
    """Say whether all files are there in their sizes; what is in them is not looked at."""
    try:
        verify(path, by_size=True)
    except CheckpointError:
        return False
    return True


def measure(path: Path) -> Proof:
    """Give a file's size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def sync(path: Path) -> None:
    """Force a file, or a directory's entries, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(path: Path) -> None:
    """Remove a draft; what cannot be removed is no checkpoint all the same."""
    with suppress(OSError):
        shutil.rmtree(path)
