"""Failed ranks in torchrun's final report and in its log (TORCH_LOGS_OUT)."""

import contextlib
import os
import re
import time
from collections import deque
from typing import Deque, Dict, Iterable, List, NamedTuple, Optional, Tuple

from .files import TAIL_BYTES, last_lines, open_regular

LINE = re.compile(rb"Root Cause| +(?:time|host|rank|exitcode|error_file) *:")
"""A relevant line of a report."""

_MOST_LINES = 50000
"""Maximum number of report lines: enough for some thousand ranks."""

_KEYS = ("time", "host", "rank", "exitcode", "error_file")
_MOST_INCOMPLETE = 10000
"""Maximum number of incomplete reports at a time: lines of all nodes may be interleaved."""

_REPORT_LINE = re.compile(r" {2}(time|host|rank|exitcode|error_file) *: (.*)")
_FAILED = re.compile(r"failed \(exitcode: (-?[0-9]{1,9})\) local_rank: ([0-9]{1,9}) ")
"""The log line of torchrun about a failed rank, also before a restart of the ranks."""


class Reported(NamedTuple):
    """A failed rank in torchrun's final report."""

    time: float
    """When torchrun noticed the failure, or the time in the error file: whole seconds of the node's
    clock, plus a moment unless torchrun calls the failure the root cause."""

    host: str
    """The node's own host name."""

    rank: int
    local_rank: int

    exitcode: int
    """The exit status; a signal's number is negative."""

    error_file: str = ""
    """Path of the rank's error file; empty without one."""


def read_reports(lines: Iterable[str]) -> List[Reported]:
    """Return the failures of all reports in a log; reports may be interleaved."""
    reports: List[Reported] = []
    # Incomplete reports by their number of lines so far, the oldest first.
    waiting: List[Deque[List[str]]] = [deque(maxlen=_MOST_INCOMPLETE) for _ in _KEYS]
    root_causes = 0
    for line in lines:
        root_causes += line.startswith("Root Cause")
        match = _REPORT_LINE.match(line)
        if match is None:
            continue
        value = match.group(2).strip()
        position = _KEYS.index(match.group(1))
        if position == 0:
            waiting[0].append([])
            value += "" if root_causes else ".001"
            root_causes -= bool(root_causes)
        if not waiting[position]:
            continue
        block = waiting[position].popleft()
        block.append(value)
        if len(block) < len(_KEYS):
            waiting[len(block)].append(block)
        else:
            with contextlib.suppress(ValueError, OverflowError, OSError):
                reports.append(_reported(*block))
    return reports


def _reported(when: str, host: str, rank: str, exitcode: str, error_file: str) -> Reported:
    moment = re.match(r"(\d{4})-(\d\d)-(\d\d)[_T ](\d\d):(\d\d):(\d\d)(\.\d{1,6})?$", when)
    ranks = re.match(r"(\d{1,9}) \(local_rank: (\d{1,9})\)", rank)
    code = re.match(r"-?\d{1,9}", exitcode)
    if moment is None or ranks is None or code is None:
        raise ValueError
    year, month, day, hour, minute, second = map(int, moment.groups()[:6])
    date = (year, month, day, hour, minute, second, 0, 0, -1)
    return Reported(
        time=time.mktime(date) + float(moment.group(7) or 0),
        host=host,
        rank=int(ranks.group(1)),
        local_rank=int(ranks.group(2)),
        exitcode=int(code.group()),
        error_file="" if error_file == "<N/A>" else error_file,
    )


def report_texts(lines: Iterable[str]) -> Dict[int, Tuple[str, ...]]:
    """Return the contents of error files by rank, from the report of one torchrun.

    Ranks without an error file are left out.
    """
    texts: Dict[int, List[str]] = {}
    lines_of_rank: Optional[List[str]] = None
    rank, written = -1, False
    for line in lines:
        match = _REPORT_LINE.match(line)
        if match:
            lines_of_rank = None
            if match.group(1) == "rank":
                digits = re.match(r"\d{1,9}", match.group(2))
                rank = int(digits.group()) if digits else -1
            elif match.group(1) == "error_file":
                written = match.group(2).strip() != "<N/A>"
        elif written and line.startswith("  traceback : "):
            lines_of_rank = texts[rank] = [line[len("  traceback : ") :]]
        elif line.startswith(("---", "===")):
            lines_of_rank, written = None, False
        elif lines_of_rank is not None:
            lines_of_rank.append(line[2:] if line.startswith("  ") else line)
    texts.pop(-1, None)
    return {rank: tuple("\n".join(text).rstrip().split("\n")) for rank, text in texts.items()}


_QUARTER_S = 900
"""Time zones differ by multiples of this; a container may have another time zone."""


def shift_s(away_s: float) -> int:
    """Return the offset between two time zones from the difference between their clocks."""
    return round(away_s / _QUARTER_S) * _QUARTER_S


# ---- In files


def report_lines(paths: Iterable[str]) -> List[str]:
    """Return the report lines of torchrun in logs, without other lines."""
    found: List[str] = []
    for path in paths:
        try:
            with open_regular(path) as file:
                for line in iter(lambda: file.readline(TAIL_BYTES), b""):
                    if LINE.match(line) and len(found) < _MOST_LINES:
                        found.append(line.decode("latin-1").rstrip("\r\n"))
        except OSError:
            continue
    return found


def has_exitcode(lines: Iterable[str], status: int) -> bool:
    """Whether a rank ended with this exit status."""
    return any(re.match(rf" *exitcode +: {status}(?: |$)", line) for line in lines)


def logged_failure(path: str) -> Optional[Reported]:
    """Return the last failed rank in torchrun's log.

    The log's folder must have the pod's name; the log's mtime counts as the failure time.
    """
    found = _FAILED.findall("\n".join(last_lines(path)))
    if not found:
        return None
    host = os.path.basename(os.path.dirname(path))
    return Reported(os.stat(path).st_mtime, host, -1, int(found[-1][1]), int(found[-1][0]))
