"""The status of a run and its reason, from the object's conditions and its pods. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.kubernetes.kueue import QUEUE_LABEL, queue_reason, workload_for
from toolkit.kubernetes.pods import (
    FATAL,
    attempt_of,
    conditions_of,
    disruption,
    first_death,
    is_running,
    is_starting,
    sentence,
    short_name,
    trouble,
)
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.runs.state import RunState, RunStatus

__all__ = ["Evidence", "digest", "is_suspended", "judge", "queue_of", "state_of", "stuck_objects"]

_OUT_OF_TIME = ("DeadlineExceeded", "active longer than specified deadline")
"""The reason of a run that has met its deadline; the Training Operator's reason does not."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Objects beside the workload itself."""

    pods: Sequence[Object] = ()
    """Its pods."""

    warnings: Sequence[Object] = ()
    """Warning events about the objects that `stuck_objects` names, oldest first."""

    jobs: Sequence[Object] = ()
    """The Jobs between it and its pods."""

    queued: Sequence[Object] = ()
    """Kueue's Workloads; its own is among them where it has one."""


def judge(kind: Kind, obj: Object, evidence: Evidence | None = None) -> RunStatus:
    """Return the state of an object, with the reason that lies closest to the cause."""
    evidence_now = evidence or Evidence()
    state, reason = state_of(kind, obj)
    if state is RunState.SUCCEEDED:
        return RunStatus(state=state)
    if state is RunState.FAILED:
        return _failed(obj, reason, evidence_now)
    if obj["metadata"].get("deletionTimestamp"):
        return RunStatus(state=RunState.RUNNING, reason="being stopped")
    if state is RunState.UNKNOWN:
        return RunStatus(state=state, reason=reason)
    if is_suspended(obj):
        if queue := queue_of(obj):
            workload = workload_for(obj, evidence_now.queued)
            reason = queue_reason(queue, workload)
        return RunStatus(state=state, reason=reason)
    if any(is_running(pod) or attempt_of(pod) for pod in evidence_now.pods):
        state = RunState.RUNNING
    return RunStatus(
        state=state, reason=_trouble(evidence_now) or reason or _again(obj, evidence_now)
    )


def state_of(kind: Kind, obj: Object) -> tuple[RunState, str]:
    """Return state and reason from the object alone."""
    by_type = {c["type"]: c for c in conditions_of(obj) if c.get("status") == "True"}
    for name, state in kind.conditions.items():
        if (condition := by_type.get(name)) is not None and state is not None:
            quiet = name in ("Created", "Running") or state is RunState.SUCCEEDED
            return state, "" if quiet else condition.get("message") or condition.get(
                "reason"
            ) or name
    if strange := sorted(set(by_type) - set(kind.conditions)):
        return RunState.UNKNOWN, f"the {kind.kind} says {', '.join(strange)}"
    status = obj.get("status") or {}
    counts = status.get(kind.counts) or () if kind.counts else (status,)
    begun = any(one.get("ready") or one.get("succeeded") for one in counts)
    again = status.get("restarts") or 0
    if again:
        return RunState.RUNNING, "" if begun else f"starts again (restart {again})"
    if begun or (not kind.counts and status.get("failed")):
        return RunState.RUNNING, ""
    return RunState.PENDING, ""  # no controller has seen it yet, or can make its pods


def stuck_objects(kind: Kind, obj: Object, pods: Sequence[Object]) -> list[str]:
    """Return the names of the objects whose events explain why nothing starts."""
    if state_of(kind, obj)[0] is not RunState.PENDING or is_suspended(obj):
        return []
    if not pods:
        name = str(obj["metadata"]["name"])
        # The Job that cannot make its pods; the JobSet of a TrainJob is called like it.
        return [name, f"{name}-node-0"] if kind.jobs else [name]
    return [str(pod["metadata"]["name"]) for pod in pods if is_starting(pod)][:1]


def digest(kind: Kind, obj: Object) -> dict[str, Object]:
    """Return the parts of an object that determine its state: a small part of it."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    kept = ("name", "uid", "deletionTimestamp", "ownerReferences")
    labels = metadata.get("labels") or {}
    return {
        "metadata": {key: metadata[key] for key in kept if key in metadata}
        | {"labels": {QUEUE_LABEL: labels[QUEUE_LABEL]} if QUEUE_LABEL in labels else {}},
        "spec": {"suspend": bool((obj.get("spec") or {}).get("suspend"))},
        "status": {
            key: status[key]
            for key in ("conditions", "restarts", "ready", "succeeded", "failed", kind.counts)
            if key in status
        },
    }


def queue_of(obj: Object) -> str:
    """Return the LocalQueue that an object waits in; empty without one."""
    return str((obj["metadata"].get("labels") or {}).get(QUEUE_LABEL) or "")


def is_suspended(obj: Object) -> bool:
    """Whether an object is suspended."""
    return any(
        c["type"] == "Suspended" and c.get("status") == "True" for c in conditions_of(obj)
    ) or bool((obj.get("spec") or {}).get("suspend"))


def _failed(obj: Object, message: str, evidence: Evidence) -> RunStatus:
    """Return how a run failed: by itself, or because the cluster took it or its time was over."""
    words = [message, *_ends_of([obj, *evidence.jobs])]
    death = first_death(pod for pod in evidence.pods if not disruption(pod))
    fatal = death is not None and death.exit_code == FATAL
    if late := next((w for w in words if any(text in w for text in _OUT_OF_TIME)), ""):
        cause = "" if late == message else late
        reason = "; ".join(filter(None, [message, cause]))
        return RunStatus(state=RunState.PREEMPTED, reason=reason)
    taken = next((text for pod in evidence.pods if (text := disruption(pod))), "")
    if taken and not fatal:
        return RunStatus(state=RunState.PREEMPTED, reason="; ".join(filter(None, [message, taken])))
    causes = [message.removesuffix(".") if death else message, str(death or "")]
    return RunStatus(state=RunState.FAILED, reason="; ".join(filter(None, causes)))


def _ends_of(things: Sequence[Object]) -> list[str]:
    """Return the messages of the ends of an object and its Jobs."""
    return [
        sentence("", condition)
        for thing in things
        for condition in conditions_of(thing)
        if condition["type"] == "Failed" and condition.get("status") == "True"
    ]


def _again(obj: Object, evidence: Evidence) -> str:
    """Return how often a run has started again; the reader must know that it may not continue."""
    status = obj.get("status") or {}
    restarts = max([status.get("restarts") or 0, *(attempt_of(pod) or 0 for pod in evidence.pods)])
    if restarts:
        return f"restart {restarts}"
    if failed := status.get("failed"):  # of a Job
        return f"{failed} {'pod has' if failed == 1 else 'pods have'} failed and been replaced"
    return ""


def _trouble(evidence: Evidence) -> str:
    """Return what keeps a run from running, or made it start again."""
    if words := next((text for pod in evidence.pods if (text := trouble(pod))), ""):
        return words
    if not evidence.warnings:
        return ""
    latest = evidence.warnings[-1]
    about = latest.get("involvedObject") or {}
    pod = next((p for p in evidence.pods if p["metadata"]["name"] == about.get("name")), None)
    return sentence(short_name(pod) if pod else "", latest)
