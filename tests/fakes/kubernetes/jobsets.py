"""The JobSet controller (jobset.x-k8s.io/v1alpha2): Jobs that start, and start again, together."""

import copy
from typing import Any

from tests.fakes.kubernetes.indexed import JOB, expire
from tests.fakes.kubernetes.kubelet import Kubelet, condition_of, reference, set_condition
from tests.fakes.kubernetes.resources import of_kind
from tests.fakes.kubernetes.wire import Object

__all__ = ["ATTEMPT", "JOBSET", "NAME_LABEL", "reconcile", "restart"]

JOBSET = of_kind("JobSet")
SERVICE = of_kind("Service")
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"


def reconcile(cluster: Kubelet, jobset: Object) -> None:
    """Act on what a JobSet and its Jobs have become."""
    metadata, spec = jobset["metadata"], jobset["spec"]
    if "deletionTimestamp" in metadata:
        return
    if (ended := condition_of(jobset, "Completed") or condition_of(jobset, "Failed")) is not None:
        for job in _jobs(cluster, jobset):
            if not (condition_of(job, "Complete") or condition_of(job, "Failed")):
                cluster.remove(JOB, job, propagation="Foreground")
        expire(cluster, JOBSET, jobset, ended, spec.get("ttlSecondsAfterFinished"))
        return
    attempt = (jobset.get("status") or {}).get("restarts", 0)
    jobs = _jobs(cluster, jobset)
    for job in jobs:
        if _attempt(job) < attempt and "deletionTimestamp" not in job["metadata"]:
            cluster.remove(JOB, job, propagation="Foreground")
    jobs = _jobs(cluster, jobset)
    _service(cluster, jobset)
    mine = [job for job in jobs if _attempt(job) == attempt]
    for job in mine:
        if job["spec"].get("suspend", False) != spec.get("suspend", False):
            job["spec"]["suspend"] = spec.get("suspend", False)
            cluster.put(JOB, job)
    if cluster.auto_run:
        _suspended(cluster, jobset)
        failed = [job for job in mine if condition_of(job, "Failed")]
        if failed:
            _failed(cluster, jobset, failed[0])
            return
    names = {job["metadata"]["name"] for job in jobs}
    for replicated in spec.get("replicatedJobs") or ():
        for index in range(replicated.get("replicas", 1)):
            made = _job(jobset, replicated, index, attempt)
            if made["metadata"]["name"] not in names:
                cluster.put(JOB, made)
    jobs = [job for job in _jobs(cluster, jobset) if _attempt(job) == attempt]
    if cluster.auto_run:
        _count(cluster, jobset, jobs)
        if jobs and all(condition_of(job, "Complete") for job in jobs):
            words = "jobset completed successfully"
            set_condition(jobset, "Completed", reason="AllJobsCompleted", message=words)
            jobset["status"]["terminalState"] = "Completed"
            cluster.put(JOBSET, jobset)


def restart(cluster: Kubelet, jobset: Object, message: str = "restarting jobset") -> None:
    """Let all pods start again, together."""
    status = jobset.setdefault("status", {})
    status["restarts"] = status.get("restarts", 0) + 1
    status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + 1
    set_condition(jobset, "RestartingJobSet", reason="RestartingJobSet", message=message)
    cluster.put(JOBSET, jobset)
    name, space = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    cluster.warn(name, "RestartingJobSet", message, namespace=space, kind="JobSet")


def _failed(cluster: Kubelet, jobset: Object, job: Object) -> None:
    policy, found = jobset["spec"].get("failurePolicy"), condition_of(job, "Failed")
    assert found is not None
    name = job["metadata"]["name"]
    words = f"jobset failed due to one or more job failures (first failed job: {name})"
    reason = "FailedJobs"
    if policy is not None:
        action = _action(policy, job, found["reason"])
        if action == "FailJobSet":
            reason = "FailJobSetFailurePolicyAction"
            words = f"applying FailJobSet failure policy action (first failed job: {name})"
        elif jobset.get("status", {}).get("restarts", 0) < policy.get("maxRestarts", 0):
            restart(cluster, jobset, f"restarting jobset, first failed job: {name}")
            return
        else:
            reason = "ReachedMaxRestarts"
            words = (
                f"jobset failed due to reaching max number of restarts (first failed job: {name})"
            )
    set_condition(jobset, "Failed", reason=reason, message=words)
    jobset["status"]["terminalState"] = "Failed"
    cluster.put(JOBSET, jobset)


def _action(policy: Object, job: Object, reason: str) -> str:
    for rule in policy.get("rules") or ():
        targets = rule.get("targetReplicatedJobs")
        name = job["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]
        reasons = rule.get("onJobFailureReasons")
        if (not targets or name in targets) and (not reasons or reason in reasons):
            return str(rule["action"])
    return "RestartJobSet"


def _jobs(cluster: Kubelet, jobset: Object) -> list[Object]:
    keys = cluster.owned(jobset["metadata"]["uid"])
    return [cluster.get(*key) for key in keys if key.resource is JOB]


def _attempt(job: Object) -> int:
    return int(job["metadata"]["labels"][ATTEMPT])


def _suspended(cluster: Kubelet, jobset: Object) -> None:
    if jobset["spec"].get("suspend"):
        words = "jobset is suspended"
        set_condition(jobset, "Suspended", reason="SuspendedJobs", message=words)
    elif condition_of(jobset, "Suspended"):
        words = "jobset is resumed"
        set_condition(jobset, "Suspended", reason="ResumeJobs", message=words, status="False")
    if jobset.get("status"):
        cluster.put(JOBSET, jobset)


def _count(cluster: Kubelet, jobset: Object, jobs: list[Object]) -> None:
    found: list[dict[str, Any]] = []
    for replicated in jobset["spec"].get("replicatedJobs") or ():
        label = "jobset.sigs.k8s.io/replicatedjob-name"
        mine = [j for j in jobs if j["metadata"]["labels"][label] == replicated["name"]]
        states = [j.get("status") or {} for j in mine]
        wanted = [j["spec"].get("parallelism", 1) for j in mine]
        found.append(
            {
                "name": replicated["name"],
                "active": sum(bool(s.get("active")) for s in states),
                "ready": sum(
                    s.get("ready", 0) + s.get("succeeded", 0) >= w
                    for s, w in zip(states, wanted, strict=True)
                ),
                "succeeded": sum(condition_of(j, "Complete") is not None for j in mine),
                "failed": sum(condition_of(j, "Failed") is not None for j in mine),
                "suspended": sum(bool(j["spec"].get("suspend")) for j in mine),
            }
        )
    jobset.setdefault("status", {})["replicatedJobsStatus"] = found
    jobset["status"].setdefault("restarts", 0)
    if condition_of(jobset, "RestartingJobSet") and any(one["active"] for one in found):
        words = "jobset restarted"
        set_condition(
            jobset, "RestartingJobSet", reason="RestartedJobSet", message=words, status="False"
        )
    cluster.put(JOBSET, jobset)


def _service(cluster: Kubelet, jobset: Object) -> None:
    network, metadata = jobset["spec"].get("network") or {}, jobset["metadata"]
    name = network.get("subdomain") or metadata["name"]
    if not network.get("enableDNSHostnames", True):
        return
    if cluster.find(SERVICE, metadata["namespace"], name) is None:
        cluster.put(
            SERVICE,
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {
                    "name": name,
                    "namespace": metadata["namespace"],
                    "ownerReferences": [reference(jobset)],
                },
                "spec": {
                    "clusterIP": "None",
                    "selector": {NAME_LABEL: metadata["name"]},
                    "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
                },
            },
        )


def _job(jobset: Object, replicated: Object, index: int, attempt: int) -> Object:
    metadata = jobset["metadata"]
    name = f"{metadata['name']}-{replicated['name']}-{index}"
    made = copy.deepcopy(replicated["template"])
    marks = {
        NAME_LABEL: metadata["name"],
        "jobset.sigs.k8s.io/jobset-uid": metadata["uid"],
        "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
        "jobset.sigs.k8s.io/replicatedjob-replicas": str(replicated.get("replicas", 1)),
        "jobset.sigs.k8s.io/job-index": str(index),
        "jobset.sigs.k8s.io/job-global-index": str(index),
        ATTEMPT: str(attempt),
    }
    own = made.get("metadata") or {}
    spec = made["spec"]
    pod = spec["template"].setdefault("metadata", {})
    for place in (own, pod):
        for key in ("labels", "annotations"):
            place[key] = (place.get(key) or {}) | marks
    network = jobset["spec"].get("network") or {}
    if network.get("enableDNSHostnames", True):
        spec["template"]["spec"]["subdomain"] = network.get("subdomain") or metadata["name"]
    spec.setdefault("completionMode", "Indexed")
    spec["suspend"] = jobset["spec"].get("suspend", False)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": own
        | {
            "name": name,
            "namespace": metadata["namespace"],
            "ownerReferences": [reference(jobset)],
        },
        "spec": spec,
    }
