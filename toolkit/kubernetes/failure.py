"""Finds the first failed rank of a run in pods, and its cause, in the output of the pods.

The client cannot read a pod's disk, so it reads the log, or the end of it that Kubernetes keeps:
the ranks' lines as torchrun forwards them, torchrun's report, and the supervisor's lines.
`failure_of` reads them from the cluster; `first_failure` evaluates them without I/O.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, lines_of, unless_refused
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.logs import STAMPED
from toolkit.kubernetes.pods import (
    OF_RANK,
    LastWords,
    attempt_of,
    container_statuses,
    disruption,
    last_words,
    pods_of_last_start,
    seconds_of,
    short_name,
    true_conditions,
)
from toolkit.kubernetes.workloads import Object, WorkloadKind
from toolkit.runs.evidence.failure import Failure, first_of
from toolkit.supervisor.evidence.rank_end import exited, judge, kind_of
from toolkit.supervisor.evidence.torchrun_report import (
    Reported,
    read_reports,
    report_texts,
    shift_s,
)
from toolkit.supervisor.evidence.traceback import Trace, last_trace

LogLine = tuple[float | None, str]
"""The time of printing in seconds since 1970, if it is known, and the line."""

_MOST_LINES = 10_000
"""Maximum number of lines to read from a pod: a failed rank ends its run within seconds."""

_AGAIN = re.compile(r"E\d{4} \S+ .*\] failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,9}) ")
"""torchrun's message before it stops the other ranks (torch 2.13, multiprocessing/api.py)."""

_OWN = re.compile(r"torch\S+(ChildFailedError|SignalException)")
"""torchrun's exceptions after a failed rank or a signal."""

_NO_FAILURE = ("preempted", "done")
"""Outcomes of the retry policy that are not failures."""

_POD_FAILED = re.compile(r"pod [^/\s]+/(\S+) failed with exit code (\d+)")
"""The Job controller's message about the pod that failed the Job."""

_INDEX = re.compile(r"-(\d+)-\w+$")


@dataclass(frozen=True, kw_only=True)
class ContainerOutput:
    """The output of a failed container."""

    pod: str
    """The pod's short name."""

    attempt: int
    """The attempt of the pod: one start of all pods."""

    exit_code: int
    reason: str
    """The kubelet's reason for the termination."""

    ended: float
    """The time of termination in seconds since 1970; 0 if unknown."""

    lines: Sequence[LogLine]
    """The last lines, oldest first."""


def failure_of(
    cluster: Cluster, kind: WorkloadKind, obj: Object, selector: str, attempt: int | None
) -> Failure | None:
    """Return the first failure in an attempt of a failed run; by default the newest attempt.

    If a log is no longer readable, its end is used, which Kubernetes keeps with the pod. If the pod
    is gone as well, the object's conditions may name it. None if the cause is unknown.

    Raises:
        Away: the server does not answer.
    """
    pods = pods_of_last_start(unless_refused(lambda: cluster.pods(selector)) or [])
    number = max((attempt_of(pod) or 0 for pod in pods), default=0) if attempt is None else attempt
    own = [pod for pod in pods if (attempt_of(pod) or 0) == number and not disruption(pod)]
    outputs = [out for pod in own if (out := _output_of(cluster, kind, pod)) is not None]
    if (failure := first_failure(outputs)) is not None or outputs or attempt not in (None, 0):
        return failure
    name = str(obj["metadata"]["name"])
    jobs = unless_refused(lambda: cluster.jobs_of([name])) if kind.jobs else None
    return _of_conditions([obj, *(jobs or ())])


def _output_of(cluster: Cluster, kind: WorkloadKind, pod: Object) -> ContainerOutput | None:
    """Return the output of a pod's failed container; None if it has not failed."""
    for status in container_statuses(pod, kind.container):
        state = status.get("state") or {}
        ended = state.get("terminated")
        previous = ended is None and "waiting" in state
        if previous:
            ended = (status.get("lastState") or {}).get("terminated")
        if not ended or not (ended.get("exitCode") or ended.get("reason") == "OOMKilled"):
            continue
        message = str(ended.get("message") or "")
        lines: list[LogLine] = []
        name, container = pod["metadata"]["name"], kind.container
        try:
            with cluster.log(name, container, previous=previous, most=_MOST_LINES) as response:
                lines = list(_dated(lines_of(response)))
        except Away:
            raise
        except LauncherError:
            pass  # the log is gone, or reading it is denied
        return ContainerOutput(
            pod=short_name(pod),
            attempt=attempt_of(pod) or 0,
            exit_code=int(ended.get("exitCode") or 0),
            reason=str(ended.get("reason") or ""),
            ended=seconds_of(ended.get("finishedAt")),
            lines=lines or list(_dated(line.encode() for line in message.splitlines())),
        )
    return None


def _dated(lines: Iterable[bytes]) -> Iterator[LogLine]:
    for raw in lines:
        time, text = None, raw
        if match := STAMPED.match(raw):
            whole_seconds = datetime.fromisoformat(f"{match[1].decode()}+00:00").timestamp()
            time = whole_seconds + float(b"0." + (match[2] or b"0"))
            text = match[3]
        yield time, text.decode(errors="replace")


def _of_conditions(things: Iterable[Object]) -> Failure | None:
    """Return the failure of the pod that made an object or one of its Jobs fail."""
    for thing in things:
        end = true_conditions(thing).get("Failed", {})
        message = str(end.get("message") or "")
        if (match := _POD_FAILED.search(message)) is None:
            continue
        index = _INDEX.search(match[1])
        return Failure(
            kind="exit",
            node=f"node-{index[1]}" if index else match[1],
            attempt=0,
            time=seconds_of(end.get("lastTransitionTime")),
            message=f"exit status {match[2]}; its pod is gone: {message}",
        )
    return None


def first_failure(outputs: Iterable[ContainerOutput]) -> Failure | None:
    """Return the first failure; None if it is unknown.

    If the ranks were started several times in a pod, the last start counts. Ranks that only report
    the loss of another rank come last, whatever their time.
    """
    failures: list[Failure] = []
    before: defaultdict[int, list[Failure]] = defaultdict(list)
    for output in outputs:
        *earlier, last = _starts_of(output)
        reports = last.reports()
        base = next((reported.rank - reported.local_rank for reported in reports), None)
        failures += last.failures(reports, base) or last.container_failures()
        for start in earlier:
            before[start.restart].extend(start.unreported_failures(base))
    first = first_of(failures)
    if first is None:
        return None
    by_restart = (first_of(before[restart]) for restart in sorted(before))
    return replace(first, earlier=tuple(filter(None, by_restart)))


@dataclass(kw_only=True)
class _RanksOutput:
    """The output of one start of a pod's ranks, as evidence of their failures."""

    container: ContainerOutput
    restart: int
    """Number of torchrun restarts before this start."""

    ranks: dict[int, list[LogLine]] = field(default_factory=lambda: defaultdict(list))
    others: list[LogLine] = field(default_factory=list)
    noticed: list[tuple[float | None, int, int]] = field(default_factory=list)
    """Time, exit status and local rank of the failures that torchrun logs."""

    is_reported: bool = False
    """Whether torchrun exited after this start, with its report."""

    def add(self, time: float | None, text: str) -> None:
        """Add a line without a rank prefix."""
        self.others.append((time, text))
        self.is_reported = self.is_reported or _OWN.match(text) is not None
        if match := _AGAIN.match(text):
            self.noticed.append((time, int(match[1]), int(match[2])))

    @property
    def last_words(self) -> LastWords:
        """The cause and the verdict in the container's last lines."""
        return last_words("\n".join(text for _, text in self.container.lines[-3:]))

    def reports(self) -> list[Reported]:
        """Return torchrun's report with the log's times: the pod's time zone may differ."""
        # One report per rank: a second one for the same rank was printed by something else.
        by_rank = {one.rank: one for one in read_reports(text for _, text in self.others)}
        reports = list(by_rank.values())
        stamps = [time for time, text in self.others if time and "error_file:" in text]
        now = stamps[-1] if stamps else self.container.ended
        last = max((reported.time for reported in reports), default=now)
        shift = shift_s(now - last)
        return [reported._replace(time=reported.time + shift) for reported in reports]

    def failures(self, reports: Sequence[Reported], base: int | None) -> list[Failure]:
        """Return the rank failures that torchrun reports, or else those that left a traceback.

        `base` is the global rank of the pod's first rank, if it is known.
        """
        if not reports and self.last_words.word not in _NO_FAILURE:
            return self._traces(base)
        texts = report_texts(text for _, text in self.others)
        failures = (self._judged(reported, texts.get(reported.rank, ())) for reported in reports)
        return [failure for failure in failures if failure is not None]

    def unreported_failures(self, base: int | None) -> Iterator[Failure]:
        """Yield the rank failures of a start without a report from torchrun."""
        traces = self._traces(base)
        yield from traces
        with_trace = {trace.rank for trace in traces}
        for time, status, local_rank in self.noticed:
            rank = None if base is None else base + local_rank
            if status != 1 or rank not in with_trace:
                kind = "signal" if status < 0 else "exit"
                ended = self._failure(kind, exited(status), time)
                yield replace(ended, rank=rank, local_rank=local_rank)

    def container_failures(self) -> list[Failure]:
        """Return the failure of the container, if nothing is known about its ranks."""
        container = self.container
        if container.reason == "OOMKilled":
            return [self._failure("signal", "OOMKilled: the pod needs more memory")]
        if self.last_words.word in _NO_FAILURE:
            return []
        trace = last_trace([text for _, text in self.others])
        if trace is not None and not _OWN.match(trace.message):
            raised = self._failure(kind_of(trace.message), trace.message)
            return [replace(raised, traceback=trace.lines)]
        words = str(last_words("\n".join(text for _, text in container.lines)))
        message = f"exit status {container.exit_code}" + (f": {words}" if words else "")
        return [self._failure("exit", message)]

    def _judged(self, reported: Reported, error_lines: Sequence[str]) -> Failure | None:
        """Return a rank's failure; None for a victim.

        The error lines are the content of the rank's error file, as torchrun reports it.
        """
        lines = self.ranks.get(reported.rank, [])
        stderr = [text for _, text in lines]
        trace = last_trace(error_lines)
        message = trace.message if trace else "\n".join(error_lines)
        verdict = judge(
            reported.exitcode,
            error=(message, trace.lines if trace else ()) if error_lines else None,
            stderr=stderr,
            out_of_memory=self.container.reason == "OOMKilled"
            or "out of memory" in self.last_words.verdict,
        )
        if verdict is None:
            return None
        time = None
        if verdict.source == "traceback" or (error_lines and verdict.kind == "exception"):
            time = _time_of(lines, trace or last_trace(stderr))
        return replace(
            self._failure(verdict.kind, verdict.message, time or reported.time),
            rank=reported.rank,
            local_rank=reported.local_rank,
            traceback=verdict.traceback,
        )

    def _traces(self, base: int | None) -> list[Failure]:
        """Return the exceptions that ended ranks."""
        traces = ((r, lines, last_trace([t for _, t in lines])) for r, lines in self.ranks.items())
        return [
            replace(
                self._failure(kind_of(trace.message), trace.message, _time_of(lines, trace)),
                rank=rank,
                local_rank=None if base is None else rank - base,
                traceback=trace.lines,
            )
            for rank, lines, trace in traces
            if trace is not None and trace.at_end
        ]

    def _failure(self, kind: str, message: str, time: float | None = None) -> Failure:
        return Failure(
            kind=kind,
            node=self.container.pod,
            attempt=self.container.attempt,
            restart=self.restart,
            time=time or self.container.ended,
            message=message,
        )


def _starts_of(container: ContainerOutput) -> list[_RanksOutput]:
    """Return the output, grouped by starts of the ranks; the last start has torchrun's report."""
    starts = [_RanksOutput(container=container, restart=0)]
    for time, text in container.lines:
        if match := OF_RANK.match(text):
            if starts[-1].noticed and not starts[-1].is_reported:
                starts.append(_RanksOutput(container=container, restart=len(starts)))
            starts[-1].ranks[int(match[1])].append((time, match[2]))
        else:
            starts[-1].add(time, text)
    if len(starts) > 1 and not starts[-1].noticed and starts[-1].is_reported:
        late = starts.pop()  # last output of the ranks, which torchrun forwarded late
        for rank, rank_lines in late.ranks.items():
            starts[-1].ranks[rank] += rank_lines
        starts[-1].others += late.others
    return starts


def _time_of(lines: Sequence[LogLine], trace: Trace | None) -> float | None:
    """Return when the last line of a traceback was printed."""
    if trace is None or not trace.lines:
        return None
    return next((time for time, text in reversed(lines) if text.endswith(trace.message)), None)
