"""The right to write to a run directory: it holds the same run, not finished and not in use."""

import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..checkpoints import store
from ..cli.config import EXACT, Config
from ..errors import CheckpointError, FencedError, RefusedError, UsageError
from ..runtime.process_group import RankGroup
from . import untrusted
from .console import Console, figures
from .files import VERSION, RunDirectory, write_atomically
from .jsonl import dump
from .lock import LOOK_S, NAME, Contender

RUN = "run.json"
NEVER_ADOPTED = {field.name for field in dataclasses.fields(Config)} - {"task"} | {"train_samples"}
"""Identity fields that no --adopt may change: the settings, and the order of the data."""

Identity = Mapping[str, object]

_OTHER_VERSION = "continue with the version that wrote it, or use another --run-dir"


class _OtherVersionError(ValueError):
    """`run.json` is of another version."""


def claim(
    directory: RunDirectory,
    identity: Identity,
    steps: int,
    group: RankGroup,
    *,
    adopt: str | None = None,
) -> str | None:
    """Claim the run directory; a returned text means that nothing is left to do.

    Rank 0 decides, since only its directory is sure to exist, and broadcasts the verdict. Each node
    looks for checkpoints of another run: the directory may be local to the node, and the run may
    resume from it.

    All ranks call this at once. `adopt`: another task name that the run in the directory may have;
    `adopt()` records the change later.

    Raises:
        UsageError: on all ranks; the directory holds another or an active run, or cannot be made.
        FencedError: on all ranks; a newer attempt has used the directory.
    """
    rank = group.rank_info.rank
    names = group.broadcast(_former_identities(directory, identity, adopt) if rank == 0 else [])
    first_of_node = group.rank_info.local_rank == 0
    strange = group.gather(
        _strange_checkpoint(directory, [identity, *names]) if first_of_node else ""
    )
    contender = Contender(directory.path / NAME, directory.rank_info, Console(rank=rank))
    verdict, text = "wait", ""
    # Broadcast after every look, so that waiting ranks never reach the timeout of a collective.
    while verdict == "wait":
        if rank == 0:
            checkpoints = [checkpoint for checkpoint in strange if checkpoint]
            verdict, text = _judge(directory, identity, steps, checkpoints, contender, adopt)
            time.sleep(LOOK_S if verdict == "wait" else 0.0)
        verdict, text = group.broadcast((verdict, text))
    errors = {"refused": RefusedError, "unusable": UsageError, "fenced": FencedError}
    if verdict in errors:
        raise errors[verdict](text)
    return text if verdict == "done" else None


def _judge(
    directory: RunDirectory,
    identity: Identity,
    steps: int,
    strange: Sequence[str],
    contender: Contender,
    adopt: str | None,
) -> tuple[str, str]:
    rank_info, path = directory.rank_info, directory.path
    try:
        try:
            holder, _ = _known_identities(directory)
        except _OtherVersionError as error:
            return "refused", f"{error}: {_OTHER_VERSION}"
        except ValueError as error:
            return "refused", (
                f"{path / RUN} is damaged ({error}), so its run is unknown: use "
                "another --run-dir, or remove that file if it belongs to this run"
            )
        if holder is not None and not may_adopt(holder, identity, adopt):
            return "refused", _other_run(path, holder, identity, adopt)
        if strange:
            return "refused", (
                f"{path} holds checkpoints of another configuration: remove them, or use another "
                "--run-dir, or the values recorded there:\n" + "\n".join(strange)
            )
        if why := directory.other_version():
            return "refused", f"{why}: {_OTHER_VERSION}"
        old = directory.read_outcome()
        if old and old.attempt > rank_info.attempt:
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
        if holder is None:
            content = {"version": VERSION, "identity": identity}
            write_atomically(path / RUN, dump(content, indent=2) + "\n")
        directory.write_outcome(directory.outcome_after(old, "running", "starting", steps=steps))
    except OSError as error:
        where = Path(error.filename or path)
        outside = "" if where.is_relative_to(path) else f" ({where})"
        if isinstance(error, untrusted.Refused):
            return "unusable", f"cannot use run directory {path}: {where.name} {error.strerror}"
        return "unusable", f"cannot use run directory {path}: {error.strerror}{outside}"
    return "mine", ""


def _taken(directory: RunDirectory, contender: Contender) -> tuple[str, str]:
    rank_info, holder = directory.rank_info, contender.holder
    if holder and holder.attempt > rank_info.attempt:
        return "fenced", _belongs(directory, holder.attempt)
    return "refused", (
        f"{directory.path} is in use: {holder.describe() if holder else 'by whom is not known'}; "
        "stop that run first, use another --run-dir, or take the run over from it with "
        f"TRAIN_ATTEMPT={rank_info.attempt + 1}"
    )


def _belongs(directory: RunDirectory, attempt: int) -> str:
    return (
        f"{directory.path} belongs to attempt {attempt}; this is attempt "
        f"{directory.rank_info.attempt}"
    )


def may_adopt(holder: Identity, identity: Identity, adopt: str | None) -> bool:
    """Whether two identities match, or `--adopt` allows the differences."""
    differing = {name for name in {*holder, *identity} if holder.get(name) != identity.get(name)}
    return not differing or (holder.get("task") == adopt and differing.isdisjoint(NEVER_ADOPTED))


def adopt(directory: RunDirectory, identity: Identity, step: int, console: Console) -> None:
    """Record a change of the run's identity, if any, in `run.json` and `events.jsonl`.

    Call it on rank 0 after all other checks, such as names and shapes of the checkpoint's tensors.
    From then on, checkpoints of the former identity belong to this run.
    """
    holder, former = _known_identities(directory)
    differing = [] if holder is None else differences(holder, identity)
    if differing:
        rank_info = directory.rank_info
        here = {"attempt": rank_info.attempt, "restart": rank_info.restart, "time": time.time()}
        adopted = [*former, {**here, "identity": holder}]
        content = {"version": VERSION, "identity": identity, "adopted": adopted}
        write_atomically(directory.path / RUN, dump(content, indent=2) + "\n")
        directory.event("adopted", step=step, differing=differing)
        console.say(f"adopted a run of another configuration: {'; '.join(differing)}")


def _other_run(path: Path, holder: Identity, identity: Identity, adopt: str | None) -> str:
    task, hint = holder.get("task"), ""
    if adopt is not None:
        never = sorted(name for name in NEVER_ADOPTED if holder.get(name) != identity.get(name))
        why = f"its task is {task!r}" if task != adopt else f"{', '.join(never)} must not differ"
        hint = f"--adopt {adopt} does not fit, as {why}: "
    elif task is not None and may_adopt(holder, identity, str(task)):
        hint = f"add --adopt {task} if its task is the same as this one, or "
    lines = "\n".join(f"  {line}" for line in differences(holder, identity))
    return (
        f"{path} holds a run of another configuration: {hint}use another --run-dir, or "
        f"the values recorded there:\n{lines}"
    )


def _strange_checkpoint(directory: RunDirectory, ours: Sequence[Identity]) -> str:
    """Describe this node's first checkpoint of another run, of any attempt; '' if it has none."""
    for position in store.list_committed(directory.path):
        path = position.path(directory.path)
        try:
            # Not the tensors, which may be large.
            store.verify(path, [store.STATE])
            there = store.read_state(path).identity
        except CheckpointError:
            continue  # recovery reports it, and takes nothing from it
        if all(differences(there, identity) for identity in ours):
            return "\n    ".join(
                [
                    f"  rank {directory.rank_info.rank} on {socket.gethostname()}: {path}",
                    *differences(there, ours[0]),
                ]
            )
    return ""


def _former_identities(
    directory: RunDirectory, identity: Identity, adopt: str | None
) -> list[Identity]:
    """List this run's other identities: those adopted earlier, and the one to be adopted now."""
    try:
        holder, former = _known_identities(directory)
    except (OSError, ValueError):
        return []  # `_judge()` reports the fault
    if holder is None or not may_adopt(holder, identity, adopt):
        return []
    adopted = (entry.get("identity") for entry in former)
    return [holder, *(identity for identity in adopted if isinstance(identity, dict))]


def _known_identities(
    directory: RunDirectory,
) -> tuple[dict[str, object] | None, list[dict[str, object]]]:
    """Read the identity of the run in the directory (None: no run), and its former identities.

    Raises:
        OSError: `run.json` exists but cannot be read.
        ValueError: `run.json` holds no identity, or has another version.
    """
    try:
        record = untrusted.read_object(directory.path / RUN)
    except FileNotFoundError:
        return None, []
    if not untrusted.is_of_version(record, VERSION):
        raise _OtherVersionError(
            f"{directory.path / RUN} is of {untrusted.shown_version(record)}, and this program "
            f"reads {VERSION}"
        )
    adopted = record.get("adopted")
    entries = adopted if isinstance(adopted, list) else []
    former = [entry for entry in entries if isinstance(entry, dict)]
    return untrusted.mapping(record.get("identity")), former


def differences(there: Identity, here: Identity) -> list[str]:
    """Name the fields in which two identities differ, with both values."""
    # One flag that adds fields.
    kinds = ["exact" if EXACT[0] in one else "fast" for one in (there, here)]
    if kinds[0] != kinds[1]:
        there, here = (
            {name: value for name, value in one.items() if name not in EXACT} | {"reduce": kind}
            for one, kind in zip((there, here), kinds, strict=True)
        )
    return [
        f"{untrusted.printable(name)}: {_shown(there.get(name))} there, "
        f"{_shown(here.get(name))} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)
