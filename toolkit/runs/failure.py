"""Which rank of a run failed first, and why.

The evidence: a rank whose main function is wrapped by `@record` leaves an error file, as `train/`
does; other ranks leave a traceback in their stderr; torchrun's report at its end lists the ranks
that failed, with their signals. `judge` weighs it. On Slurm and on this machine the evidence is in
the folder of the attempt; for pods, `toolkit/kubernetes/failure.py` reads it from their logs.
"""

import contextlib
import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from toolkit.runs import run_directory
from toolkit.runs.log_reader import attempt_folders
from toolkit.runs.rank_folders import RankStart, reports_of, starts_of
from toolkit.runs.torchrun_report import Reported
from toolkit.runs.tracebacks import Trace, last_trace
from toolkit.supervisor.evidence.echoes import ECHOES, NO_ECHOES
from toolkit.text import untrusted
from toolkit.text.secret_scan import Mask

_LAST_WORDS = 5
_MOST_EARLIER = 50
"""How many failures of earlier starts are shown: the newest ones."""

_UNREPORTED_S = 120.0
"""Seconds before the reported failures in which an unreported rank may have failed first."""

_WELL = ("done", "cancelled", "preempted", "requeued", "walltime", "fenced", "terminated")
"""Words of the retry policy for ends of attempts in which nothing has failed."""

_STOPPED = ("cancelled", "preempted", "requeued", "terminated", "walltime")
"""Those of attempts that were told to stop; a rank may have failed at writing its checkpoint."""

_TOLD = "stopped by "
"""What `train` tells torchrun where a signal has stopped it."""

_NOT_BEGUN = ("gave_up", "no_progress")
"""Those of attempts that may have ended before they have started anything."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""The signals that torchrun forwards to its ranks, and ends the other ranks with."""

_WHAT = re.compile(r"^ *what\(\): *(.+)$", re.MULTILINE)
"""An exception of C++ that nothing has caught, as it is printed before SIGABRT."""

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

    rank: int | None = None
    """The global rank, where it is known."""

    local_rank: int | None = None
    """Its number on its node, where it is known."""

    node: str
    """The node's name; `node-1` on this machine; the pod's short name on Kubernetes."""

    attempt: int
    """The attempt of the run."""

    restart: int = 0
    """How often its torchrun had started its ranks anew within the attempt."""

    time: float
    """When, in seconds since 1970."""

    message: str
    """The exception with its message, or the signal or exit status of the rank."""

    traceback: tuple[str, ...] = ()
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
        if (more := len(self.earlier) - _MOST_EARLIER) > 0:
            yield f"{more} earlier failures are not shown"
        for before in self.earlier[-_MOST_EARLIER:]:
            yield f"earlier failure, in {before._when(counted=True)}: {before}"
        when = self._when(counted=bool(self.restart or self.earlier))
        yield headline(self, when=f", in {when}")
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


def headline(failure: object, *, when: str = "") -> str:
    """Return the line that opens every report of a first failure.

    `status` and sweeps print `first failure: …`; `logs` and the end of a run add `when`, such as
    `, in attempt 0, 14:05:09`.
    """
    return f"first failure{when}: {failure}"


def first_failure(run_dir: Path, number: int | None = None) -> Failure | None:
    """Return what failed first in an attempt; None if no rank failed, or the cause is unknown.

    Of several starts of the ranks within the attempt, the last one counts. Ranks that have only
    lost another one often notice that before the other's torchrun does, so they come last. Without
    a number, the newest attempt is meant. In an attempt that was stopped, only an exception that a
    rank has raised by itself is a failure.
    """
    attempt = _newest(run_dir) if number is None else run_dir / "logs" / f"attempt-{number}"
    if attempt is None or run_directory.exit_status_of(attempt) == 0:
        return None
    ended_well = _ended_well(run_dir, attempt)
    if ended_well and run_directory.reason_of(attempt).word not in _STOPPED:
        return None
    starts = starts_of(attempt)
    reports = reports_of(run_dir, attempt, starts)
    bases = {start.key: reported.rank - reported.local_rank for start, reported in reports.items()}
    last = dict.fromkeys([*(start for start in starts if start.last), *reports])
    failures = [f for start in last if (f := _judged(attempt, start, bases, reports.get(start)))]
    if (attempt / "exit_status").exists() and all(one.kind == "echo" for one in failures):
        since = min((one.time for one in failures), default=0.0) - _UNREPORTED_S
        silent = [_unreported(attempt, start, bases) for start in last if start.key not in bases]
        failures += [one for one in silent if one and one.time >= since]
    if ended_well:
        own = [one for one in failures if one.kind == "exception"]
        failures = [one for one in own if not one.message.startswith(_TOLD)]
    if not failures:
        return None
    earlier = earlier_failures(attempt, starts, bases)
    return replace(first_of(failures), earlier=tuple(earlier[number] for number in sorted(earlier)))


def earlier_failures(
    attempt: Path, starts: Iterable[RankStart], bases: Mapping[str, int]
) -> dict[int, Failure]:
    """Return what failed first in each start after which torchrun has started the ranks anew.

    The keys are the numbers of restarts before it. `bases` has the first rank of each node, by the
    node's key, where it is known.
    """
    before: defaultdict[int, list[RankStart]] = defaultdict(list)
    for start in starts:
        if not start.last:
            before[start.restart].append(start)
    found: dict[int, Failure] = {}
    for restart, ranks in before.items():
        judged = [_judged(attempt, s, bases) or _unreported(attempt, s, bases) for s in ranks]
        if any(judged):
            found[restart] = first_of(filter(None, judged))
    return found


def first_of(failures: Iterable[Failure]) -> Failure:
    """Return what failed first; failures that only report the loss of another rank come last."""
    return min(failures, key=lambda one: (one.kind == "echo", one.time))


def _newest(run_dir: Path) -> Path | None:
    """Return the newest attempt that has started torchrun."""
    for attempt in reversed(attempt_folders(run_dir)):
        if any(e.is_folder and e.name.startswith("node-") for e in untrusted.entries(attempt)):
            return attempt
        if run_directory.reason_of(attempt).word not in _NOT_BEGUN:
            return None
    return None


def _ended_well(run_dir: Path, attempt: Path) -> bool:
    content, word = run_directory.outcome(run_dir) or {}, run_directory.reason_of(attempt).word
    status = content.get("status") if attempt.name == f"attempt-{content.get('attempt')}" else ""
    if status == "fatal" and word in run_directory.STOP_WORDS:
        return False  # it failed while it was being stopped
    stopped = not word and (status == "preempted" or run_directory.cancel_requested(run_dir))
    return run_directory.exit_status_of(attempt) == 0 or word in _WELL or stopped


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why a rank ended."""

    kind: Kind
    message: str
    traceback: tuple[str, ...]
    source: Literal["error file", "traceback", "report"]
    """The evidence that counted, whose time is that of the failure."""


def judge(
    exitcode: int | None,
    *,
    error: tuple[str, tuple[str, ...]] | None,
    stderr: Sequence[str],
    out_of_memory: bool,
) -> Verdict | None:
    """Return why a rank ended; None for a rank that was only ended with the others.

    Args:
        exitcode: Its exit status in torchrun's report, if there is one; negative for a signal.
        error: Message and traceback of its error file.
        stderr: Its last lines.
        out_of_memory: Whether the kernel has killed a process there for want of memory.
    """
    trace = last_trace(stderr)
    if error is not None:
        message, lines = error
        lines = lines or (trace.lines if trace else ())
        return Verdict(kind=_kind(message), message=message, traceback=lines, source="error file")
    if exitcode is None or -exitcode in STOPS:
        return None
    last_words = tuple([line for line in stderr if line.strip()][-_LAST_WORDS:])
    if exitcode == 1 and trace:
        message, lines = trace.message, trace.lines
        return Verdict(kind=_kind(message), message=message, traceback=lines, source="traceback")
    kind: Kind = "exit"
    message = f"exit status {exitcode}" + (f": {last_words[-1]}" if last_words else "")
    if exitcode < 0:
        aborted = exitcode == -signal.SIGABRT and is_echo("\n".join(last_words))
        kind, message = "echo" if aborted else "signal", killed_by(-exitcode)
        if exitcode == -signal.SIGABRT and (whats := _WHAT.findall("\n".join(stderr))):
            message += f": {whats[-1]}"
        if exitcode == -signal.SIGKILL and out_of_memory:
            message += "; the kernel has killed a process there for want of memory"
        if trace and trace.at_end:
            last_words = trace.lines
    return Verdict(kind=kind, message=message, traceback=last_words, source="report")


def _kind(message: str) -> Kind:
    return "echo" if is_echo(message) else "exception"


def killed_by(number: int) -> str:
    """Return the sentence for a signal that has killed a rank."""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"killed by signal {number}"


def _judged(
    attempt: Path, start: RankStart, bases: Mapping[str, int], reported: Reported | None = None
) -> Failure | None:
    """Return the failure of a rank by its files and torchrun's report."""
    error, stderr = start.error(), start.stderr()
    verdict = judge(
        reported.exitcode if reported else None,
        error=error and error[:2],
        stderr=stderr,
        out_of_memory=(attempt / f"oom-{start.key}").exists(),
    )
    if verdict is None:
        return None
    time = reported.time if reported else 0.0
    if error:
        time = error[2]
    elif verdict.source == "traceback":
        time = start.silent_since()
    failure = _failure(attempt, start, bases, last_trace(stderr), verdict, time)
    return replace(failure, rank=reported.rank) if reported else failure


def _unreported(attempt: Path, start: RankStart, bases: Mapping[str, int]) -> Failure | None:
    """Return a rank's failure from the end of its stderr, if its torchrun was killed as well."""
    trace = last_trace(start.stderr())
    if trace is None or not trace.at_end or is_echo(trace.message):
        return None
    verdict = Verdict(
        kind="exception", message=trace.message, traceback=trace.lines, source="traceback"
    )
    return _failure(attempt, start, bases, trace, verdict, start.silent_since())


def _failure(
    attempt: Path,
    start: RankStart,
    bases: Mapping[str, int],
    trace: Trace | None,
    verdict: Verdict,
    time: float,
) -> Failure:
    rank = trace.rank if trace else None
    if rank is None and start.key in bases:
        rank = bases[start.key] + start.local_rank
    return Failure(
        kind=verdict.kind,
        rank=rank,
        local_rank=start.local_rank,
        node=start.node,
        attempt=int(attempt.name.split("-")[1]),
        restart=start.restart,
        time=time,
        message=verdict.message,
        traceback=verdict.traceback,
    )
