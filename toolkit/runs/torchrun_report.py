"""What torchrun leaves of the ranks that failed: the report in its log, and a folder for each rank.

    logs/attempt-N/node-KEY/RUN_ID/attempt_RESTART/LOCAL_RANK/{stdout.log,stderr.log,error.json}

`KEY` is the node's number, or `joined-by-JOB`. One torchrun has one `RUN_ID`; a node has several of
them where its torchrun was started anew. Each report belongs to one start of a rank.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from toolkit.runs.log_reader import Span, attempt_spans, end_of, modified_at
from toolkit.text import untrusted

# ---- The report


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A rank that has failed, as torchrun reports it at its end."""

    time: float
    """When torchrun noticed the failure, or the time in the error file; a node's clock, whole
    seconds, and a moment more unless torchrun calls the failure the root cause."""

    host: str
    """The node's name of itself, without its domain."""

    rank: int
    local_rank: int

    exitcode: int
    """The exit status; a signal's number is negative."""

    error_file: str
    """Where the rank has written why; empty where it has not."""


_REPORT_KEYS = ("time", "host", "rank", "exitcode", "error_file")
_REPORT_LINE = re.compile(r" {2}(time|host|rank|exitcode|error_file) *: (.*)")


def read_reports(lines: Iterable[str]) -> list[Reported]:
    """Return the failures of all reports in a log; those of several nodes may be mixed."""
    reports: list[Reported] = []
    incomplete: list[list[str]] = []
    root_causes = 0
    for line in lines:
        root_causes += line.startswith("Root Cause")
        if not (match := _REPORT_LINE.match(line)):
            continue
        value = match[2].strip()
        position = _REPORT_KEYS.index(match[1])
        if position == 0:
            incomplete.append([])
            value += "" if root_causes else ".001"
            root_causes -= bool(root_causes)
        block = next((block for block in incomplete if len(block) == position), None)
        if block is None:
            continue
        block.append(value)
        if len(block) == len(_REPORT_KEYS):
            incomplete.remove(block)
            with contextlib.suppress(ValueError, OverflowError, OSError):
                reports.append(_reported(*block))
    return reports


def _reported(time: str, host: str, rank: str, exitcode: str, error_file: str) -> Reported:
    ranks = re.match(r"(\d{1,9}) \(local_rank: (\d{1,9})\)", rank)
    code = re.match(r"-?\d{1,9}", exitcode)
    if ranks is None or code is None:
        raise ValueError
    return Reported(
        time=datetime.fromisoformat(time.replace("_", " ")).timestamp(),
        host=host.partition(".")[0],
        rank=int(ranks[1]),
        local_rank=int(ranks[2]),
        exitcode=int(code[0]),
        error_file="" if error_file == "<N/A>" else error_file,
    )


def report_texts(lines: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Return what the ranks' error files say, by rank, as the report of one torchrun shows it.

    Ranks that have left no error file are not in it.
    """
    texts: dict[int, list[str]] = {}
    lines_of_rank: list[str] | None = None
    rank, written = -1, False
    for line in lines:
        if match := _REPORT_LINE.match(line):
            lines_of_rank = None
            if match[1] == "rank":
                rank = int((re.match(r"\d{1,9}", match[2]) or ["-1"])[0])
            elif match[1] == "error_file":
                written = match[2].strip() != "<N/A>"
        elif written and line.startswith("  traceback : "):
            lines_of_rank = texts[rank] = [line.removeprefix("  traceback : ")]
        elif line.startswith(("---", "===")):
            lines_of_rank, written = None, False
        elif lines_of_rank is not None:
            lines_of_rank.append(line.removeprefix("  "))
    texts.pop(-1, None)
    return {rank: tuple("\n".join(text).rstrip().split("\n")) for rank, text in texts.items()}


# ---- Tracebacks in what a rank has printed


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traceback in what a rank has printed."""

    lines: tuple[str, ...]
    """The traceback; exceptions that were chained are part of it."""

    message: str
    """Its last line: the exception and its message."""

    rank: int | None
    """The rank, if torch prints it: once the process group is made, before each line."""

    at_end: bool
    """Whether nothing else follows."""


_PREFIX = re.compile(r"\[rank(\d{1,9})\]: ?")
_START = re.compile(r"Traceback \(most recent call last\):$|Fatal Python error: |  \+ Exception G")
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct")
_FOREIGN = re.compile(
    r"\[rank\d+\]:\[[WIE]|\[[WIE]\d{3,4} |[WIE]\d{4} |Exception ignored in|/\S+\.py:\d+: "
)
"""Lines after a traceback that do not belong to it: what C++ and Python log at their end."""

_SYNTAX_ERROR = re.compile(r"(Syntax|Indentation|Tab)Error: ")
_SYNTAX_ERROR_FILE = re.compile(r' +File ".*", line \d+$')

_MOST_WORDS = 50
"""How many lines an exception may say."""


def last_trace(printed: Sequence[str]) -> Trace | None:
    """Return the last traceback of a rank's stderr, with the whole message of the exception."""
    rank = None
    lines = []
    for line in printed:
        if match := _PREFIX.match(line):
            rank = int(match[1])
            line = line[match.end() :]
        lines.append(line)
    starts = [number for number, line in enumerate(lines) if _START.match(line)]
    if not starts:  # Python reports a syntax error of the script with no headline
        error = next((n for n, line in enumerate(lines) if _SYNTAX_ERROR.match(line)), 0)
        starts = [n for n in range(error) if _SYNTAX_ERROR_FILE.match(lines[n])][-1:]
    if not starts:
        return None
    start = begin = starts[-1]
    for earlier in reversed(starts[:-1]):  # its cause stands above
        if not any(_CHAINED.match(line) for line in lines[earlier:begin]):
            break
        begin = earlier
    prefixed = _PREFIX.match(printed[start]) is not None
    frames = list(takewhile(lambda line: not line or line[0].isspace(), lines[start + 1 :]))
    lines_of_error: list[str] = []
    for number in range(start + 1 + len(frames), len(lines)):
        other = prefixed and printed[number] and not _PREFIX.match(printed[number])
        if other or _FOREIGN.match(printed[number]) or len(lines_of_error) == _MOST_WORDS:
            break
        lines_of_error.append(lines[number])
    end = start + 1 + len(frames) + len(lines_of_error)
    message = lines[start]
    if lines_of_error and not message.startswith("Fatal"):
        message = lines_of_error[0]
    if lines[start].startswith("  + "):
        message = next((line[4:] for line in frames if re.match(r"  \| \S", line)), message)
    while lines_of_error and not lines_of_error[-1]:
        lines_of_error.pop()
    return Trace(
        lines=tuple([*lines[begin : start + 1], *frames, *lines_of_error]),
        message=message,
        rank=rank,
        at_end=all(not line or _FOREIGN.match(line) for line in printed[end:]),
    )


# ---- The folders of the ranks

_LOG_BYTES = 8 << 20
"""How much of the end of an attempt's log may hold torchrun's reports, one per node."""

_STDERR_BYTES = 1 << 16
_ERROR_BYTES = 4 << 20

_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_GROUP = re.compile(r"attempt_([0-9]{1,9})", re.ASCII)

_QUARTER_S = 900
"""Time zones differ by multiples of this; that of a container may not be ours."""


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

    @property
    def local_rank(self) -> int:
        """Its number on its node."""
        return int(self.folder.name)

    @property
    def _run_dir(self) -> Path | None:
        """The run directory, below which nothing is a link; None for a rank that is elsewhere."""
        parents = self.folder.parents  # group, RUN_ID, node, attempt, logs, run directory
        return parents[5] if len(parents) > 5 and parents[4].name == "logs" else None

    def stderr(self) -> list[str]:
        """Return the last lines of the rank's stderr."""
        return _last_lines(
            Span(path=self.folder / "stderr.log", below=self._run_dir), _STDERR_BYTES
        )

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
            stamp = untrusted.moment(float(str(extra["timestamp"])[:40]))  # a number, or its text
            if stamp is None:
                return None
            trace = str(extra.get("py_callstack") or "").rstrip("\n")
            written = path.lstat().st_mtime  # finer than the whole seconds in it
            time = written if 0 <= written - stamp < 2 else stamp
            return str(message["message"]), tuple(trace.split("\n") if trace else ()), time
        return None


def starts_of(attempt: Path) -> list[RankStart]:
    """Return all starts of ranks in the folder of an attempt."""
    starts = []
    for node in _folders(attempt, attempt):
        if not node.name.startswith("node-"):
            continue
        key = node.name.removeprefix("node-")
        name = _name_of(attempt, key)
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


def _folders(folder: Path, attempt: Path) -> list[Path]:
    run_dir = attempt.parents[1]
    return [folder / e.name for e in untrusted.entries(folder, below=run_dir) if e.is_folder]


def _name_of(attempt: Path, key: str) -> str:
    run_dir = attempt.parents[1]
    with contextlib.suppress(OSError, IndexError):
        if _NUMBER.fullmatch(key):
            return untrusted.read_text(attempt / "nodes", below=run_dir).splitlines()[int(key)]
        return untrusted.read_text(attempt / f"failed-{key}", below=run_dir).split()[1]
    return f"node-{key}"


def reports_of(run_dir: Path, attempt: Path, starts: list[RankStart]) -> dict[RankStart, Reported]:
    """Return what torchrun reports of the ranks that have failed, each with its last start."""
    reports: dict[RankStart, Reported] = {}
    for span in attempt_spans(run_dir, int(attempt.name.split("-")[1])):
        key = span.path.stem.removeprefix("node-") if span.path.parent == attempt else None
        for reported in read_reports(_last_lines(span, _LOG_BYTES)):
            reports[_start_of(reported, key, starts, attempt)] = reported
    for start, reported in reports.items():
        away_s = error[2] - reported.time if (error := start.error()) else 0.0
        if (shift := shift_s(away_s)) and abs(away_s - shift) < 30:
            return {one: replace(r, time=r.time + shift) for one, r in reports.items()}
    return reports


def _start_of(
    reported: Reported, key: str | None, starts: list[RankStart], attempt: Path
) -> RankStart:
    for start in starts:
        path = start.folder.relative_to(attempt.parent) / "error.json"
        if reported.error_file.endswith(f"/{path}"):  # the run directory may be another's mirror
            return start
    last = [start for start in starts if start.last and start.local_rank == reported.local_rank]
    for start in last:
        if start.key == key or start.node.partition(".")[0] == reported.host or len(last) == 1:
            return start
    return RankStart(  # of a node that names itself otherwise than Slurm does
        folder=attempt / "elsewhere" / reported.host / str(reported.local_rank),
        key=reported.host,
        node=reported.host,
        restart=0,
    )


def shift_s(away_s: float) -> int:
    """Return how far two time zones are apart whose clocks show times that differ by so much."""
    return round(away_s / _QUARTER_S) * _QUARTER_S


def _last_lines(span: Span, most: int) -> list[str]:
    with contextlib.suppress(OSError):
        return end_of(span, most).decode(errors="replace").split("\n")
    return []
