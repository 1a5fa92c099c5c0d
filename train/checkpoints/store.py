"""A checkpoint on disk: its layout, and the conditions for being whole.

checkpoints/attempt-<A>/step-<NNNNNNNN>/{rank-<NNNNN>.safetensors,state.json,manifest.json}

Every function that reads a file raises a CheckpointError if it is missing, damaged, or of another
version.
"""

import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..rundir import untrusted
from ..rundir.files import VERSION
from ..rundir.jsonl import dump

STATE = "state.json"
MANIFEST = "manifest.json"
_TENSORS = re.compile(r"rank-[0-9]+\.safetensors", re.ASCII)
Proof = Mapping[str, object]
"""Size and SHA-256 of a file, as listed in the manifest."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The contents of `state.json`: the state of the run at one step, except the tensors."""

    step: int
    """Optimizer steps made."""
    epoch: int
    """Whole passes over the training data."""
    samples_seen: int
    """Training samples drawn; the whole state of the data order."""
    world_size: int
    """How many ranks wrote the checkpoint; any number may read it."""
    identity: Mapping[str, object]
    """Which run the checkpoint belongs to."""
    config: Mapping[str, object]
    """The command line that wrote this."""
    scaler: Mapping[str, float] = field(default_factory=dict)
    """The loss scale, if there is one."""
    loss: float | None = None
    """Loss of the last step, over all ranks."""
    frozen: Sequence[str] | None = None
    """Parameters that were not trained; None: not recorded."""
    rng: str = "sha256(seed, step, *axes)"
    """How each step's generators are seeded: a function, so no generator state must be saved.

    `axes` are the rank's coordinates along those mesh axes where ranks draw different numbers.
    """


@dataclass(frozen=True, kw_only=True, order=True)
class Position:
    """Attempt and step of a checkpoint: a later attempt ranks above a higher step."""

    attempt: int
    """The attempt that wrote it."""
    step: int
    """Optimizer steps made before the checkpoint."""

    def path(self, run_dir: Path) -> Path:
        """Directory of the checkpoint; no other attempt writes in its parent."""
        return run_dir / "checkpoints" / f"attempt-{self.attempt}" / f"step-{self.step:08d}"

    def draft(self, run_dir: Path) -> Path:
        """Directory of the unfinished checkpoint; the commit renames it."""
        path = self.path(run_dir)
        return path.with_name(path.name + ".tmp")


def tensor_file(rank: int) -> str:
    """Name of the file with one rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def list_committed(run_dir: Path, *, up_to_attempt: float = math.inf) -> list[Position]:
    """List the committed checkpoints of this attempt and earlier ones, best first."""
    positions = []
    for attempt, path in entries(run_dir, up_to_attempt):
        step = path.name.removeprefix("step-")
        # `step-N.tmp` is a write that a kill cut short.
        if step.isdecimal():
            positions.append(Position(attempt=attempt, step=int(step)))
    return sorted(positions, reverse=True)


def entries(run_dir: Path, up_to_attempt: float) -> Iterator[tuple[int, Path]]:
    """Yield attempt and path of each checkpoint and draft of this attempt and earlier ones."""
    for path in run_dir.glob("checkpoints/attempt-*/step-*"):
        attempt = path.parent.name.removeprefix("attempt-")
        if attempt.isdecimal() and int(attempt) <= up_to_attempt:
            yield int(attempt), path


def begin(draft: Path) -> None:
    """Create an empty directory to write into; it survives a power loss."""
    shutil.rmtree(draft, ignore_errors=True)
    new = [path for path in (draft, *draft.parents) if not path.exists()]
    draft.mkdir(parents=True)
    for path in new:
        sync(path.parent)


def write_manifest(draft: Path, state: State, files: Mapping[str, Proof]) -> None:
    """Add state and manifest to the files of tensors, which are on the disk already.

    Raises:
        OSError: a file could not be written, or differs from its writer's description.
    """
    for name, proof in files.items():
        # Another node may have written the file: is it the same directory?
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
    """Rename a complete draft: from now on it is a checkpoint, even after a power loss."""
    replaced = path.with_name(path.name + ".old.tmp")
    if path.exists():
        # It is damaged: the run would have resumed from a whole one.
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
        by_size: look at sizes only, which is quick and finds truncated and missing files.
    """
    proofs, progress = _manifest(path)
    if names is None:
        first, every = share
        names = sorted(proofs)[first::every]
    for name in names:
        _check(path / name, proofs[name], by_size=by_size)
    if STATE in names and not by_size:
        state = read_state(path)
        for word, there in progress.items():
            if (here := getattr(state, word)) != there:
                raise CheckpointError(f"{path / STATE}: {word} {here}, not {there}")


def _manifest(path: Path) -> tuple[dict[str, Proof], dict[str, int]]:
    """Read the list of a checkpoint's files, and the progress in its state."""
    with _reading(path / MANIFEST) as record:
        files = untrusted.mapping(record["files"])
        # Accept only names from `complete()`, so that none leads out of the folder.
        tensors = [name for name in files if _TENSORS.fullmatch(name)]
        if strange := sorted({*files}.difference(tensors, [STATE])):
            raise ValueError(f"lists {strange[0]!r}, which is not a checkpoint file")
        if not tensors or STATE not in files:
            raise ValueError(f"lists no {'file of tensors' if STATE in files else STATE}")
        proofs = {name: untrusted.mapping(proof) for name, proof in files.items()}
        progress = {name: untrusted.whole(record[name]) for name in ("step", "samples_seen")}
    if path.name != f"step-{progress['step']:08d}":
        raise CheckpointError(f"{path / MANIFEST}: is of step {progress['step']}")
    return dict(proofs), progress


@contextmanager
def _reading(path: Path) -> Iterator[dict[str, object]]:
    """Read a JSON object of this version; turn any failure into a CheckpointError with its path."""
    try:
        record = untrusted.read_object(path)
        if (version := record["version"]) != VERSION:
            shown = version if isinstance(version, int) else repr(version)[:40]
            newer = isinstance(version, int) and version > VERSION
            way_out = "; a newer version of train/ wrote it, and can read it" if newer else ""
            raise CheckpointError(f"{path}: format version {shown}, not {VERSION}{way_out}")
        yield record
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        fault = f"no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{path}: not a {path.stem} ({fault})") from error


def _check(path: Path, expected: Proof, *, by_size: bool) -> None:
    try:
        handle = untrusted.open_file(path)
        with os.fdopen(handle, "rb") as file:
            size, stated = os.fstat(handle).st_size, expected.get("bytes")
            if size != stated:
                plausible = isinstance(stated, int) and 0 <= stated <= untrusted.MOST
                shown = stated if plausible else "what the manifest says"
                raise CheckpointError(f"{path}: {size} bytes, not {shown}")
            if by_size:
                return
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if {"bytes": size, "sha256": digest} != expected:
        raise CheckpointError(f"{path}: SHA-256 differs from the manifest")


def tensor_files(path: Path) -> list[str]:
    """Return the names of a checkpoint's files of tensors."""
    proofs, _ = _manifest(path)
    return sorted(name for name in proofs if name != STATE)


def read_state(path: Path) -> State:
    """Read the state of a checkpoint; ignore fields that a later version has added."""
    with _reading(path / STATE) as record:
        # A run that needed no loss scaler has none.
        scaler: dict[str, float] = {}
        if entry := untrusted.mapping(record.get("scaler", {})):
            scale = untrusted.number(entry["scale"])
            if not 0 < scale < math.inf:
                raise ValueError(f"a loss cannot be scaled by {scale}")
            scaler = {"scale": scale, "good_steps": untrusted.whole(entry["good_steps"])}
        loss, frozen = record.get("loss"), record.get("frozen")
        if frozen is not None and not isinstance(frozen, list):
            raise ValueError("'frozen' is not a list")
        return State(
            step=untrusted.whole(record["step"]),
            epoch=untrusted.whole(record["epoch"]),
            samples_seen=untrusted.whole(record["samples_seen"]),
            world_size=untrusted.whole(record["world_size"], least=1),
            identity=untrusted.mapping(record["identity"]),
            config=untrusted.mapping(record["config"]),
            scaler=scaler,
            loss=None if loss is None else untrusted.number(loss),
            frozen=None if frozen is None else [untrusted.text(name) for name in frozen],
            rng=untrusted.text(record.get("rng", State.rng)),
        )


def measure(path: Path) -> Proof:
    """Return a file's size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def free_bytes(path: Path) -> float:
    """Return the free bytes at a path, which need not exist; infinite if unknown."""
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        disk = os.statvfs(existing)
    except OSError:
        return math.inf
    # Some network file systems do not report free space.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else math.inf


def sync(path: Path) -> None:
    """Force a file, or a directory's entries, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(path: Path) -> None:
    """Remove a draft; one that cannot be removed still never counts as a checkpoint."""
    with suppress(OSError):
        shutil.rmtree(path)
