"""What pods say: why they do not run, how they ended, and which controller deleted them. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from toolkit.kubernetes.termination_message import LastWords, last_words
from toolkit.kubernetes.workloads import ATTEMPT_LABEL, Object
from toolkit.text.quantities import whole_number

__all__ = [
    "FATAL",
    "Death",
    "attempt_of",
    "conditions_of",
    "disruption",
    "first_death",
    "index_of",
    "is_running",
    "is_starting",
    "newest_of",
    "sentence",
    "short_name",
    "trouble",
]

FATAL = 42
"""How the entrypoint ends where another start would end alike."""

_ON_THE_WAY = ("ContainerCreating", "PodInitializing")
"""Reasons for waiting that are no trouble."""

_TAKEN = ("Evicted", "Preempting", "NodeLost", "Shutdown", "NodeShutdown", "Terminated")
"""Reasons in a pod's status when the kubelet or its node has ended it."""

_LACKING = re.compile(r"\d+ Insufficient ([\w./-]*\w)")
"""The scheduler's message about nodes that have too little of a resource."""


_INDEX_LABELS = (
    "training.kubeflow.org/replica-index",
    "batch.kubernetes.io/job-completion-index",
)
_ROLE_LABEL = "training.kubeflow.org/replica-type"


def index_of(pod: Object) -> tuple[str, int, str]:
    """Return what pods are ordered by: role, index, name; a master comes before workers."""
    labels = pod["metadata"].get("labels") or {}
    numbers = (whole_number(str(labels.get(name, ""))) for name in _INDEX_LABELS)
    index = next((number for number in numbers if number is not None), 0)
    return labels.get(_ROLE_LABEL, ""), index, pod["metadata"]["name"]


def short_name(pod: Object) -> str:
    """Return `worker-3` of a PyTorchJob's pod, `node-3` of the others'."""
    role, index, _ = index_of(pod)
    return f"{role or 'node'}-{index}"


def attempt_of(pod: Object) -> int | None:
    """Return which start of all pods a pod belongs to, from 0; None where nothing counts them."""
    return whole_number(str((pod["metadata"].get("labels") or {}).get(ATTEMPT_LABEL, "")))


def conditions_of(thing: Object) -> Sequence[Object]:
    """Return the conditions of an object."""
    return (thing.get("status") or {}).get("conditions") or ()


def sentence(name: str, text: Object, *more: str) -> str:
    """Return reason and message: `NAME: REASON: MESSAGE`."""
    return ": ".join(filter(None, [name, *more, text.get("reason"), text.get("message")]))


def is_running(pod: Object) -> bool:
    """Whether a container of a pod runs, or has run."""
    return any(
        True
        for which in ("running", "terminated")
        for where in ("state", "lastState")
        for _ in _states(pod, which, where=where)
    )


def is_starting(pod: Object) -> bool:
    """Whether a pod is being started, so that only events can hold the reason of a delay."""
    return any(waiting.get("reason") in _ON_THE_WAY for waiting in _states(pod, "waiting"))


def trouble(pod: Object) -> str:
    """Return what keeps a pod from running, or made it start again; empty where nothing does."""
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
    if killed:
        return f"{name}: OOMKilled, started again"
    return ""


def disruption(pod: Object) -> str:
    """Return why the cluster took a pod away (Kubernetes, pod condition DisruptionTarget)."""
    name, status = short_name(pod), pod.get("status") or {}
    for condition in conditions_of(pod):
        if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
            # The status of an evicted pod is more precise than its condition.
            return sentence(name, status if status.get("reason") == "Evicted" else condition)
    return sentence(name, status) if status.get("reason") in _TAKEN else ""


@dataclass(frozen=True, kw_only=True)
class Death:
    """How a container ended, if badly."""

    pod: str
    """The pod's short name."""

    exit_code: int
    """Its exit status."""

    reason: str
    """The kubelet's reason; torchrun's exit status does not show OOMKilled."""

    finished: str
    """The time, in the kubelet's format: whole seconds."""

    words: LastWords
    """Its last output."""

    def __str__(self) -> str:
        """Return it as people should read it."""
        if self.reason == "OOMKilled":
            return f"{self.pod}: OOMKilled: the pod needs more memory"
        if self.reason and self.reason not in ("Error", "Completed"):
            return f"{self.pod}: {self.reason}" + (f": {self.words}" if str(self.words) else "")
        words = f": {self.words}" if str(self.words) else ""
        return f"{self.pod}: exit status {self.exit_code}{words}"


def newest_of(pods: Iterable[Object]) -> list[Object]:
    """Return the newest of each pod that was recreated, under the same or another name."""
    newest: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda p: str(p["metadata"].get("creationTimestamp") or "")):
        newest[short_name(pod)] = pod
    return list(newest.values())


def first_death(pods: Iterable[Object]) -> Death | None:
    """Return the pod that failed first in the last start, if it can be found out."""
    deaths = [death for pod in newest_of(pods) if (death := _death(pod)) is not None]
    dated = bool(deaths) and all(death.words.time is not None for death in deaths)
    return min(
        deaths,
        key=lambda one: (
            one.reason != "OOMKilled",
            one.words.time if dated else 0.0,
            one.finished,
        ),
        default=None,
    )


def _death(pod: Object) -> Death | None:
    for where in ("state", "lastState"):
        for ended in _states(pod, "terminated", where=where):
            reason = str(ended.get("reason") or "")
            if ended.get("exitCode") or reason == "OOMKilled":
                return Death(
                    pod=short_name(pod),
                    exit_code=int(ended.get("exitCode") or 0),
                    reason=reason,
                    finished=str(ended.get("finishedAt") or "~"),
                    words=last_words(str(ended.get("message") or "")),
                )
    return None


def _states(pod: Object, which: str, *, where: str = "state") -> Iterator[Object]:
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        if (state := (container.get(where) or {}).get(which)) is not None:
            yield state
