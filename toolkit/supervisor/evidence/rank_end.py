"""Why a rank ended: one verdict from its error file, its stderr and torchrun's report."""

import re
import signal
from typing import NamedTuple, Optional, Sequence, Tuple

from .echoes import is_echo
from .traceback import last_trace

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that torchrun forwards to its ranks, or uses to end the other ranks."""

_LAST_WORDS = 5
"""How many lines of stderr to show for a rank without a traceback."""

_THROWN = re.compile(r"^ *what\(\): *(.+)$", re.MULTILINE)
"""An uncaught C++ exception, as printed before SIGABRT."""


class RankEnd(NamedTuple):
    """Why a rank ended."""

    kind: str
    """`exception`; `signal`: it was killed; `exit`: it ended with a status and no traceback;
    `echo`: it only reports the loss of another rank."""

    message: str
    traceback: Tuple[str, ...]

    source: str
    """The deciding evidence, which also gives the time of the failure: `error file`, `traceback`
    or `report`."""


def judge(
    exitcode: Optional[int],
    *,
    error: Optional[Tuple[str, Tuple[str, ...]]],
    stderr: Sequence[str],
    out_of_memory: bool,
) -> Optional[RankEnd]:
    """Return why a rank ended; None for a rank that was only stopped with the others.

    Args:
        exitcode: Its exit status in torchrun's report, if any; negative for a signal.
        error: Message and traceback of its error file.
        stderr: Its last lines.
        out_of_memory: Whether the kernel killed a process on its node out of memory.
    """
    trace = last_trace(stderr)
    if error is not None:
        message, lines = error
        lines = lines or (trace.lines if trace else ())
        return RankEnd(kind_of(message), message, lines, "error file")
    if exitcode is None or -exitcode in STOPS:
        return None
    last_words = tuple([line for line in stderr if line.strip()][-_LAST_WORDS:])
    if exitcode == 1 and trace:
        return RankEnd(kind_of(trace.message), trace.message, trace.lines, "traceback")
    kind = "exit"
    message = f"exit status {exitcode}" + (f": {last_words[-1]}" if last_words else "")
    if exitcode < 0:
        aborted = exitcode == -signal.SIGABRT and is_echo("\n".join(last_words))
        kind, message = "echo" if aborted else "signal", killed_by(-exitcode)
        thrown = _THROWN.findall("\n".join(stderr)) if exitcode == -signal.SIGABRT else []
        if thrown:
            message += f": {thrown[-1]}"
        if exitcode == -signal.SIGKILL and out_of_memory:
            message += "; the kernel has killed a process there for want of memory"
        if trace and trace.at_end:
            last_words = trace.lines
    return RankEnd(kind, message, last_words, "report")


def kind_of(message: str) -> str:
    """Return the kind of a rank's error."""
    return "echo" if is_echo(message) else "exception"


def killed_by(number: int) -> str:
    """Return the phrase for a signal that killed a rank."""
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def order(kind: str, time: float) -> Tuple[bool, float]:
    """Return the sort key of failures: echoes of another rank's loss come last."""
    return kind == "echo", time


def in_words(
    kind: str, rank: Optional[int], local_rank: Optional[int], node: str, message: str
) -> str:
    """Return the sentence for a failed rank."""
    local = "" if local_rank is None else f"local rank {local_rank}"
    who = local if rank is None else f"rank {rank}"
    lost = " has lost another rank, which left no word" if kind == "echo" else ""
    place = f"{who} on {node}" if who else node
    return f"{place}{lost}: {message.partition(chr(10))[0]}"


def exited(code: int) -> str:
    """Return the phrase for a bare exit status; negative for a signal."""
    return killed_by(-code) if code < 0 else f"exit status {code}"
