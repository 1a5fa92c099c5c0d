"""A container's last message: which rank had failed, of what, and what the entrypoint made of it.

Kubernetes keeps the end of the log of a container that fails, 2,048 bytes of it
(`terminationMessagePolicy: FallbackToLogsOnError`), when all else of the pod is gone.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

from toolkit.kubernetes.delivered_files import is_delivery
from toolkit.runs.failure import STOPS
from toolkit.runs.torchrun_report import last_trace, read_reports, report_texts

__all__ = ["OF_RANK", "LastWords", "last_words"]

OF_RANK = re.compile(r"\[rank (\d{1,9})\] (.*)", re.DOTALL)
"""A line of a rank, as torchrun passes it on."""

_OF_ENTRYPOINT = re.compile(r"torchrun ended with \d+; (?:(\w+): )?.*: \d+")
"""The last line of templates/kubernetes/entrypoint.sh.j2: torchrun's exit status, the word and the
sentence of the retry policy, and the exit status of the container."""

_OF_TORCHRUN = re.compile(
    r"\s|[=-]{4}|[WIE]\d{4} |\[[WIE]\d|Root Cause|Failures:|Traceback |raise |torch\S+Error|$"
)
"""Lines that say nothing of the cause: torchrun's report and its own traceback."""


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """The last message of a container."""

    rank: int | None = None
    """The rank that failed first, if the message names it."""

    time: float | None = None
    """When it did, in seconds, by the pod's clock; to be compared with other pods' only."""

    cause: str = ""
    """The line with the cause: an exception, or the last one."""

    word: str = ""
    """The retry policy's word for the end, such as `preempted`."""

    verdict: str = ""
    """The entrypoint's line: torchrun's exit status, why it ended, and whether to start again."""

    def __str__(self) -> str:
        """Return it as a part of a sentence."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        return ": ".join(filter(None, [rank, "; ".join(filter(None, [self.cause, self.verdict]))]))


def last_words(message: str) -> LastWords:
    r"""Read the end of a log.

    >>> str(last_words("[rank 3] ValueError: NaN\ntorchrun ended with 1; gives up: 42\n"))
    'rank 3: ValueError: NaN; torchrun ended with 1; gives up: 42'
    """
    lines = [line for line in message.rstrip().splitlines() if not is_delivery(line)]
    verdict = next(filter(None, map(_OF_ENTRYPOINT.match, reversed(lines))), None)
    by_rank: defaultdict[int, list[str]] = defaultdict(list)
    others = []
    for line in lines:
        if match := OF_RANK.match(line):
            by_rank[int(match[1])].append(match[2])
        elif not _OF_ENTRYPOINT.match(line):
            others.append(line)
    # Those that torchrun has ended are no cause.
    report = min(
        read_reports(others), key=lambda one: (-one.exitcode in STOPS, one.time), default=None
    )
    rank = report.rank if report else min(by_rank, key=lambda r: _worth(by_rank[r]), default=None)
    own = by_rank.get(rank, []) if rank is not None else []
    error_lines = report_texts(others).get(report.rank, ()) if report else ()
    status = f"exit status {report.exitcode}" if report else ""
    cause = _cause(own) or _cause(list(error_lines)) or status or _cause(others)
    return LastWords(
        rank=rank,
        time=report.time if report else None,
        cause=cause,
        word=(verdict[1] or "") if verdict else "",
        verdict=verdict[0] if verdict else "",
    )


def _worth(lines: list[str]) -> bool:
    """Order ranks: those with a traceback come first."""
    return last_trace(lines) is None


def _cause(lines: list[str]) -> str:
    if (trace := last_trace(lines)) is not None:
        return trace.message.strip()
    return next((line.strip() for line in reversed(lines) if not _OF_TORCHRUN.match(line)), "")
