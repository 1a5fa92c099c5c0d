"""Whether the run directory is ours to go on with: the same run, not finished, no newer attempt."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence

from train.checkpoints import disk
from train.console import figures
from train.distributed import Group
from train.errors import CheckpointError, FencedError, RefusedError, UsageError
from train.rundir import VERSION, Outcome, RunDirectory, dump, write_atomically

RUN = "run.json"


def claim(
    directory: RunDirectory, identity: Mapping[str, object], steps: int, group: Group
) -> str | None:
    """Make the run directory ours; a text means that there is nothing left to do.

    Rank 0 decides, since only its directory is sure to exist, and all ranks hear of it. Each node
    looks for checkpoints of another run: its directory may be its own, and it may be resumed from.

    Raises:
        UsageError: on all ranks; there is another run, or the directory cannot be made.
        FencedError: on all ranks; a newer attempt was here.
    """
    looks = group.place.local_rank == 0
    strange = group.gather(_strange_checkpoint(directory, identity) if looks else "")
    verdict, text = "", ""
    if group.place.rank == 0:
        verdict, text = _judge(directory, identity, steps, [found for found in strange if found])
    verdict, text = group.broadcast((verdict, text))
    match verdict:
        case "refused":
            raise RefusedError(text)
        case "unusable":
            raise UsageError(text)
        case "fenced":
            raise FencedError(text)
        case "done":
            return text
    return None


def _judge(
    directory: RunDirectory, identity: Mapping[str, object], steps: int, strange: Sequence[str]
) -> tuple[str, str]:
    place, path = directory.place, directory.path
    try:
        known = _known_identity(directory)
        if differing := differences(known, identity) if known is not None else []:
            return "refused", (
                f"{path} holds a run of another configuration; use another --run-dir or:\n"
                + "\n".join(f"  {line}" for line in differing)
            )
        if strange:
            return "refused", (
                f"{path} holds checkpoints of another configuration; remove them, use another "
                "--run-dir or:\n" + "\n".join(strange)
            )
        old = directory.read_outcome()
        if old and old.attempt > place.attempt:
            text = f"{path} belongs to attempt {old.attempt}; this is attempt {place.attempt}"
            return "fenced", text
        if old and old.status == "done" and old.step >= steps:
            return "done", (
                f"already done: step {old.step}/{steps}, {figures(old.metrics)} · "
                f"run directory {path}"
            )
        path.mkdir(parents=True, exist_ok=True)
        if known is None:
            content = {"version": VERSION, "identity": identity}
            write_atomically(path / RUN, dump(content, indent=2) + "\n")
        directory.write_outcome(
            Outcome(
                status="running",
                attempt=place.attempt,
                restart=place.restart,
                step=old.step if old else 0,
                steps=steps,
                samples_seen=old.samples_seen if old else 0,
                rank=None,
                reason="starting",
            )
        )
    except OSError as error:
        return "unusable", f"cannot use run directory {path}: {error.strerror} ({error.filename})"
    return "mine", ""


def _strange_checkpoint(directory: RunDirectory, identity: Mapping[str, object]) -> str:
    """Name this node's first checkpoint of another run, of whatever attempt; else say nothing."""
    for position in disk.places(directory.path):
        path = position.path(directory.path)
        try:
            differing = differences(disk.identity(path), identity)
        except CheckpointError:
            continue  # recovery reports it, and takes nothing from it
        if differing:
            return "\n    ".join(
                [f"  rank {directory.place.rank} on {socket.gethostname()}: {path}", *differing]
            )
    return ""


def _known_identity(directory: RunDirectory) -> dict[str, object] | None:
    try:
        identity: dict[str, object] = json.loads((directory.path / RUN).read_text())["identity"]
        return identity
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return {}


def differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """Name the fields in which two identities differ, with both values."""
    return [
        f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
