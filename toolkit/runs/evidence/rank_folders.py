"""The folder that torchrun writes for each start of a rank: its output, and its error file.

    logs/attempt-N/node-KEY/RUN_ID/attempt_RESTART/LOCAL_RANK/{stdout.log,stderr.log,error.json}

`KEY` is the node's number, or `joined-by-JOB`. One torchrun has one `RUN_ID`; a node has several of
them where its torchrun was started anew. Each report of torchrun's belongs to one start of a rank.
A pod has a folder of its own name in place of `node-KEY`.
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
"""How much of the end of an attempt's log may hold torchrun's reports, one per node."""

_STDERR_BYTES = 1 << 16
_ERROR_BYTES = 4 << 20
_NOTE_BYTES = 1 << 12

_LONGEST, _MOST_LINES = 50_000, 1000
"""Characters of a message and of a traceback, and lines of it: its end is shown."""

_SPREAD_S = 5.0
"""The torchruns of a run start their ranks within so many seconds of each other."""

_WATCHDOG = "watchdog"
"""The one folder in an attempt's that is of no node."""

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_GROUP = re.compile(r"attempt_([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """One start of a rank."""

    folder: Path
    """Where its output and its error file lie."""

    key: str
    """That of its node."""

    node: str
    """Its node's name; `node-1` on this machine."""

    restart: int
    """How often its torchrun had started the ranks before."""

    last: bool = True
    """Whether its node has started no other after it."""

    has_files: bool = True
    """Whether its folder is known."""

    @property
    def local_rank(self) -> int:
        """Its number on its node."""
        return int(self.folder.name)

    @property
    def began(self) -> float:
        """When the ranks of its node were given their folders, in seconds since 1970."""
        return modified_at(self.folder.parent)

    @property
    def _run_dir(self) -> Path | None:
        """The run directory, below which nothing is a link; None for a rank that is elsewhere."""
        parents = self.folder.parents  # group, RUN_ID, node, attempt, logs, run directory
        return parents[5] if len(parents) > 5 and parents[4].name == "logs" else None

    def stderr(self) -> list[str]:
        """Return the last lines of the rank's stderr."""
        span = Span(path=self.folder / "stderr.log", below=self._run_dir)
        return _last_lines(span, _STDERR_BYTES) if self.has_files else []

    def silent_since(self) -> float:
        """Return when it has written to its stderr last."""
        return (self.folder / "stderr.log").lstat().st_mtime

    def error(self) -> tuple[str, tuple[str, ...], float] | None:
        """Return message, traceback and time of its error file."""
        if not self.has_files:
            return None
        path = self.folder / "error.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            content = untrusted.read_json(path, limit=_ERROR_BYTES, below=self._run_dir)
            message = untrusted.mapping(untrusted.mapping(content)["message"])
            extra = untrusted.mapping(message["extraInfo"])
            stamp = untrusted.moment(float(str(extra["timestamp"])[:40]))  # a number, or its text
            if stamp is None:
                return None
            trace = str(extra.get("py_callstack") or "").rstrip("\n")[-_LONGEST:]
            lines = trace.split("\n")[-_MOST_LINES:] if trace else ()
            written = path.lstat().st_mtime  # finer than the whole seconds in it
            time = written if 0 <= written - stamp < 2 else stamp
            return untrusted.shortened(str(message["message"]), _LONGEST), tuple(lines), time
        return None


def starts_of(attempt: Path) -> list[RankStart]:
    """Return all starts of ranks in the folder of an attempt."""
    starts, names = [], nodes_of(attempt)
    for node in _folders(attempt, attempt):
        if node.name == _WATCHDOG:
            continue
        key = node.name.removeprefix("node-")
        name = key if key == node.name else _name_of(attempt, key, names)
        # Torchruns in the order of their age, and the groups of one torchrun by their number.
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
    """Return when the ranks of an attempt were started, once for all nodes together.

    torchrun counts by itself on each node: a node whose own ranks have not failed starts them again
    in the same folder. So the numbers of its folders do not count the starts, but their times do.

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
    """Return how often the ranks of an attempt were started, by the folders of some nodes."""
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
    """Return what torchrun reports of the ranks that have failed, each with its last start."""
    reports: dict[RankStart, Reported] = {}
    known = _Starts(attempt, starts)
    for span in attempt_spans(run_dir, int(attempt.name.split("-")[1])):
        key = span.path.stem.removeprefix("node-") if span.path.parent == attempt else None
        # Line by line: a list of them all takes twenty times their memory.
        for reported in read_reports(io.StringIO(_end_of(span, _LOG_BYTES), newline="\n")):
            reports[known.of(reported, key)] = reported
    for start, reported in reports.items():
        away_s = error[2] - reported.time if (error := start.error()) else 0.0
        if (shift := shift_s(away_s)) and abs(away_s - shift) < 30:
            return {one: r._replace(time=r.time + shift) for one, r in reports.items()}
    return reports


class _Starts:
    """The starts of the ranks of an attempt, to be found by what torchrun reports of them."""

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
        """Return the start that a report means, in the log of the node `key` if it is of one."""
        # The run directory may be another's mirror: only the end of the path is the same.
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
        return RankStart(  # of a node that names itself otherwise than Slurm does
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
