"""Which rank of a run has failed first, and why: by what torchrun and the ranks have left behind.

A rank whose main function is wrapped by `@record` leaves an error file, as `train/` does; of others
there is the traceback in their stderr. torchrun's report at its end lists the ranks that failed,
with their signals. All of these lie in the folder of the attempt.
"""

import contextlib
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from toolkit.runs.log_reader import attempt_folders
from toolkit.runs.run_directory import (
    STOP_WORDS,
    cancel_requested,
    exit_status_of,
    outcome,
    reason_of,
)
from toolkit.runs.torchrun_report import (
    RankStart,
    Reported,
    Trace,
    last_trace,
    reports_of,
    starts_of,
)
from toolkit.text import untrusted
from toolkit.text.secret_scan import Mask

_LAST_WORDS = 5
_UNREPORTED_S = 120.0
"""How long before others a rank can have failed whose torchrun was ended before it could report."""

_WELL = ("done", "cancelled", "preempted", "walltime", "fenced", "terminated")
"""Words of the retry policy for ends of attempts in which nothing has failed."""

_NOT_BEGUN = ("gave_up", "no_progress")
"""Those of attempts that may have ended before they have started anything."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""The signals that torchrun forwards to its ranks, and ends the other ranks with."""

# ---- Messages that only report another rank's loss, so that they name no cause
#
# Four programs need the list, and three of them import nothing of the toolkit: `train/errors.py`,
# `toolkit/functions/worker.py` (copied beside the payload) and `templates/first_error.sh` (rendered
# into scripts) hold copies. A test compares them.

ECHOES = (
    "connection (closed|reset) by peer",
    "connection (refused|was closed)",
    "broken pipe",
    "remote process exited",
    "connectfullmesh failed",
    "gloo/transport",
    "(recv|send)(value|bytes) failed",
    "failed to (recv|send)",
    "nccl error",
    "nccl communicator was aborted",
    "dist(backend|network|store)error",
    "watchdog caught collective",
    "timed ?out",
    "wait timeout",
    "ends because of others",
    "another rank went away",
    "^the same as (rank [0-9]+|another rank)",
)
"""Regular expressions over lower-case text, which Python and awk read alike: gloo's, NCCL's and
torch's messages of a lost connection, and those of `train/`."""

NO_ECHOES = "nccl(invalidusage|invalidargument|unhandledcudaerror)"
"""NCCL's messages about a mistake or a defect on this side, such as two ranks on one GPU."""

_ECHO = re.compile("|".join(ECHOES))
_NO_ECHO = re.compile(NO_ECHOES)


def is_echo(message: str) -> bool:
    """Whether a message only reports the loss of another rank.

    >>> is_echo("RuntimeError: Connection closed by peer"), is_echo("ValueError: sample 7")
    (True, False)
    """
    text = message.lower()
    return bool(_ECHO.search(text)) and not _NO_ECHO.search(text)


# ---- The failure of a run

Kind = Literal["exception", "signal", "exit", "echo"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What the rank that failed first has left."""

    kind: Kind
    """`exception`; `signal`: it was killed; `exit`: it ended with a status and no traceback;
    `echo`: it only reports the loss of another rank; the cause is unknown."""

    rank: int | None
    """The global rank, where it is known."""

    local_rank: int | None
    """Its number on its node, where it is known."""

    node: str
    """The node's name; `node-1` on this machine; the pod's short name on Kubernetes."""

    attempt: int
    """The attempt of the run."""

    restart: int
    """How often its torchrun had started its ranks anew within the attempt."""

    time: float
    """When, in seconds since 1970."""

    message: str
    """The exception with its message, or the signal or exit status of the rank."""

    traceback: tuple[str, ...]
    """The lines of its traceback; without one, the last lines of its stderr."""

    earlier: "tuple[Failure, ...]" = ()
    """What failed first in each start before, after which torchrun started all ranks anew."""

    def __str__(self) -> str:
        local = "" if self.local_rank is None else f"local rank {self.local_rank}"
        who = local if self.rank is None else f"rank {self.rank}"
        lost = " has lost another rank, which left no word" if self.kind == "echo" else ""
        place = f"{who} on {self.node}" if who else self.node
        return f"{place}{lost}: {self.message.partition(chr(10))[0]}"

    def lines(self) -> Iterator[str]:
        """Yield what people are shown; the traceback comes last."""
        for before in self.earlier:
            yield f"earlier failure, in {before._when(counted=True)}: {before}"
        yield f"first failure, in {self._when(counted=bool(self.restart or self.earlier))}: {self}"
        yield from self.traceback

    def _when(self, *, counted: bool) -> str:
        again = f", restart {self.restart}" if counted else ""
        return f"attempt {self.attempt}{again}, {datetime.fromtimestamp(self.time):%H:%M:%S}"

    def redacted(self, mask: Mask) -> "Failure":
        """Return it with `***NAME***` in place of every secret."""
        return replace(
            self,
            message=mask.hide(self.message),
            traceback=tuple(mask.hide(line) for line in self.traceback),
            earlier=tuple(before.redacted(mask) for before in self.earlier),
        )


def first_failure(run_dir: Path, number: int | None = None) -> Failure | None:
    """Return what failed first in an attempt; None if no rank failed, or the cause is unknown.

    Of several starts of the ranks within the attempt, the last one counts. Ranks that have only
    lost another one often notice that before the other's torchrun does, so they come last. Without
    a number, the newest attempt is meant.
    """
    attempt = _newest(run_dir) if number is None else run_dir / "logs" / f"attempt-{number}"
    if attempt is None or _ended_well(run_dir, attempt):
        return None
    starts = starts_of(attempt)
    reports = reports_of(run_dir, attempt, starts)
    bases = {start.key: reported.rank - reported.local_rank for start, reported in reports.items()}
    last = dict.fromkeys([*(start for start in starts if start.last), *reports])
    failures = [f for start in last if (f := _judge(attempt, start, bases, reports.get(start)))]
    if (attempt / "exit_status").exists() and all(one.kind == "echo" for one in failures):
        since = min((one.time for one in failures), default=0.0) - _UNREPORTED_S
        silent = [_unreported(attempt, start, bases) for start in last if start.key not in bases]
        failures += [one for one in silent if one and one.time >= since]
    if not failures:
        return None
    earlier = []
    before = [start for start in starts if not start.last]
    for restart in sorted({start.restart for start in before}):
        ranks = [start for start in before if start.restart == restart]
        judged = [_judge(attempt, s, bases) or _unreported(attempt, s, bases) for s in ranks]
        if any(judged):
            earlier.append(first_of(filter(None, judged)))
    return replace(first_of(failures), earlier=tuple(earlier))


def first_of(failures: Iterable[Failure]) -> Failure:
    """Return what failed first; failures that only report the loss of another rank come last."""
    return min(failures, key=lambda one: (one.kind == "echo", one.time))


def _newest(run_dir: Path) -> Path | None:
    """Return the newest attempt that has started torchrun."""
    for attempt in reversed(attempt_folders(run_dir)):
        if any(e.is_folder and e.name.startswith("node-") for e in untrusted.entries(attempt)):
            return attempt
        if reason_of(attempt).word not in _NOT_BEGUN:
            return None
    return None


def _ended_well(run_dir: Path, attempt: Path) -> bool:
    content, word = outcome(run_dir) or {}, reason_of(attempt).word
    status = content.get("status") if attempt.name == f"attempt-{content.get('attempt')}" else ""
    if status == "fatal" and word in STOP_WORDS:
        return False  # it failed while it was being stopped
    stopped = not word and (status == "preempted" or cancel_requested(run_dir))
    return exit_status_of(attempt) == 0 or word in _WELL or stopped


def _judge(
    attempt: Path, start: RankStart, bases: Mapping[str, int], reported: Reported | None = None
) -> Failure | None:
    """Return a rank's failure from its error file, or else from torchrun's report."""
    if error := start.error():
        message, lines, time = error
        trace = last_trace(start.stderr())
        kind: Kind = "echo" if is_echo(message) else "exception"
        lines = lines or (trace.lines if trace else ())
    elif reported is None or -reported.exitcode in STOPS:
        return None
    else:
        time, trace = reported.time, last_trace(start.stderr())
        lines = tuple([line for line in start.stderr() if line.strip()][-_LAST_WORDS:])
        if trace and (reported.exitcode == 1 or (reported.exitcode < 0 and trace.at_end)):
            lines = trace.lines
        if reported.exitcode == 1 and trace:
            kind = "echo" if is_echo(trace.message) else "exception"
            message, time = trace.message, start.silent_since()
        elif reported.exitcode < 0:
            killed_by_others = reported.exitcode == -signal.SIGABRT and is_echo("\n".join(lines))
            kind = "echo" if killed_by_others else "signal"
            message = _signalled(attempt, start, -reported.exitcode)
        else:
            kind = "exit"
            message = f"exit status {reported.exitcode}" + (f": {lines[-1]}" if lines else "")
    one = _failure(attempt, start, bases, trace, kind=kind, time=time, message=message, lines=lines)
    return replace(one, rank=reported.rank) if reported else one


def _unreported(attempt: Path, start: RankStart, bases: Mapping[str, int]) -> Failure | None:
    """Return a rank's failure from the end of its stderr, if its torchrun was killed as well."""
    trace = last_trace(start.stderr())
    if trace is None or not trace.at_end or is_echo(trace.message):
        return None
    time, message, lines = start.silent_since(), trace.message, trace.lines
    return _failure(
        attempt, start, bases, trace, kind="exception", time=time, message=message, lines=lines
    )


def _failure(
    attempt: Path,
    start: RankStart,
    bases: Mapping[str, int],
    trace: Trace | None,
    *,
    kind: Kind,
    time: float,
    message: str,
    lines: tuple[str, ...],
) -> Failure:
    rank = trace.rank if trace else None
    if rank is None and start.key in bases:
        rank = bases[start.key] + start.local_rank
    return Failure(
        kind=kind,
        rank=rank,
        local_rank=start.local_rank,
        node=start.node,
        attempt=int(attempt.name.split("-")[1]),
        restart=start.restart,
        time=time,
        message=message,
        traceback=lines,
    )


def _signalled(attempt: Path, start: RankStart, number: int) -> str:
    name = f"signal {number}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
    if number == signal.SIGKILL and (attempt / f"oom-{start.key}").exists():
        return f"killed by {name}; the kernel has killed a process there for want of memory"
    return f"killed by {name}"
