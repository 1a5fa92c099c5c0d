"""What torchrun tells of ranks that have failed: at its end, and in its log (TORCH_LOGS_OUT)."""

import re
from typing import Iterable, List

from .files import TAIL_BYTES, last_lines, open_regular

LINE = re.compile(rb"Root Cause| +(?:time|host|exitcode) *:")
"""Of a report, as far as it counts."""

_MOST_LINES = 30000
"""Of reports: those of some thousand ranks."""


def report_lines(paths: Iterable[str]) -> List[str]:
    """Return the lines of torchrun's reports in logs, without what is around them."""
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
    """Whether a rank has ended with this exit status."""
    return any(re.match(rf" *exitcode +: {status}(?: |$)", line) for line in lines)


def exitcode_logged(path: str) -> str:
    """Return how the last rank of which torchrun's log tells has ended; nothing without one."""
    found = re.findall(r"failed \(exitcode: (-?[0-9]+)", "\n".join(last_lines(path)))
    return str(found[-1]) if found else ""
