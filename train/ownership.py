"""Whether the run directory is ours to go on with: the same run, not finished, nobody in it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.checkpoints import disk
from train.console import Console, figures
from train.distributed import Group
from train.errors import CheckpointError, FencedError, RefusedError, UsageError
from train.holder import LOOK_S, NAME, Contender
from train.jsontext import dump
from train.rundir import VERSION, Outcome, RunDirectory, write_atomically

RUN = "run.json"


def claim(
    directory: RunDirectory, identity: Mapping[str, object], steps: int, group: Group
) -> str | None:
    """Make the run directory ours; a text means that there is nothing left to do.

    Rank 0 decides, since only its directory is sure to exist, and all ranks hear of it. Each node
    looks for checkpoints of another run: its directory may be its own, and it may be resumed from.

    Raises:
        UsageError: on all ranks; there is another run, or the same one lives, or the directory
            cannot be made.
        FencedError: on all ranks; a newer attempt was here.
    """
    looks = group.place.local_rank == 0
    strange = group.gather(_strange_checkpoint(directory, identity) if looks else "")
    contender = Contender(directory.path / NAME, directory.place, Console(rank=group.place.rank))
    verdict, text = "wait", ""
    # Look by look, so that no rank waits longer in a collective than it has patience.
    while verdict == "wait":
        if group.place.rank == 0:
            found = [checkpoint for checkpoint in strange if checkpoint]
            verdict, text = _judge(directory, identity, steps, found, contender)
            time.sleep(LOOK_S if verdict == "wait" else 0.0)
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
    directory: RunDirectory,
    identity: Mapping[str, object],
    steps: int,
    strange: Sequence[str],
    contender: Contender,
) -> tuple[str, str]:
    place, path = directory.place, directory.path
    try:
        known = _known_identity(directory)
        if differing := differences(known, identity) if known is not None else []:
            return "refused", (
                f"{path} holds a run of another configuration: give this one another --run-dir, or "
                "the values that stand there:\n" + "\n".join(f"  {line}" for line in differing)
            )
        if strange:
            return "refused", (
                f"{path} holds checkpoints of another configuration: remove them, or give this run "
                "another --run-dir, or the values that stand there:\n" + "\n".join(strange)
            )
        old = directory.read_outcome()
        if old and old.attempt > place.attempt:
            return "fenced", _belongs(directory, old.attempt)
        if old and old.status == "done" and old.step >= steps:
            return "done", (
                f"already done: step {old.step}/{steps}, {figures(old.metrics)} · "
                f"run directory {path}"
            )
        path.mkdir(parents=True, exist_ok=True)
        ended = old.try_number if old and old.status != "running" else None
        if (verdict := contender.look(ended=ended)) == "taken":
            return _taken(directory, contender)
        if verdict == "wait":
            return "wait", ""
        if contender.hold:
            directory.taken_over = contender.hold.lost
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
        where = Path(error.filename or path)
        outside = "" if where.is_relative_to(path) else f" ({where})"
        return "unusable", f"cannot use run directory {path}: {error.strerror}{outside}"
    return "mine", ""


def _taken(directory: RunDirectory, contender: Contender) -> tuple[str, str]:
    place, holder = directory.place, contender.holder
    if holder and holder.attempt > place.attempt:
        return "fenced", _belongs(directory, holder.attempt)
    return "refused", (
        f"{directory.path} is in use: {holder.describe() if holder else 'by whom is not known'}; "
        "stop that run first, use another --run-dir, or take the run over from it with "
        f"TRAIN_ATTEMPT={place.attempt + 1}"
    )


def _belongs(directory: RunDirectory, attempt: int) -> str:
    return (
        f"{directory.path} belongs to attempt {attempt}; this is attempt {directory.place.attempt}"
    )


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
        f"{name}: {_shown(there.get(name))} there, {_shown(here.get(name))} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)
