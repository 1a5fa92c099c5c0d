"""Which rank of a run in pods has failed first, and why: by what the pods have printed. Pure.

The client cannot read a pod's disk, so it reads the log, or the end of it that Kubernetes keeps:
the ranks' lines as torchrun forwards them, torchrun's report, and the entrypoint's lines.
"""

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from toolkit.kubernetes.pods import conditions_of
from toolkit.kubernetes.termination_message import OF_RANK, LastWords, last_words
from toolkit.kubernetes.workloads import Object
from toolkit.runs.failure import STOPS, Failure, Kind, first_of, is_echo
from toolkit.runs.torchrun_report import (
    Reported,
    Trace,
    last_trace,
    read_reports,
    report_texts,
    shift_s,
)

__all__ = ["Line", "Printed", "first_failure", "of_conditions", "seconds_of"]

Line = tuple[float | None, str]
"""When it was printed, in seconds since 1970, where that is known; and the line."""

_AGAIN = re.compile(r"E\d{4} \S+ .*\] failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,9}) ")
"""What torchrun logs before it ends the ranks of a start (torch 2.13, multiprocessing/api.py)."""

_OWN = re.compile(r"torch\S+(ChildFailedError|SignalException)")
"""How torchrun ends because of its ranks."""

_NO_FAILURE = ("preempted", "done")
"""The retry policy's words for an end that is not a failure."""

_POD_FAILED = re.compile(r"pod \S+?/(\S+) failed with exit code (\d+)")
"""The Job controller's message about the pod for which it has ended the Job."""

_INDEX = re.compile(r"-(\d+)-\w+$")
_LAST_WORDS = 5


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What a container has printed that has ended badly."""

    pod: str
    """The pod's short name."""

    attempt: int
    """The start of all pods that it belongs to."""

    exit_code: int
    """Its exit status."""

    reason: str
    """The kubelet's reason of its end."""

    ended: float
    """When it has ended, in seconds since 1970."""

    lines: Sequence[Line]
    """The last lines, oldest first."""


@dataclass(kw_only=True)
class _Start:
    """The output of one start of a pod's ranks."""

    ranks: dict[int, list[Line]] = field(default_factory=lambda: defaultdict(list))
    others: list[Line] = field(default_factory=list)
    noticed: list[tuple[float | None, int, int]] = field(default_factory=list)
    """Time, exit status and local rank of the failures that torchrun logs."""


def first_failure(printed: Iterable[Printed]) -> Failure | None:
    """Return what failed first; None if it is unknown.

    Of several starts of the ranks within a pod, the last one counts. Ranks that only report the
    loss of another one come last, at any time.
    """
    failures: list[Failure] = []
    before: dict[int, list[Failure]] = {}
    for pod in printed:
        *earlier, last = _starts_of(pod.lines)
        reports = _reports(pod, last)
        base = next((reported.rank - reported.local_rank for reported in reports), None)
        failures += _of_ranks(pod, last, reports, base, len(earlier)) or _of_pod(pod, last)
        for restart, start in enumerate(earlier):
            before.setdefault(restart, []).extend(_noticed(pod, start, base, restart))
    if not failures:
        return None
    earlier_failures = tuple(first_of(those) for _, those in sorted(before.items()) if those)
    return replace(first_of(failures), earlier=earlier_failures)


def of_conditions(things: Iterable[Object]) -> Failure | None:
    """Return the failure of the pod that has ended an object or one of its Jobs."""
    for thing in things:
        for condition in conditions_of(thing):
            message = str(condition.get("message") or "")
            match = _POD_FAILED.search(message)
            if condition["type"] != "Failed" or condition.get("status") != "True" or not match:
                continue
            index = _INDEX.search(match[1])
            return Failure(
                kind="exit",
                rank=None,
                local_rank=None,
                node=f"node-{index[1]}" if index else match[1],
                attempt=0,
                restart=0,
                time=_seconds(condition.get("lastTransitionTime")),
                message=f"exit status {match[2]}; its pod is gone: {message}",
                traceback=(),
            )
    return None


def _starts_of(lines: Sequence[Line]) -> list[_Start]:
    """Return the output, grouped by starts of the ranks; the last one holds torchrun's report."""
    starts = [_Start()]
    for time, text in lines:
        if match := OF_RANK.match(text):
            if starts[-1].noticed and not _reported(starts[-1].others):
                starts.append(_Start())
            starts[-1].ranks[int(match[1])].append((time, match[2]))
        else:
            starts[-1].others.append((time, text))
            if match := _AGAIN.match(text):
                starts[-1].noticed.append((time, int(match[1]), int(match[2])))
    if len(starts) > 1 and not starts[-1].noticed and _reported(starts[-1].others):
        late = starts.pop()  # what ranks had printed at their end, and torchrun passed on after it
        for rank, rank_lines in late.ranks.items():
            starts[-1].ranks[rank] += rank_lines
        starts[-1].others += late.others
    return starts


def _reported(others: Sequence[Line]) -> bool:
    return any(_OWN.match(text) for _, text in others)


def _reports(pod: Printed, start: _Start) -> list[Reported]:
    """Return torchrun's report, by the clock of the log: a pod's time zone may not be ours."""
    reports = read_reports(text for _, text in start.others)
    stamps = [time for time, text in start.others if time and "error_file:" in text]
    now = stamps[-1] if stamps else pod.ended
    last = max((reported.time for reported in reports), default=now)
    shift = shift_s(now - last)
    return [replace(reported, time=reported.time + shift) for reported in reports]


def _of_ranks(
    pod: Printed, start: _Start, reports: Sequence[Reported], base: int | None, restart: int
) -> list[Failure]:
    """Return how the ranks have failed that torchrun reports, or else that left a traceback."""
    texts = report_texts(text for _, text in start.others)
    failures = []
    for reported in reports:
        one = _judged(
            pod, reported, start.ranks.get(reported.rank, []), texts.get(reported.rank, ())
        )
        failures += [replace(one, restart=restart)] if one is not None else []
    if not reports and _last_words(pod).word not in _NO_FAILURE:
        failures = _traces(pod, start, base, restart)
    return failures


def _judged(
    pod: Printed, reported: Reported, lines: Sequence[Line], error_lines: Sequence[str]
) -> Failure | None:
    """Return a rank's failure by the rules of `toolkit.runs.failure`; None for a victim.

    Args:
        pod: Where it ran.
        reported: What torchrun reports of it.
        lines: Its output.
        error_lines: The content of its error file.
    """
    if -reported.exitcode in STOPS and not error_lines:
        return None
    printed = last_trace([text for _, text in lines])
    words = tuple(text for _, text in lines if text.strip())[-_LAST_WORDS:]
    time = None
    kind: Kind
    if error_lines:
        trace = last_trace(error_lines)
        message = trace.message if trace else "\n".join(error_lines)
        kind = "echo" if is_echo(message) else "exception"
        trace = trace or printed
        words = trace.lines if trace else ()
        time = _time_of(lines, trace) if kind == "exception" else None
    elif reported.exitcode == 1 and printed is not None:
        kind = "echo" if is_echo(printed.message) else "exception"
        message, words, time = printed.message, printed.lines, _time_of(lines, printed)
    elif reported.exitcode < 0:
        aborted = reported.exitcode == -signal.SIGABRT and is_echo("\n".join(words))
        kind = "echo" if aborted else "signal"
        message = f"killed by {_signal(-reported.exitcode)}"
        if reported.exitcode == -signal.SIGKILL and _is_out_of_memory(pod):
            message += "; the kernel has killed a process there for want of memory"
        if printed is not None and printed.at_end:
            words = printed.lines
    else:
        kind = "exit"
        message = f"exit status {reported.exitcode}" + (f": {words[-1]}" if words else "")
    return Failure(
        kind=kind,
        rank=reported.rank,
        local_rank=reported.local_rank,
        node=pod.pod,
        attempt=pod.attempt,
        restart=0,
        time=time or reported.time,
        message=message,
        traceback=words,
    )


def _traces(pod: Printed, start: _Start, base: int | None, restart: int) -> list[Failure]:
    """Return the exceptions with which ranks have ended."""
    failures = []
    for rank, lines in start.ranks.items():
        trace = last_trace([text for _, text in lines])
        if trace is not None and trace.at_end:
            one = Failure(
                kind="echo" if is_echo(trace.message) else "exception",
                rank=rank,
                local_rank=None if base is None else rank - base,
                node=pod.pod,
                attempt=pod.attempt,
                restart=restart,
                time=_time_of(lines, trace) or pod.ended,
                message=trace.message,
                traceback=trace.lines,
            )
            failures.append(one)
    return failures


def _noticed(pod: Printed, start: _Start, base: int | None, restart: int) -> Iterator[Failure]:
    """Yield how the ranks have failed of a start that torchrun did not report."""
    traces = _traces(pod, start, base, restart)
    yield from traces
    for time, status, local_rank in start.noticed:
        rank = None if base is None else base + local_rank
        if status != 1 or rank not in {one.rank for one in traces}:
            yield Failure(
                kind="signal" if status < 0 else "exit",
                rank=rank,
                local_rank=local_rank,
                node=pod.pod,
                attempt=pod.attempt,
                restart=restart,
                time=time or pod.ended,
                message=f"killed by {_signal(-status)}" if status < 0 else f"exit status {status}",
                traceback=(),
            )


def _of_pod(pod: Printed, start: _Start) -> list[Failure]:
    """Return the end of a container of whose ranks nothing is known."""
    if _last_words(pod).word in _NO_FAILURE and pod.reason != "OOMKilled":
        return []
    texts = [text for _, text in start.others]
    trace = last_trace(texts)
    kind: Kind
    lines: tuple[str, ...] = ()
    if pod.reason == "OOMKilled":
        kind, message = "signal", "OOMKilled: the pod needs more memory"
    elif trace is not None and not _OWN.match(trace.message):
        kind = "echo" if is_echo(trace.message) else "exception"
        message, lines = trace.message, trace.lines
    else:
        last_message = str(last_words("\n".join(text for _, text in pod.lines)))
        kind = "exit"
        message = f"exit status {pod.exit_code}" + (f": {last_message}" if last_message else "")
    return [
        Failure(
            kind=kind,
            rank=None,
            local_rank=None,
            node=pod.pod,
            attempt=pod.attempt,
            restart=0,
            time=pod.ended,
            message=message,
            traceback=lines,
        )
    ]


def _last_words(pod: Printed) -> LastWords:
    return last_words("\n".join(text for _, text in pod.lines[-3:]))


def _is_out_of_memory(pod: Printed) -> bool:
    return pod.reason == "OOMKilled" or "out of memory" in _last_words(pod).verdict


def _time_of(lines: Sequence[Line], trace: Trace | None) -> float | None:
    """Return when the last line of a traceback was printed."""
    if trace is None or not trace.lines:
        return None
    return next((time for time, text in reversed(lines) if text.endswith(trace.message)), None)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _seconds(stamp: object) -> float:
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def seconds_of(ended: Mapping[str, object]) -> float:
    """Return when a container has ended, in seconds since 1970; 0 if it is unknown."""
    return _seconds(ended.get("finishedAt"))
