"""The report that torchrun writes at its end into its log: which ranks have failed, and how."""

import contextlib
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime


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
_MOST_INCOMPLETE = 10_000
"""How many reports may be incomplete at a time: those of all nodes, mixed line by line."""

_REPORT_LINE = re.compile(r" {2}(time|host|rank|exitcode|error_file) *: (.*)")


def read_reports(lines: Iterable[str]) -> list[Reported]:
    """Return the failures of all reports in a log; those of several nodes may be mixed."""
    reports: list[Reported] = []
    # The incomplete reports by how many of their lines have come, the oldest first.
    waiting: list[deque[list[str]]] = [deque(maxlen=_MOST_INCOMPLETE) for _ in _REPORT_KEYS]
    root_causes = 0
    for line in lines:
        root_causes += line.startswith("Root Cause")
        if not (match := _REPORT_LINE.match(line)):
            continue
        value = match[2].strip()
        position = _REPORT_KEYS.index(match[1])
        if position == 0:
            waiting[0].append([])
            value += "" if root_causes else ".001"
            root_causes -= bool(root_causes)
        if not waiting[position]:
            continue
        block = waiting[position].popleft()
        block.append(value)
        if len(block) < len(_REPORT_KEYS):
            waiting[len(block)].append(block)
        else:
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


_QUARTER_S = 900
"""Time zones differ by multiples of this; that of a container may not be ours."""


def shift_s(away_s: float) -> int:
    """Return how far two time zones are apart whose clocks show times that differ by so much."""
    return round(away_s / _QUARTER_S) * _QUARTER_S
