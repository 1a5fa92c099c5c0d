"""Where a PyTorchJob stands and why, read from what the cluster says of it and its pods. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.launchers.base import RunState, RunStatus

__all__ = ["judge", "short_name", "stuck_object"]

Object = Mapping[str, Any]

_CONDITIONS = {
    "Failed": RunState.FAILED,
    "Succeeded": RunState.SUCCEEDED,
    "Suspended": RunState.PENDING,
    "Restarting": RunState.RUNNING,
    "Running": RunState.RUNNING,
    "Created": RunState.PENDING,
}
"""The operator's conditions (kubeflow.org/v1 JobConditionType); the first that is true counts."""

_OUT_OF_TIME = "active longer than specified deadline"
"""What the operator says of a job that ran into `activeDeadlineSeconds`; its reason does not."""

_ON_THE_WAY = ("ContainerCreating", "PodInitializing")
"""Reasons for waiting that are no trouble."""


def judge(job: Object, pods: Sequence[Object] = (), warnings: Sequence[Object] = ()) -> RunStatus:
    """Return the state of a PyTorchJob, with the reason that lies closest to the cause.

    Args:
        job: The PyTorchJob.
        pods: Its pods.
        warnings: Warning events about the object that `stuck_object` names, oldest first.
    """
    state, said = _condition(job)
    if state is RunState.SUCCEEDED:
        return RunStatus(state=state)
    if state is RunState.FAILED:
        taken = [text for pod in pods if (text := _disruption(pod))]
        if taken or _OUT_OF_TIME in said:
            state = RunState.PREEMPTED
        causes = taken or [text for pod in pods if (text := _death(pod))]
        return RunStatus(state=state, reason="; ".join(filter(None, [said, *causes[:1]])))
    if job["metadata"].get("deletionTimestamp"):
        return RunStatus(state=RunState.RUNNING, reason="being stopped")
    if state is RunState.UNKNOWN:
        return RunStatus(state=state, reason=said)
    trouble = next(iter([text for pod in pods if (text := _trouble(pod))]), "")
    if not trouble and warnings:
        latest = warnings[-1]
        trouble = f"{latest.get('reason', '')}: {latest.get('message', '')}"
        if pods:
            trouble = f"{short_name(latest['involvedObject'])}: {trouble}"
    return RunStatus(state=state, reason=trouble or said)


def stuck_object(job: Object, pods: Sequence[Object]) -> str | None:
    """Return the name of the object whose events tell why nothing starts, if nothing does."""
    if _condition(job)[0] is not RunState.PENDING or _is_true(job, "Suspended"):
        return None
    if not pods:
        return str(job["metadata"]["name"])
    for pod in pods:
        if any(w.get("reason") in _ON_THE_WAY for w in _container_states(pod, "waiting")):
            return str(pod["metadata"]["name"])
    return None


def short_name(metadata: Object) -> str:
    """Return `worker-3` of the pod `RUN-worker-3`."""
    return "-".join(str(metadata["name"]).rsplit("-", 2)[-2:])


def _condition(job: Object) -> tuple[RunState, str]:
    true = [c for c in _conditions(job) if c.get("status") == "True"]
    by_type = {condition["type"]: condition for condition in true}
    for kind, state in _CONDITIONS.items():
        if (found := by_type.get(kind)) is not None:
            quiet = kind in ("Created", "Running", "Succeeded")
            return state, "" if quiet else found.get("message") or found.get("reason") or kind
    if by_type:
        return RunState.UNKNOWN, f"the operator says {', '.join(sorted(by_type))}"
    return RunState.PENDING, ""  # the operator has not seen it yet, or cannot make its pods


def _is_true(thing: Object, kind: str) -> bool:
    return any(c["type"] == kind and c.get("status") == "True" for c in _conditions(thing))


def _conditions(thing: Object) -> Sequence[Object]:
    return (thing.get("status") or {}).get("conditions") or ()


def _container_states(pod: Object, which: str, *, where: str = "state") -> Iterator[Object]:
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        if (state := (container.get(where) or {}).get(which)) is not None:
            yield state


def _trouble(pod: Object) -> str:
    """Return what keeps a pod from running, or made it start again."""
    name = short_name(pod["metadata"])
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition.get("status") == "False":
            return _sentence(name, condition)
    for waiting in _container_states(pod, "waiting"):
        if waiting.get("reason") not in (*_ON_THE_WAY, None):
            before = next(_container_states(pod, "terminated", where="lastState"), {})
            killed = "OOMKilled" if before.get("reason") == "OOMKilled" else ""
            return _sentence(name, waiting, killed)
    if any(
        ended.get("reason") == "OOMKilled"
        for ended in _container_states(pod, "terminated", where="lastState")
    ):
        return f"{name}: OOMKilled, started again"
    return ""


def _death(pod: Object) -> str:
    """Return how a pod's container ended, if badly."""
    name = short_name(pod["metadata"])
    for where in ("state", "lastState"):
        for ended in _container_states(pod, "terminated", where=where):
            if ended.get("reason") == "OOMKilled":  # torchrun's exit code does not tell
                return f"{name}: OOMKilled: the pod needs more memory"
            if ended.get("exitCode"):
                last = str(ended.get("message") or "").strip().rpartition("\n")[2]
                return f"{name}: exit status {ended['exitCode']}" + (last and f": {last}")
    return ""


def _disruption(pod: Object) -> str:
    """Return why the cluster took a pod away (Kubernetes, pod condition DisruptionTarget)."""
    name = short_name(pod["metadata"])
    for condition in _conditions(pod):
        if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
            return _sentence(name, condition)
    status = pod.get("status") or {}
    return _sentence(name, status) if status.get("reason") in ("Evicted", "Preempting") else ""


def _sentence(name: str, said: Object, *more: str) -> str:
    return ": ".join(filter(None, [name, *more, said.get("reason"), said.get("message")]))
