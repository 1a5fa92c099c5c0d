"""The folder that torchrun creates for each rank start: its output, and its error file.

    logs/attempt-N/node-KEY/RUN_ID/attempt_RESTART/LOCAL_RANK/{stdout.log,stderr.log,error.json}

`KEY` is the node's number, or `joined-by-JOB`. Each torchrun process has one `RUN_ID`; a node has
several if torchrun was started again there. Each torchrun report belongs to one rank start. For a
pod, the folder is named after the pod instead of `node-KEY`.
"""

import contextlib
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from toolkit.runs.records.log_reader import Span, attempt_spans, end_of, modified_at, nodes_of
from toolkit.supervisor.evidence.torchrun_report import Reported, read_reports, shift_s
from toolkit.text import untrusted

_LOG_BYTES = 8 << 20
"""How much of the log's end is searched for torchrun's reports, one per node."""

_STDERR_BYTES = 1 << 16
_ERROR_BYTES = 4 << 20
_NOTE_BYTES = 1 << 12

_LONGEST, _MOST_LINES = 50_000, 1000
"""Character limit of a message and of a traceback, and line limit of its end, which is shown."""

_SPREAD_S = 5.0
"""The torchrun processes of a run start their ranks within this many seconds."""

_WATCHDOG = "watchdog"
"""The only folder of an attempt that does not belong to a node."""

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_GROUP = re.compile(r"attempt_([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """One start of one rank."""

    folder: Path
    """The folder with its output and its error file."""

    key: str
    """The key of its node."""

    node: str
    """Its node's name; `node-1` on this machine."""

    restart: int
    """The number of earlier rank starts by its torchrun."""

    last: bool = True
    """Whether it is the last start on its node."""

    has_files: bool = True
    """Whether its folder is known."""

    @property
    def local_rank(self) -> int:
        """Its number on its node."""
        return int(self.folder.name)

    @property
    def began(self) -> float:
        """When torchrun created the folders of its node's ranks, in seconds since 1970."""
        return modified_at(self.folder.parent)

    @property
    def _run_dir(self) -> Path | None:
        """The run directory, below which no link is followed; None for a rank elsewhere."""
        parents = self.folder.parents  # group, RUN_ID, node, attempt, logs, run directory
        return parents[5] if len(parents) > 5 and parents[4].name == "logs" else None

    def stderr(self) -> list[str]:
        """Return the last lines of the rank's stderr."""
        span = Span(path=self.folder / "stderr.log", below=self._run_dir)
        return _last_lines(span, _STDERR_BYTES) if self.has_files else []

    def silent_since(self) -> float:
        """Return the time of its last write to stderr."""
        return (self.folder / "stderr.log").lstat().st_mtime

    def error(self) -> tuple[str, tuple[str, ...], float] | None:
        """Return message, traceback and time from its error file."""
        if not self.has_files:
            return None
        path = self.folder / "error.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            content = untrusted.read_json(path, limit=_ERROR_BYTES, below=self._run_dir)
            message = untrusted.mapping(untrusted.mapping(content)["message"])
            extra = untrusted.mapping(message["extraInfo"])
            stamp = untrusted.moment(float(str(extra["timestamp"])[:40]))  # a number or string
            if stamp is None:
                return None
            trace = str(extra.get("py_callstack") or "").rstrip("\n")[-_LONGEST:]
            lines = trace.split("\n")[-_MOST_LINES:] if trace else ()
            written = path.lstat().st_mtime  # more precise than the file's whole seconds
            time = written if 0 <= written - stamp < 2 else stamp
            return untrusted.shortened(str(message["message"]), _LONGEST), tuple(lines), time
        return None


def starts_of(attempt: Path) -> list[RankStart]:
    """Return all rank starts in an attempt's folder."""
    starts, names = [], nodes_of(attempt)
    for node in _folders(attempt, attempt):
        if node.name == _WATCHDOG:
            continue
        key = node.name.removeprefix("node-")
        name = key if key == node.name else _name_of(attempt, key, names)
        # The torchrun processes by age, and the groups of each by number.
        groups = sorted(
            (modified_at(torchrun), int(named[1]), group)
            for torchrun in _folders(node, attempt)
            for group in _folders(torchrun, attempt)
            if (named := _GROUP.fullmatch(group.name))
        )
        for _, restart, group in groups:
            last = group == groups[-1][2]
            starts += [
                RankStart(folder=folder, key=key, node=name, restart=restart, last=last)
                for folder in _folders(group, attempt)
                if _NUMBER.fullmatch(folder.name)
            ]
    return starts


def begins_of(times: Iterable[tuple[float, str]]) -> list[float]:
    """Return the times of an attempt's rank starts, each once for all nodes together.

    Each node's torchrun counts separately: a node without failed ranks restarts its ranks in the
    same folder. So the folders' times give the number of starts, their numbers do not.

    Args:
        times: When ranks were given their folders, and on which node.

    >>> begins_of([(0.0, "a"), (60.5, "b"), (90.0, "a"), (90.1, "b")])  # b has failed at 90
    [0.0, 60.5, 90.0]
    """
    begins: list[float] = []
    nodes = set[str]()
    for time, node in sorted(times):
        if not begins or node in nodes or time - begins[-1] > _SPREAD_S:
            begins.append(time)
            nodes.clear()
        nodes.add(node)
    return begins


def count_starts(attempt: Path, *, most_nodes: int) -> int:
    """Return the number of an attempt's rank starts, by the folders of some nodes."""
    nodes = [node for node in _folders(attempt, attempt) if node.name != _WATCHDOG]
    return len(
        begins_of(
            (modified_at(group), node.name)
            for node in itertools.islice(nodes, most_nodes)
            for torchrun in _folders(node, attempt)
            for group in _folders(torchrun, attempt)
            if _GROUP.fullmatch(group.name)
        )
    )


def _folders(folder: Path, attempt: Path) -> list[Path]:
    run_dir = attempt.parents[1]
    return [folder / e.name for e in untrusted.entries(folder, below=run_dir) if e.is_folder]


def _name_of(attempt: Path, key: str, names: list[str]) -> str:
    run_dir = attempt.parents[1]
    with contextlib.suppress(OSError, IndexError):
        if _NUMBER.fullmatch(key):
            return names[int(key)]
        path = attempt / f"failed-{key}"
        return untrusted.read_text(path, limit=_NOTE_BYTES, below=run_dir).split()[1]
    return f"node-{key}"


def reports_of(run_dir: Path, attempt: Path, starts: list[RankStart]) -> dict[RankStart, Reported]:
    """Return torchrun's reports of failed ranks, each by the rank's last start."""
    reports: dict[RankStart, Reported] = {}
    known = _Starts(attempt, starts)
    for span in attempt_spans(run_dir, int(attempt.name.split("-")[1])):
        key = span.path.stem.removeprefix("node-") if span.path.parent == attempt else None
        # Line by line: a list of all lines takes twenty times their memory.
        for reported in read_reports(io.StringIO(_end_of(span, _LOG_BYTES), newline="\n")):
            reports[known.of(reported, key)] = reported
    for start, reported in reports.items():
        away_s = error[2] - reported.time if (error := start.error()) else 0.0
        if (shift := shift_s(away_s)) and abs(away_s - shift) < 30:
            return {one: r._replace(time=r.time + shift) for one, r in reports.items()}
    return reports


class _Starts:
    """An attempt's rank starts, looked up by torchrun's reports."""

    def __init__(self, attempt: Path, starts: list[RankStart]) -> None:
        self._attempt = attempt
        self._by_file: dict[str, RankStart] = {}
        self._last: defaultdict[int, list[RankStart]] = defaultdict(list)
        self._by_name: dict[tuple[int, str, str], int] = {}
        for start in starts:
            file = start.folder.relative_to(attempt.parent) / "error.json"
            self._by_file.setdefault(str(file), start)
            if start.last:
                rank, last = start.local_rank, self._last[start.local_rank]
                for kind, name in (("key", start.key), ("host", start.node.partition(".")[0])):
                    self._by_name.setdefault((rank, kind, name), len(last))
                last.append(start)

    def of(self, reported: Reported, key: str | None) -> RankStart:
        """Return the start that a report refers to; `key` is the node of the log, if known."""
        # The run directory may be a mirror: only the end of the path is the same.
        _, *file = reported.error_file.rsplit("/", 6)
        if (start := self._by_file.get("/".join(file))) is not None:
            return start
        rank, host = reported.local_rank, reported.host.partition(".")[0]
        last = self._last.get(rank, [])
        names = ((rank, "key", key or ""), (rank, "host", host))
        if found := [self._by_name[name] for name in names if name in self._by_name]:
            return last[min(found)]
        if len(last) == 1:
            return last[0]
        return RankStart(  # of a node with a host name other than in Slurm
            folder=self._attempt / "elsewhere" / host / str(rank),
            key=host,
            node=host,
            restart=0,
            has_files=False,
        )


def _last_lines(span: Span, most: int) -> list[str]:
    return _end_of(span, most).split("\n")


def _end_of(span: Span, most: int) -> str:
    with contextlib.suppress(OSError):
        return end_of(span, most).decode(errors="replace")
    return ""
