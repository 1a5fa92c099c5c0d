"""The Job controller, for Indexed Jobs (batch/v1)."""

import copy
import datetime
import time
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.kubernetes.kubelet import (
    POD,
    Kubelet,
    condition_of,
    container_status,
    exit_code,
    set_condition,
)
from tests.fakes.kubernetes.resources import of_kind
from tests.fakes.kubernetes.store import controller_of, stamp
from tests.fakes.kubernetes.wire import Object

__all__ = ["INDEX", "JOB", "age_s", "count", "expire", "fail", "reconcile"]

JOB = of_kind("Job")
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class Tally:
    """A Job's record of its deleted pods."""

    counted: set[str] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)
    final: str | None = None
    """Why a rule of its podFailurePolicy fails it."""

    failed_indexes: set[int] = field(default_factory=set)


def _tally(cluster: Kubelet, job: Object) -> Tally:
    found: Tally = cluster.memory.setdefault(job["metadata"]["uid"], Tally())
    return found


def age_s(thing: Object, since: str) -> float:
    """Return how many seconds ago something was."""
    then = datetime.datetime.fromisoformat(since)
    return (datetime.datetime.now(datetime.UTC) - then).total_seconds()


def count(cluster: Kubelet, pod: Object) -> None:
    """Count how a pod has ended, once."""
    owner = controller_of(pod)
    job = cluster.find(JOB, pod["metadata"]["namespace"], owner["name"]) if owner else None
    if owner is None or owner["kind"] != "Job" or job is None:
        return
    tally, uid, phase = _tally(cluster, job), pod["metadata"]["uid"], pod["status"]["phase"]
    if job["metadata"]["uid"] != owner["uid"] or uid in tally.counted:
        return
    index = int(pod["metadata"]["annotations"][INDEX])
    if _replaced_early(job) and "deletionTimestamp" in pod["metadata"] and phase != "Succeeded":
        phase = "Failed"
    if phase == "Succeeded":
        tally.done.add(index)
    elif phase == "Failed":
        action = _action(job, pod)
        if action == "FailJob":
            tally.final = tally.final or _why(pod)
        elif action == "FailIndex":
            tally.failed_indexes.add(index)
        if action != "Ignore":
            tally.failures[index] = tally.failures.get(index, 0) + 1
    else:
        return
    tally.counted.add(uid)


def _replaced_early(job: Object) -> bool:
    """Whether pods that are being deleted are replaced before they have ended."""
    default = "Failed" if job["spec"].get("podFailurePolicy") else "TerminatingOrFailed"
    return bool(job["spec"].get("podReplacementPolicy", default) == "TerminatingOrFailed")


def _why(pod: Object) -> str:
    space, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    container = container_status(pod)["name"]
    return (
        f"Container {container} for pod {space}/{name} failed with exit code {exit_code(pod)} "
        "matching FailJob rule at index 0"
    )


def _action(job: Object, pod: Object) -> str:
    """Return the action of the first rule that matches (Kubernetes, pod failure policy)."""
    for rule in (job["spec"].get("podFailurePolicy") or {}).get("rules") or ():
        codes, wanted = rule.get("onExitCodes"), rule.get("onPodConditions")
        code = exit_code(pod)
        if codes and code:
            inside = code in codes["values"]
            name = codes.get("containerName") or container_status(pod)["name"]
            same = name == container_status(pod)["name"]
            if same and inside == (codes["operator"] == "In"):
                return str(rule["action"])
        for one in wanted or ():
            found = condition_of(pod, one["type"])
            if found is not None and one.get("status", "True") == "True":
                return str(rule["action"])
    return "Count"


def reconcile(cluster: Kubelet, job: Object) -> None:
    """Act on the state of a Job and its pods."""
    metadata, spec = job["metadata"], job["spec"]
    if "deletionTimestamp" in metadata:
        return
    pods = [cluster.get(*key) for key in cluster.controlled(metadata["uid"]) if key.resource is POD]
    if (ended := condition_of(job, "Complete") or condition_of(job, "Failed")) is not None:
        expire(cluster, JOB, job, ended, spec.get("ttlSecondsAfterFinished"))
        return
    if spec.get("suspend"):
        for pod in pods:
            cluster.end_pod(pod, None)
        if cluster.auto_run:
            job.setdefault("status", {}).pop("startTime", None)
            set_condition(job, "Suspended", reason="JobSuspended", message="Job suspended")
            cluster.put(JOB, job)
        return
    tally = _tally(cluster, job)
    if cluster.auto_run:
        for pod in pods:
            count(cluster, pod)
        status = job.setdefault("status", {})
        if "startTime" not in status:
            status["startTime"] = stamp()
            if (limit := spec.get("activeDeadlineSeconds")) is not None:
                cluster.later(limit + 0.05, cluster.key(JOB, job))
        if condition_of(job, "Suspended"):
            set_condition(job, "Suspended", reason="JobResumed", status="False")
        if _decide(cluster, job, tally, pods):
            return
    _make_pods(cluster, job, tally, pods)
    if cluster.auto_run:
        _count_pods(cluster, job, tally)


def _decide(cluster: Kubelet, job: Object, tally: Tally, pods: list[Object]) -> bool:
    """Set a Job's final condition if it has ended; return whether it has."""
    spec, status = job["spec"], job["status"]
    per_index, most = spec.get("backoffLimitPerIndex"), spec.get("maxFailedIndexes")
    limit = spec.get("backoffLimit", 6 if per_index is None else 2**31)
    if per_index is not None:
        tally.failed_indexes |= {i for i, n in tally.failures.items() if n > per_index}
    target = condition_of(job, "FailureTarget")
    reason, words = (target["reason"], target["message"]) if target else ("", "")
    deadline = spec.get("activeDeadlineSeconds")
    if reason:
        pass
    elif tally.final is not None:
        reason, words = "PodFailurePolicy", tally.final
    elif deadline is not None and age_s(job, status["startTime"]) >= deadline:
        reason, words = "DeadlineExceeded", "Job was active longer than specified deadline"
    elif sum(tally.failures.values()) > limit:
        reason, words = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    elif most is not None and len(tally.failed_indexes) > most:
        reason = "MaxFailedIndexesExceeded"
        words = "Job has exceeded the specified maximal number of failed indexes"
    elif len(tally.done | tally.failed_indexes) >= spec.get("completions", 1):
        if tally.failed_indexes:
            reason, words = "FailedIndexes", "Job has failed indexes"
        else:
            set_condition(job, "SuccessCriteriaMet", reason="CompletionsReached")
            set_condition(
                job,
                "Complete",
                reason="CompletionsReached",
                message="Reached expected number of succeeded pods",
            )
            status["completionTime"] = stamp()
            _count_pods(cluster, job, tally)
            return True
    if not reason:
        return False
    fail(cluster, job, reason, words)
    _count_pods(cluster, job, tally)
    return True


def fail(cluster: Kubelet, job: Object, reason: str, message: str) -> None:
    """Fail a Job: its pods end first, then its condition becomes true."""
    set_condition(job, "FailureTarget", reason=reason, message=message)
    cluster.put(JOB, job)
    left = False
    for key in cluster.controlled(job["metadata"]["uid"]):
        pod = cluster.find(*key) if key.resource is POD else None
        if pod is not None and pod["status"]["phase"] not in ("Succeeded", "Failed"):
            cluster.end_pod(pod, None)
            left = left or cluster.find(*key) is not None
    if not left:
        set_condition(job, "Failed", reason=reason, message=message)
        cluster.put(JOB, job)


def expire(
    cluster: Kubelet, resource: Any, thing: Object, ended: Object, ttl_s: int | None
) -> None:
    """Delete the Jobs whose time to live after their end is over."""
    if ttl_s is None or not cluster.auto_run:
        return
    if (left := ttl_s - age_s(thing, ended["lastTransitionTime"])) <= 0:
        cluster.remove(resource, thing)
    else:
        cluster.later(left + 0.05, cluster.key(resource, thing))


def _count_pods(cluster: Kubelet, job: Object, tally: Tally) -> None:
    pods = [
        cluster.get(*k) for k in cluster.controlled(job["metadata"]["uid"]) if k.resource is POD
    ]
    going = [p for p in pods if p["status"]["phase"] in ("Pending", "Running")]
    status = job["status"]
    status["active"] = sum("deletionTimestamp" not in p["metadata"] for p in going)
    status["terminating"] = len(going) - status["active"]
    status["ready"] = sum(p["status"]["phase"] == "Running" for p in going)
    status["succeeded"] = len(tally.done)
    status["failed"] = sum(tally.failures.values())
    status["completedIndexes"] = ",".join(str(i) for i in sorted(tally.done))
    if job["spec"].get("backoffLimitPerIndex") is not None:
        status["failedIndexes"] = ",".join(str(i) for i in sorted(tally.failed_indexes))
    cluster.put(JOB, job)


def _make_pods(cluster: Kubelet, job: Object, tally: Tally, pods: list[Object]) -> None:
    spec = job["spec"]
    over = ("Succeeded", "Failed") if cluster.auto_run else ()
    replace_early = _replaced_early(job)
    there = {
        int(pod["metadata"]["annotations"][INDEX])
        for pod in pods
        if pod["status"]["phase"] not in over
        and not (replace_early and "deletionTimestamp" in pod["metadata"])
        and cluster.find(*cluster.key(POD, pod)) is pod
    }
    wanted = set(range(spec.get("completions") or 1)) - tally.done - tally.failed_indexes
    for index in sorted(wanted - there)[: max(0, spec.get("parallelism", 1) - len(there))]:
        failures = tally.failures.get(index, 0)
        wait_s = cluster.back_off_s * 2 ** (failures - 1) if failures else 0
        # A pod that failed is replaced after a while; the Job is looked at again then.
        due = cluster.memory.setdefault(("due", job["metadata"]["uid"], index), {})
        if wait_s and due.get("failures") != tally.failures[index]:
            due |= {"failures": tally.failures[index], "at": time.monotonic() + wait_s}
            cluster.later(wait_s, cluster.key(JOB, job))
        if wait_s and time.monotonic() < due["at"]:
            continue
        if cluster.new_pod(_pod(cluster, job, index), job) is None:
            return


def _pod(cluster: Kubelet, job: Object, index: int) -> Object:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    template = copy.deepcopy(job["spec"]["template"])
    metadata = template.get("metadata") or {}
    labels = dict(metadata.get("labels") or {})
    for key, value in (("job-name", name), ("controller-uid", uid)):
        labels |= {key: value, f"batch.kubernetes.io/{key}": value}
    labels[INDEX] = str(index)
    field = f"metadata.annotations['{INDEX}']"
    spec = template["spec"]
    spec.setdefault("hostname", f"{name}-{index}")
    for container in spec["containers"]:
        mine = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": field}}}
        container["env"] = [*(container.get("env") or ()), mine]
    return {
        "metadata": {
            "name": f"{name}-{index}-{cluster.next_id():05x}"[-63:],
            "labels": labels,
            "annotations": (metadata.get("annotations") or {}) | {INDEX: str(index)},
        },
        "spec": spec,
    }
