"""Pods: why they do not run, how they ended, and which controller deleted them. Pure.

Kubernetes keeps the last 2,048 bytes of a failed container's log
(`terminationMessagePolicy: FallbackToLogsOnError`) when the rest of the pod is gone. They name the
failed rank, the cause, and the supervisor's verdict.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from toolkit.kubernetes.workloads import Object
from toolkit.planning.pods import WORKLOAD_LABEL
from toolkit.runs.records.scheduler_times import Scheduled
from toolkit.supervisor.evidence.rank_end import STOPS
from toolkit.supervisor.evidence.torchrun_report import read_reports, report_texts
from toolkit.supervisor.evidence.traceback import last_trace
from toolkit.text.quantities import whole_number

FATAL = 42
"""Exit code of the supervisor if another start would fail in the same way."""

_ON_THE_WAY = ("ContainerCreating", "PodInitializing")
"""Harmless reasons for waiting."""

_NO_START = ("StartError", "ContainerCannotRun")
"""Reasons for a command that the image does not contain."""

_TAKEN = ("Evicted", "Preempting", "NodeLost", "Shutdown", "NodeShutdown", "Terminated")
"""Reasons in the status of a pod that the kubelet or the node terminated."""

_LACKING = re.compile(r"\d Insufficient ([\w./-]*\w)")
"""The scheduler's message about nodes with too little of a resource."""

ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
"""The pod label with the number of JobSet restarts."""

_INDEX_LABELS = ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index")
_ROLE_LABEL = "training.kubeflow.org/replica-type"

OF_RANK = re.compile(r"\[rank (\d{1,9})\] (.*)", re.DOTALL)
"""A line of a rank, as torchrun forwards it."""

_OF_ENTRYPOINT = re.compile(r"torchrun ended with \d+; (?:(\w+): )?.*: \d+")
"""The last line of toolkit/supervisor/pod.py: torchrun's exit code, the outcome and the sentence
of the retry policy, and the exit code of the container."""

_OF_TORCHRUN = re.compile(
    r"\s|[=-]{4}|[WIE]\d{4} |\[[WIE]\d|Root Cause|Failures:|Traceback |raise |torch\S+Error|$"
)
"""Lines without the cause: torchrun's report and its own traceback."""


def label_of(obj: Object, label: str) -> str:
    """Return the value of a label; empty if the object lacks it."""
    return str((obj["metadata"].get("labels") or {}).get(label) or "")


def index_of(pod: Object) -> tuple[str, int, str]:
    """Return the sort key of a pod: role, index, name; a master comes before workers."""
    numbers = (whole_number(label_of(pod, label)) for label in _INDEX_LABELS)
    index = next((number for number in numbers if number is not None), 0)
    return label_of(pod, _ROLE_LABEL), index, pod["metadata"]["name"]


def short_name(pod: Object) -> str:
    """Return `worker-3` of a PyTorchJob's pod, `node-3` of the others'."""
    role, index, _ = index_of(pod)
    return f"{role or 'node'}-{index}"


def attempt_of(pod: Object) -> int | None:
    """Return the attempt of a pod, from 0; None if nothing counts attempts."""
    return whole_number(label_of(pod, ATTEMPT_LABEL))


def conditions_of(thing: Object) -> Sequence[Object]:
    """Return the conditions of an object."""
    return (thing.get("status") or {}).get("conditions") or ()


def true_conditions(thing: Object) -> dict[str, Object]:
    """Return the true conditions of an object, by type."""
    return {c["type"]: c for c in conditions_of(thing) if c.get("status") == "True"}


def seconds_of(stamp: object) -> float:
    """Return a time of the API in seconds since 1970; 0 if it cannot be read."""
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def sentence(name: str, text: Object, *more: str) -> str:
    """Return reason and message: `NAME: REASON: MESSAGE`."""
    return ": ".join(filter(None, [name, *more, text.get("reason"), text.get("message")]))


def is_running(pod: Object) -> bool:
    """Whether a container of a pod is running, or has run."""
    places = itertools.product(("running", "terminated"), ("state", "lastState"))
    return any(list(_states(pod, which, where=where)) for which, where in places)


def is_up(pod: Object) -> bool:
    """Whether a pod runs now and is not being deleted, so that commands can run in it."""
    phase = (pod.get("status") or {}).get("phase")
    return phase == "Running" and not pod["metadata"].get("deletionTimestamp")


def is_starting(pod: Object) -> bool:
    """Whether a pod is starting, so that only events can explain a delay."""
    return any(waiting.get("reason") in _ON_THE_WAY for waiting in _states(pod, "waiting"))


def trouble(pod: Object) -> str:
    """Return why a pod does not run, or why it restarted; empty if neither applies."""
    name = short_name(pod)
    for condition in conditions_of(pod):
        if condition["type"] == "PodScheduled" and condition.get("status") == "False":
            message = str(condition.get("message") or "")
            lacking = " and ".join(sorted(set(_LACKING.findall(message))))
            summary = lacking and f"no node has enough {lacking}"
            return ": ".join(filter(None, [name, condition.get("reason"), summary, message]))
    before = next(_states(pod, "terminated", where="lastState"), None)
    killed = "OOMKilled" if (before or {}).get("reason") == "OOMKilled" else ""
    for waiting in _states(pod, "waiting"):
        if waiting.get("reason") not in (*_ON_THE_WAY, None):
            return sentence(name, waiting, killed)
    for ended in _states(pod, "terminated"):
        if ended.get("reason") in _NO_START:
            advice = "the image must have /bin/sh, and what `command` names"
            return f"{sentence(name, ended)}; {advice}"
    if killed:
        return f"{name}: OOMKilled, started again"
    return ""


def disruption(pod: Object) -> str:
    """Return why the cluster removed a pod (Kubernetes, pod condition DisruptionTarget)."""
    name, status = short_name(pod), pod.get("status") or {}
    if (condition := true_conditions(pod).get("DisruptionTarget")) is not None:
        # The status of an evicted pod is more precise than its condition.
        return sentence(name, status if status.get("reason") == "Evicted" else condition)
    return sentence(name, status) if status.get("reason") in _TAKEN else ""


def container_statuses(pod: Object, name: str | None = None) -> Iterator[Object]:
    """Yield the statuses of a pod's containers, or of the container with this name."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if name is None or status.get("name", name) == name:
            yield status


def _states(pod: Object, which: str, *, where: str = "state") -> Iterator[Object]:
    for status in container_statuses(pod):
        if (state := (status.get(where) or {}).get(which)) is not None:
            yield state


def failed_for_good(pod: Object) -> bool:
    """Whether a pod has ended in a way that another start would repeat."""
    is_over = (pod.get("status") or {}).get("phase") == "Failed"
    containers = (pod.get("spec") or {}).get("containers") or ()
    words = [word for container in containers for word in container.get("args") or ()]
    if label_of(pod, WORKLOAD_LABEL) == "TrainJob" and words and "--mark-end" not in words:
        return False  # without runs_claim, its TrainingRuntime starts it again after any status
    return is_over and any(
        end.get("reason") in _NO_START
        or (end.get("exitCode") == FATAL and not pod["metadata"].get("deletionTimestamp"))
        for end in _states(pod, "terminated")
    )


def _without_replacements(pods: Iterable[Object]) -> list[Object]:
    """Return pods by age, without the replacements created after the run had failed.

    The oldest replacement is kept if the pod that ended the run is gone.
    """
    by_age = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""))
    final = next(filter(failed_for_good, by_age), None)
    if final is None:
        return by_age
    made = seconds_of(final["metadata"].get("creationTimestamp"))
    end = max(seconds_of(end.get("finishedAt")) for end in _states(final, "terminated"))
    return [
        pod
        for pod in by_age
        if not made < (own := seconds_of(pod["metadata"].get("creationTimestamp"))) or own < end
    ]


def pods_of_last_start(pods: Iterable[Object]) -> list[Object]:
    """Return the newest pod of each name, without pods that ended before the newest was created.

    A Job keeps pods that failed earlier, and the pods of its last start may be deleted.
    """
    by_age = _without_replacements(pods)
    newest = list({short_name(pod): pod for pod in by_age}.values())
    made = max((seconds_of(pod["metadata"].get("creationTimestamp")) for pod in newest), default=0)

    def ended_earlier(pod: Object) -> bool:
        ends = [seconds_of(end.get("finishedAt")) for end in _states(pod, "terminated")]
        return bool(ends) and 0 < max(ends) < made

    late = [pod for pod in newest if not ended_earlier(pod)]
    return late if any(list(_states(pod, "terminated")) for pod in late) else newest


def scheduled_of(pods: Iterable[Object]) -> list[Scheduled]:
    """Return, for each start, when its pods were created and when the last one was scheduled.

    Starts with an unscheduled pod are left out.
    """
    starts: defaultdict[int | None, list[Object]] = defaultdict(list)
    for pod in pods:
        starts[attempt_of(pod)].append(pod)
    found = []
    for own in starts.values():
        of_start = pods_of_last_start(own)
        made = [seconds_of(pod["metadata"].get("creationTimestamp")) for pod in of_start]
        given = [
            seconds_of(true_conditions(pod).get("PodScheduled", {}).get("lastTransitionTime"))
            for pod in of_start
        ]
        if all(made) and all(given):
            found.append(Scheduled(min(made), min(made), max(given)))
    return found


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """The parsed termination message of a container."""

    rank: int | None = None
    """The rank that failed first, if the message names it."""

    time: float | None = None
    """Time of the failure in seconds, by the pod's clock; compare it only with other pods'."""

    cause: str = ""
    """The line with the cause: an exception, or the last line."""

    word: str = ""
    """The outcome by the retry policy, such as `preempted`."""

    verdict: str = ""
    """The supervisor's line: torchrun's exit code, the reason, and whether to retry."""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}"
        return ": ".join(filter(None, [rank, "; ".join(filter(None, [self.cause, self.verdict]))]))


def last_words(message: str) -> LastWords:
    r"""Read the end of a log.

    >>> str(last_words("[rank 3] ValueError: NaN\ntorchrun ended with 1; gives up: 42\n"))
    'rank 3: ValueError: NaN; torchrun ended with 1; gives up: 42'
    """
    by_rank: defaultdict[int, list[str]] = defaultdict(list)
    others, verdict = [], None
    for line in message.rstrip().splitlines():
        if match := OF_RANK.match(line):
            by_rank[int(match[1])].append(match[2])
        elif match := _OF_ENTRYPOINT.match(line):
            verdict = match
        else:
            others.append(line)
    # Ranks that torchrun stopped are not the cause.
    reports = read_reports(others)
    report = min(reports, key=lambda r: (-r.exitcode in STOPS, r.time), default=None)
    # Without a report, the ranks with a traceback come first.
    guess = min(by_rank, key=lambda number: last_trace(by_rank[number]) is None, default=None)
    rank = report.rank if report else guess
    own = by_rank.get(rank, []) if rank is not None else []
    error_lines = report_texts(others).get(report.rank, ()) if report else ()
    status = f"exit status {report.exitcode}" if report else ""
    return LastWords(
        rank=rank,
        time=report.time if report else None,
        cause=_cause(own) or _cause(error_lines) or status or _cause(others),
        word=(verdict[1] or "") if verdict else "",
        verdict=verdict[0] if verdict else "",
    )


def _cause(lines: Sequence[str]) -> str:
    if (trace := last_trace(lines)) is not None:
        return trace.message.strip()
    return next((line.strip() for line in reversed(lines) if not _OF_TORCHRUN.match(line)), "")


@dataclass(frozen=True, kw_only=True)
class Death:
    """How a container failed."""

    pod: str
    exit_code: int
    reason: str
    """The kubelet's reason; torchrun's exit code does not show OOMKilled."""

    finished: str
    """The time, in the kubelet's format: whole seconds."""

    words: LastWords

    def __str__(self) -> str:
        if self.reason == "OOMKilled":
            return f"{self.pod}: OOMKilled: the pod needs more memory"
        status = f"exit status {self.exit_code}"
        cause = status if self.reason in ("", "Error", "Completed") else self.reason
        return ": ".join(filter(None, [self.pod, cause, str(self.words)]))


def first_death(pods: Iterable[Object]) -> Death | None:
    """Return the first failed pod of the last start; None if it is unknown."""
    deaths: list[Death] = []
    for pod in pods_of_last_start(pods):
        ends = [*_states(pod, "terminated"), *_states(pod, "terminated", where="lastState")]
        end = next((e for e in ends if e.get("exitCode") or e.get("reason") == "OOMKilled"), None)
        if end is not None:
            death = Death(
                pod=short_name(pod),
                exit_code=int(end.get("exitCode") or 0),
                reason=str(end.get("reason") or ""),
                finished=str(end.get("finishedAt") or "~"),
                words=last_words(str(end.get("message") or "")),
            )
            deaths.append(death)
    dated = all(death.words.time is not None for death in deaths)

    def order(death: Death) -> tuple[bool, float, str]:
        return (
            death.reason != "OOMKilled",
            death.words.time or 0.0 if dated else 0.0,
            death.finished,
        )

    return min(deaths, key=order, default=None)
