"""The folders that torchrun leaves in an attempt's, and which of its reports belongs to which.

    logs/attempt-N/node-KEY/RUN_ID/attempt_RESTART/LOCAL_RANK/{stdout.log,stderr.log,error.json}

`KEY` is the node's number, or `joined-by-JOB`. One torchrun has one `RUN_ID`; a node has several of
them where its torchrun was started anew.
"""

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.launchers.run_logs import Span, attempt_spans
from toolkit.launchers.torchrun_log import Reported, read_reports

__all__ = ["Start", "reports_of", "shift_s", "starts_of"]

_LOG_BYTES = 8 << 20
"""How much of the end of an attempt's log may hold torchrun's reports, one per node."""

_STDERR_BYTES = 1 << 16

_QUARTER_S = 900
"""Time zones differ by multiples of this; that of a container may not be ours."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a rank."""

    folder: Path
    """Where its output and its error file lie."""

    key: str
    """Of its node."""

    node: str
    """Its node's name; `node-1` on this machine."""

    restart: int
    """How often its torchrun had started the ranks before."""

    last: bool = True
    """Whether its node has started no other after it."""

    @property
    def local_rank(self) -> int:
        """Its number on its node."""
        return int(self.folder.name)

    def stderr(self) -> list[str]:
        """Return the last lines of what it has printed."""
        return _end_of(Span(path=self.folder / "stderr.log"), _STDERR_BYTES)

    def silent_since(self) -> float:
        """Return when it has written to its stderr last."""
        return (self.folder / "stderr.log").stat().st_mtime

    def error(self) -> tuple[str, tuple[str, ...], float] | None:
        """Return message, traceback and time of its error file."""
        path = self.folder / "error.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text(encoding="utf-8"))["message"]
            stamp = float(said["extraInfo"]["timestamp"])
            trace = str(said["extraInfo"].get("py_callstack") or "")
            written = path.stat().st_mtime  # finer than the whole seconds in it
            time = written if 0 <= written - stamp < 2 else stamp
            return (
                str(said["message"]),
                tuple(trace.rstrip("\n").split("\n") if trace else ()),
                time,
            )
        return None


def starts_of(attempt: Path) -> list[Start]:
    """Return all starts of ranks in the folder of an attempt."""
    found = []
    for node in sorted(attempt.glob("node-*/")):
        key = node.name.removeprefix("node-")
        groups = sorted(node.glob("*/attempt_*/"), key=_age)
        for group in groups:
            restart = int(group.name.removeprefix("attempt_"))
            for folder in sorted(group.iterdir()):
                if folder.name.isdecimal() and folder.is_dir():
                    name = _name_of(attempt, key)
                    last = group == groups[-1]
                    start = Start(folder=folder, key=key, node=name, restart=restart, last=last)
                    found.append(start)
    return found


def _age(group: Path) -> tuple[float, int]:
    """Order the starts of a node: those of one torchrun by their number, torchruns by their age."""
    with contextlib.suppress(OSError, ValueError):
        return group.parent.stat().st_mtime, int(group.name.removeprefix("attempt_"))
    return 0.0, 0


def _name_of(attempt: Path, key: str) -> str:
    with contextlib.suppress(OSError, IndexError):
        if key.isdecimal():
            return (attempt / "nodes").read_text(encoding="utf-8").splitlines()[int(key)]
        return (attempt / f"failed-{key}").read_text(encoding="utf-8").split()[1]
    return f"node-{key}"


def reports_of(run_dir: Path, attempt: Path, starts: list[Start]) -> dict[Start, Reported]:
    """Return what torchrun reports of the ranks that have failed, each with its last start."""
    found: dict[Start, Reported] = {}
    for span in attempt_spans(run_dir, int(attempt.name.split("-")[1])):
        key = span.path.stem.removeprefix("node-") if span.path.parent == attempt else None
        for said in read_reports(_end_of(span, _LOG_BYTES)):
            found[_start_of(said, key, starts, attempt)] = said
    shifts = list(filter(None, (_shift(start, said) for start, said in found.items())))
    if not shifts:
        return found
    return {start: replace(said, time=said.time + shifts[0]) for start, said in found.items()}


def _start_of(said: Reported, key: str | None, starts: list[Start], attempt: Path) -> Start:
    for start in starts:
        path = start.folder.relative_to(attempt.parent) / "error.json"
        if said.error_file.endswith(f"/{path}"):  # the run directory may be another's mirror
            return start
    last = [start for start in starts if start.last and start.local_rank == said.local_rank]
    for start in last:
        if start.key == key or start.node.partition(".")[0] == said.host or len(last) == 1:
            return start
    return Start(  # of a node that names itself otherwise than Slurm does
        folder=attempt / "elsewhere" / said.host / str(said.local_rank),
        key=said.host,
        node=said.host,
        restart=0,
    )


def _shift(start: Start, said: Reported) -> int:
    """Return by how much the clock of a report is in another time zone than ours, in seconds."""
    if (error := start.error()) is None:
        return 0
    away = error[2] - said.time
    shift = shift_s(away)
    return shift if abs(away - shift) < 30 else 0


def shift_s(away_s: float) -> int:
    """Return how far two time zones are apart whose clocks show times that differ by so much."""
    return round(away_s / _QUARTER_S) * _QUARTER_S


def _end_of(span: Span, most: int) -> list[str]:
    """Return the last lines of a part of a file."""
    with contextlib.suppress(OSError), span.path.open("rb") as file:
        size = file.seek(0, 2)
        end = size if span.end is None else min(span.end, size)
        begin = max(span.start, end - most)
        file.seek(begin)
        return file.read(max(0, end - begin)).decode(errors="replace").split("\n")
    return []
