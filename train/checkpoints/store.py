"""What a checkpoint is on disk: where it lies, and when it is whole.

checkpoints/attempt-<A>/step-<NNNNNNNN>/{rank-<NNNNN>.safetensors,state.json,manifest.json}
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from train.errors import CheckpointError
from train.rundir import untrusted
from train.rundir.files import VERSION
from train.rundir.json_text import dump

STATE = "state.json"
MANIFEST = "manifest.json"
_TENSORS = re.compile(r"rank-[0-9]+\.safetensors", re.ASCII)
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
    loss: float | None = None
    """Loss of the last step, over all ranks."""
    frozen: Sequence[str] | None = None
    """Parameters that were not trained; None: it was not recorded."""
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
    positions = []
    for attempt, path in entries(run_dir, up_to_attempt):
        step = path.name.removeprefix("step-")
        # `step-N.tmp` is a write that a kill cut short.
        if step.isdecimal():
            positions.append(Position(attempt=attempt, step=int(step)))
    return sorted(positions, reverse=True)


def entries(run_dir: Path, up_to_attempt: float) -> Iterator[tuple[int, Path]]:
    """Give everything of this attempt and earlier ones, drafts too, with its attempt."""
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
        OSError: one of them could not be written, or differs from its writer's description.
    """
    for name, proof in files.items():
        # Written by another node, perhaps: is it the same directory?
        if (size := (draft / name).stat().st_size) != proof["bytes"]:
            raise OSError(f"{draft / name} has {size} bytes here, {proof['bytes']} were written")
    (draft / STATE).write_text(
        dump({"version": VERSION, **asdict(state)}, indent=2) + "\n", encoding="utf-8"
    )
    files = {**files, STATE: measure(draft / STATE)}
    head = {"version": VERSION, "step": state.step, "samples_seen": state.samples_seen}
    (draft / MANIFEST).write_text(dump({**head, "files": files}, indent=2) + "\n", encoding="utf-8")
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
    """Check every file of a checkpoint, or only those named, against the manifest.

    Other files there are not part of it, and are not read.

    Args:
        path: the checkpoint.
        names: files to look at; all of them if None.
        share: (k, n) looks only at the k-th of every n files: n ranks share the work.
        by_size: read none of them, which is quick and finds truncated and missing files.

    Raises:
        CheckpointError: the first difference.
    """
    manifest = _manifest(path)
    if names is None:
        first, every = share
        names = sorted(manifest.files)[first::every]
    for name in names:
        _check(path / name, manifest.files[name], by_size=by_size)
    if STATE in names and not by_size:
        state = read_state(path)
        for word, there in (("step", manifest.step), ("samples_seen", manifest.samples_seen)):
            if (here := getattr(state, word)) != there:
                raise CheckpointError(f"{path / STATE}: {word} {here}, not {there}")


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """What `manifest.json` holds."""

    step: int
    """Optimizer steps made."""
    samples_seen: int
    """Training samples drawn."""
    files: Mapping[str, Proof]
    """What the checkpoint consists of: `state.json`, and at least one file of tensors."""


def _manifest(path: Path) -> _Manifest:
    """Read what a checkpoint consists of.

    Raises:
        CheckpointError: the manifest is missing, or belongs to another folder.
    """
    with _told(path / MANIFEST, "manifest"):
        read = _versioned(path / MANIFEST)
        files = untrusted.mapping(read["files"])
        # Nothing but what `complete()` lists: so none of the names leads out of the folder.
        tensors = [name for name in files if _TENSORS.fullmatch(name)]
        if strange := sorted({*files}.difference(tensors, [STATE])):
            raise ValueError(f"lists {strange[0]!r}, which is no file of a checkpoint")
        if not tensors or STATE not in files:
            raise ValueError(f"lists no {'file of tensors' if STATE in files else STATE}")
        manifest = _Manifest(
            step=untrusted.whole(read["step"]),
            samples_seen=untrusted.whole(read["samples_seen"]),
            files={name: untrusted.mapping(proof) for name, proof in files.items()},
        )
    if path.name != f"step-{manifest.step:08d}":
        raise CheckpointError(f"{path / MANIFEST}: is of step {manifest.step}")
    return manifest


def _versioned(path: Path) -> dict[str, object]:
    """Read a JSON object of this version."""
    read = untrusted.read_object(path)
    if (version := read["version"]) != VERSION:
        shown = version if isinstance(version, int) else repr(version)[:40]
        raise CheckpointError(f"{path}: format version {shown}, not {VERSION}")
    return read


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    """Make any failure to read a file of JSON ours, with its path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except KeyError as error:
        raise CheckpointError(f"{path}: not a {what} (no {error})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not a {what} ({error})") from error


def _check(path: Path, expected: Proof, *, by_size: bool) -> None:
    try:
        handle = untrusted.open_file(path)
        with os.fdopen(handle, "rb") as file:
            size = os.fstat(handle).st_size
            if size != expected.get("bytes"):
                raise CheckpointError(f"{path}: {size} bytes, not {_shown(expected.get('bytes'))}")
            if by_size:
                return
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if {"bytes": size, "sha256": digest} != expected:
        raise CheckpointError(f"{path}: SHA-256 differs from the manifest")


def _shown(size: object) -> str:
    good = isinstance(size, int) and 0 <= size <= untrusted.MOST
    return str(size) if good else "what the manifest says"


def tensor_files(path: Path) -> list[str]:
    """Name the files of tensors that a checkpoint consists of.

    Raises:
        CheckpointError: its manifest is damaged or missing.
    """
    return sorted(name for name in _manifest(path).files if name != STATE)


def read_state(path: Path) -> State:
    """Read the state of a checkpoint; what a later version has added is left out.

    Raises:
        CheckpointError: the file is missing, of another version, or damaged.
    """
    with _told(path / STATE, "state"):
        read = _versioned(path / STATE)
        config, scaler, frozen = read["config"], read.get("scaler", {}), read.get("frozen")
        if frozen is not None and not isinstance(frozen, list):
            raise ValueError("'frozen' is no list")
        loss = read.get("loss")
        return State(
            step=untrusted.whole(read["step"]),
            epoch=untrusted.whole(read["epoch"]),
            samples_seen=untrusted.whole(read["samples_seen"]),
            world_size=untrusted.whole(read["world_size"], least=1),
            identity=untrusted.mapping(read["identity"]),
            config=untrusted.mapping(config),
            scaler=_scaler(untrusted.mapping(scaler)),
            loss=None if loss is None else untrusted.number(loss),
            frozen=None if frozen is None else [untrusted.text(name) for name in frozen],
            rng=untrusted.text(read.get("rng", State.rng)),
        )


def _scaler(read: Mapping[str, object]) -> dict[str, float]:
    """Return the state of a loss scaler; there is none where the run needed none."""
    if not read:
        return {}
    scale = untrusted.number(read["scale"])
    if not 0 < scale < math.inf:
        raise ValueError(f"a loss cannot be scaled by {scale}")
    return {"scale": scale, "good_steps": untrusted.whole(read["good_steps"])}


def identity(path: Path) -> Mapping[str, object]:
    """Read which run a checkpoint belongs to; its tensors, which may be large, are not looked at.

    Raises:
        CheckpointError: its `state.json` is damaged or missing.
    """
    verify(path, [STATE])
    return read_state(path).identity


def measure(path: Path) -> Proof:
    """Give a file's size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def free_bytes(path: Path) -> float:
    """Say how much can be written at a path, which need not exist; infinite: it is unknown."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        disk = os.statvfs(there)
    except OSError:
        return math.inf
    # Some network file systems count nothing.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else math.inf


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
