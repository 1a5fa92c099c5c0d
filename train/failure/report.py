"""How an error is reported: to people once per machine, and to torchrun for its report.

At its end torchrun prints what each failed rank has left in its error file, and takes the earliest
of them for the root cause.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from train.rundir import untrusted
from train.runtime.rank import RankInfo

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# By so much an echo is dated too late, so that its cause comes first: torchrun counts in seconds,
# and dates a rank that was killed by when it has noticed.
ECHO_S = 10


def tell(rank_info: RankInfo, text: str, *, trace: str = "", summary: str = "") -> None:
    """Print an error, unless another rank of this machine has; report to torchrun in any case.

    Args:
        rank_info: the rank that has found it.
        text: what is wrong.
        trace: a traceback to print before it; then the error is this rank's own.
        summary: the message for torchrun, if it differs from the text.
    """
    said_by = _said_by(rank_info, text, own=bool(trace))
    if not said_by:
        _print(rank_info, text, own=bool(trace), trace=trace)
    tell_torchrun(f"the same as {said_by}" if said_by else summary or text, echo=bool(said_by))


def tell_echo(rank_info: RankInfo, text: str) -> None:
    """Do so for an error that is only what this rank has noticed of another's."""
    if not _said_by(rank_info, "echo", own=True):
        _print(rank_info, text, own=True)
    tell_torchrun(text, echo=True)


def tell_torchrun(text: str, *, echo: bool = False) -> None:
    """Leave a text for torchrun's report; an echo is never its root cause."""
    if not (named := os.environ.get(ERROR_FILE)):
        return
    date = int(time.time()) + (ECHO_S if echo else 0)
    record = {"message": {"message": text, "extraInfo": {"timestamp": str(date)}}}
    with suppress(OSError):
        Path(named).write_text(json.dumps(record), encoding="utf-8")


def _print(rank_info: RankInfo, text: str, *, own: bool, trace: str = "") -> None:
    who = ""
    if own and rank_info.world_size > 1:
        who = f"rank {rank_info.rank}: "
    elif rank_info.rank != rank_info.local_rank:
        who = f"on {socket.gethostname()}: "
    # In one write: ranks that share a terminal would mix their lines.
    print(f"{trace}train: {who}{text}\n", end="", file=sys.stderr, flush=True)


def _said_by(rank_info: RankInfo, text: str, *, own: bool) -> str:
    """Return the rank of this machine that reported the same first, which may be this one."""
    folder = _common_folder(rank_info)
    if folder is None:
        # Nobody to ask: rank 0 reports an error that all ranks have.
        return "" if own or rank_info.rank == 0 else "rank 0"
    note = folder / f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        with note.open("x", encoding="utf-8") as file:
            file.write(f"rank {rank_info.rank}")
    except FileExistsError:
        return _read(note) or "another rank"
    except OSError:
        pass  # reporting twice is better than never
    return ""


def _read(note: Path) -> str:
    with suppress(OSError):
        return untrusted.read_bytes(note, limit=100).decode("utf-8", "replace")
    return ""


def _common_folder(rank_info: RankInfo) -> Path | None:
    """Find a folder that the ranks of this machine, and no others, have in this try."""
    if named := os.environ.get(ERROR_FILE):
        own = Path(named).parent
        # torchrun's FOLDER/attempt_0/LOCAL_RANK/error.json
        return own.parent if own.name == str(rank_info.local_rank) else None
    if rank_info.meeting and rank_info.meeting.startswith("file://"):
        return Path(rank_info.meeting.removeprefix("file://")).parent
    return None
