"""The folders that torchrun leaves in an attempt's, and which of its reports belongs to which.

    logs/attempt-N/node-KEY/RUN_ID/attempt_RESTART/LOCAL_RANK/{stdout.log,stderr.log,error.json}

`KEY` is the node's number, or `joined-by-JOB`. One torchrun has one `RUN_ID`; a node has several of
them where its torchrun was started anew.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.runs.log_reader import Span, attempt_spans
from toolkit.runs.torchrun_report import Reported, read_reports
from toolkit.text import untrusted

__all__ = ["Start", "reports_of", "shift_s", "starts_of"]

_LOG_BYTES = 8 << 20
"""How much of the end of an attempt's log may hold torchrun's reports, one per node."""

_STDERR_BYTES = 1 << 16
_ERROR_BYTES = 4 << 20

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_GROUP = re.compile(r"attempt_([0-9]{1,9})", re.ASCII)

_LAST_STAMP = 32503680000.0
"""The year 3000, in seconds since 1970: beyond some year a clock's time cannot be written."""

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
        """Return the last lines of the rank's stderr."""
        return _end_of(Span(path=self.folder / "stderr.log", below=self._run_dir), _STDERR_BYTES)

    def silent_since(self) -> float:
        """Return when it has written to its stderr last."""
        return (self.folder / "stderr.log").lstat().st_mtime

    def error(self) -> tuple[str, tuple[str, ...], float] | None:
        """Return message, traceback and time of its error file."""
        path = self.folder / "error.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            content = untrusted.read_json(path, limit=_ERROR_BYTES, below=self._run_dir)
            message = untrusted.mapping(untrusted.mapping(content)["message"])
            extra = untrusted.mapping(message["extraInfo"])
            # A number, or one as text; the years that a clock can show.
            stamp = untrusted.finite(float(str(extra["timestamp"])[:40]))
            if stamp is None or not 0 <= stamp < _LAST_STAMP:
                return None
            trace = str(extra.get("py_callstack") or "")
            written = path.lstat().st_mtime  # finer than the whole seconds in it
            time = written if 0 <= written - stamp < 2 else stamp
            return (
                str(message["message"]),
                tuple(trace.rstrip("\n").split("\n") if trace else ()),
                time,
            )
        return None

    @property
    def _run_dir(self) -> Path | None:
        """The run directory, below which nothing is a link; None for a rank that is elsewhere."""
        parents = self.folder.parents  # group, RUN_ID, node, attempt, logs, run directory
        return parents[5] if len(parents) > 5 and parents[4].name == "logs" else None


def starts_of(attempt: Path) -> list[Start]:
    """Return all starts of ranks in the folder of an attempt."""
    starts = []
    for node in _folders(attempt, attempt):
        if not node.name.startswith("node-"):
            continue
        key = node.name.removeprefix("node-")
        name = _name_of(attempt, key)
        groups = sorted(_groups(node, attempt), key=_age)
        for group, restart in groups:
            for folder in _folders(group, attempt):
                if _NUMBER.fullmatch(folder.name):
                    last = group == groups[-1][0]
                    start = Start(folder=folder, key=key, node=name, restart=restart, last=last)
                    starts.append(start)
    return starts


def _groups(node: Path, attempt: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of a node's starts, each with the start's number."""
    for torchrun in _folders(node, attempt):
        for group in _folders(torchrun, attempt):
            if named := _GROUP.fullmatch(group.name):
                yield group, int(named[1])


def _folders(folder: Path, attempt: Path) -> list[Path]:
    run_dir = attempt.parents[1]
    return [folder / e.name for e in untrusted.entries(folder, below=run_dir) if e.is_folder]


def _age(group: tuple[Path, int]) -> tuple[float, int]:
    """Order the starts of a node: those of one torchrun by their number, torchruns by their age."""
    with contextlib.suppress(OSError):
        return group[0].parent.lstat().st_mtime, group[1]
    return 0.0, 0


def _name_of(attempt: Path, key: str) -> str:
    run_dir = attempt.parents[1]
    with contextlib.suppress(OSError, IndexError):
        if _NUMBER.fullmatch(key):
            return untrusted.read_text(attempt / "nodes", below=run_dir).splitlines()[int(key)]
        return untrusted.read_text(attempt / f"failed-{key}", below=run_dir).split()[1]
    return f"node-{key}"


def reports_of(run_dir: Path, attempt: Path, starts: list[Start]) -> dict[Start, Reported]:
    """Return what torchrun reports of the ranks that have failed, each with its last start."""
    reports: dict[Start, Reported] = {}
    for span in attempt_spans(run_dir, int(attempt.name.split("-")[1])):
        key = span.path.stem.removeprefix("node-") if span.path.parent == attempt else None
        for reported in read_reports(_end_of(span, _LOG_BYTES)):
            reports[_start_of(reported, key, starts, attempt)] = reported
    shifts = list(filter(None, (_shift(start, reported) for start, reported in reports.items())))
    if not shifts:
        return reports
    return {
        start: replace(reported, time=reported.time + shifts[0])
        for start, reported in reports.items()
    }


def _start_of(reported: Reported, key: str | None, starts: list[Start], attempt: Path) -> Start:
    for start in starts:
        path = start.folder.relative_to(attempt.parent) / "error.json"
        if reported.error_file.endswith(f"/{path}"):  # the run directory may be another's mirror
            return start
    last = [start for start in starts if start.last and start.local_rank == reported.local_rank]
    for start in last:
        if start.key == key or start.node.partition(".")[0] == reported.host or len(last) == 1:
            return start
    return Start(  # of a node that names itself otherwise than Slurm does
        folder=attempt / "elsewhere" / reported.host / str(reported.local_rank),
        key=reported.host,
        node=reported.host,
        restart=0,
    )


def _shift(start: Start, reported: Reported) -> int:
    """Return by how much the clock of a report is in another time zone than ours, in seconds."""
    if (error := start.error()) is None:
        return 0
    away = error[2] - reported.time
    shift = shift_s(away)
    return shift if abs(away - shift) < 30 else 0


def shift_s(away_s: float) -> int:
    """Return how far two time zones are apart whose clocks show times that differ by so much."""
    return round(away_s / _QUARTER_S) * _QUARTER_S


def _end_of(span: Span, most: int) -> list[str]:
    """Return the last lines of a part of a file."""
    with (
        contextlib.suppress(OSError),
        untrusted.open_untrusted(span.path, below=span.below) as file,
    ):
        size = file.seek(0, 2)
        end = size if span.end is None else min(span.end, size)
        begin = max(span.start, end - most)
        file.seek(begin)
        return file.read(max(0, end - begin)).decode(errors="replace").split("\n")
    return []
