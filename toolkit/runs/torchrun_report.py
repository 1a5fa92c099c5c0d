"""What torchrun prints: what people should not see, and what its reports and tracebacks say.

Asked to stop, torchrun stops its workers and then ends with a traceback of its own
`SignalException`, which looks like a failure but is not.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile

__all__ = [
    "Reported",
    "StopTraces",
    "Trace",
    "last_trace",
    "read_reports",
    "report_texts",
    "without_stop_traces",
]

_TRACE = re.compile(
    r"\s|$|Traceback \(most recent call last\):|During handling of the above exception"
    r"|torch\.distributed\.elastic\.\S*SignalException|--- Logging error ---|Call stack:"
    r"|Message: |Arguments: |RuntimeError: reentrant call"
)
"""Lines of tracebacks; those of several nodes may be mixed."""

_LOG = re.compile(r"\[|[WIE]\d{4} |srun: |slurmstepd")
"""Lines that come in between."""


class StopTraces:
    """Holds back tracebacks until it is clear whether they are torchrun's of being stopped."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def take(self, line: str) -> list[str]:
        """Return what may be shown, now that this line has come."""
        starts = line.startswith(("Traceback (most recent call last):", "--- Logging error ---"))
        if starts or (self._held and _TRACE.match(line)):
            self._held.append(line)
            return []
        if self._held and _LOG.match(line):
            return [line]
        return [*self.rest(), line]

    def rest(self) -> list[str]:
        """Return the lines that are held back, at the end of the log."""
        held, self._held = self._held, []
        return [] if any("SignalException" in line for line in held) else held


def without_stop_traces(lines: Iterable[str]) -> Iterator[str]:
    """Yield `lines` without torchrun's tracebacks of being stopped; all others stay."""
    traces = StopTraces()
    for line in lines:
        yield from traces.take(line)
    yield from traces.rest()


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A rank that has failed, as torchrun reports it at its end."""

    time: float
    """When torchrun noticed the failure, or the time in the error file;
    a node's clock, whole seconds."""

    host: str
    """The node's name of itself, without its domain."""

    rank: int
    """The global rank."""

    local_rank: int
    """Its number on the node."""

    exitcode: int
    """The exit status; a signal's number is negative."""

    error_file: str
    """Where the rank has written why; empty where it has not."""


_REPORT_KEYS = ("time", "host", "rank", "exitcode", "error_file")
_REPORT_LINE = re.compile(r" {2}(time|host|rank|exitcode|error_file) *: (.*)")


def read_reports(lines: Iterable[str]) -> list[Reported]:
    """Return the failures of all reports in a log; those of several nodes may be mixed."""
    reports: list[Reported] = []
    begun: list[list[str]] = []
    for line in lines:
        if not (match := _REPORT_LINE.match(line)):
            continue
        place = _REPORT_KEYS.index(match[1])
        if place == 0:
            begun.append([])
        block = next((block for block in begun if len(block) == place), None)
        if block is None:
            continue
        block.append(match[2].strip())
        if len(block) == len(_REPORT_KEYS):
            begun.remove(block)
            with contextlib.suppress(ValueError, TypeError, OverflowError, OSError):
                reports.append(_reported(*block))
    return reports


def report_texts(lines: Iterable[str]) -> dict[int, tuple[str, ...]]:
    """Return what the ranks' error files say, by rank, as the report of one torchrun shows it.

    Ranks that have left no error file are not in it.
    """
    texts: dict[int, list[str]] = {}
    lines_of_rank: list[str] | None = None
    rank = -1
    written = False
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
    return {
        rank: tuple("\n".join(text).rstrip().split("\n"))
        for rank, text in texts.items()
        if rank >= 0
    }


def _reported(time: str, host: str, rank: str, exitcode: str, error_file: str) -> Reported:
    both = re.match(r"(\d{1,9}) \(local_rank: (\d{1,9})\)", rank)
    code = re.match(r"-?\d{1,9}", exitcode)
    if both is None or code is None:
        raise ValueError
    return Reported(
        time=datetime.fromisoformat(time.replace("_", " ")).timestamp(),
        host=host.partition(".")[0],
        rank=int(both[1]),
        local_rank=int(both[2]),
        exitcode=int(code[0]),
        error_file="" if error_file == "<N/A>" else error_file,
    )


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
    if not starts:
        starts = _of_syntax(lines)
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
    message = (
        lines_of_error[0]
        if lines_of_error and not lines[start].startswith("Fatal")
        else lines[start]
    )
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


def _of_syntax(lines: Sequence[str]) -> list[int]:
    """Return the line at which Python reports a syntax error of the script: with no headline."""
    for number, line in enumerate(lines):
        if re.match(r"(Syntax|Indentation|Tab)Error: ", line):
            return [n for n in range(number) if re.match(r' +File ".*", line \d+$', lines[n])][-1:]
    return []
