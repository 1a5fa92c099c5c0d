"""The Training Operator v1 (kubeflow.org/v1): a PyTorchJob and its pods."""

import copy
import time
from typing import Any

from tests.fakes.kubernetes.indexed import age_s, expire
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

__all__ = ["JOB_LABEL", "PYTORCHJOB", "count", "reconcile", "say"]

PYTORCHJOB = of_kind("PyTorchJob")
JOB_LABEL = "training.kubeflow.org/job-name"
ROLE, INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
PORT = "23456"
RETRYABLE = 128
"""From which exit status on `restartPolicy: ExitCode` starts a pod again."""


def say(job: Object, kind: str, *, reason: str = "", message: str = "") -> None:
    """Make a condition of a job true, and false what contradicts it."""
    conditions = job.setdefault("status", {}).setdefault("conditions", [])
    for other in conditions:
        if other["type"] != "Created":
            other["status"] = "False"
    set_condition(job, kind, reason=reason or f"PyTorchJob{kind}", message=message)


def count(cluster: Kubelet, pod: Object) -> None:
    """Remember that a pod was taken away from a job that does not start such pods again."""
    owner = controller_of(pod)
    if owner is not None and owner["kind"] == "PyTorchJob":
        cluster.memory.setdefault(owner["uid"], set()).add(pod["metadata"]["name"])


def reconcile(cluster: Kubelet, job: Object) -> None:
    """Act on what a PyTorchJob and its pods have become."""
    metadata, run_policy = job["metadata"], job["spec"].get("runPolicy") or {}
    if "deletionTimestamp" in metadata:
        return
    pods = [cluster.get(*k) for k in cluster.controlled(metadata["uid"]) if k.resource is POD]
    ended = condition_of(job, "Succeeded") or condition_of(job, "Failed")
    if ended is not None:
        _clean_up(cluster, job, pods)
        expire(cluster, PYTORCHJOB, job, ended, run_policy.get("ttlSecondsAfterFinished"))
        return
    if run_policy.get("suspend"):
        for pod in pods:
            cluster.end_pod(pod, None)
        say(job, "Suspended", message=f"PyTorchJob {metadata['name']} is suspended.")
        cluster.put(PYTORCHJOB, job)
        return
    if cluster.auto_run and _decide(cluster, job, pods):
        return
    there = {pod["metadata"]["name"] for pod in pods if cluster.find(*cluster.key(POD, pod))}
    for role, replicas in job["spec"]["pytorchReplicaSpecs"].items():
        for index in range(replicas.get("replicas", 1)):
            if f"{metadata['name']}-{role.lower()}-{index}" not in there:
                made = cluster.new_pod(_pod(job, role, index), job)
                if made is None:
                    return
                if not condition_of(job, "Created"):
                    words = f"PyTorchJob {metadata['name']} is created."
                    say(job, "Created", message=words)
                    cluster.put(PYTORCHJOB, job)
    if cluster.auto_run:
        _running(cluster, job, pods)


def _running(cluster: Kubelet, job: Object, pods: list[Object]) -> None:
    status = job.setdefault("status", {})
    limit = (job["spec"].get("runPolicy") or {}).get("activeDeadlineSeconds")
    if "startTime" not in status and pods:
        status["startTime"] = stamp()
        if limit is not None:
            cluster.later(limit + 0.05, cluster.key(PYTORCHJOB, job))
    if any(p["status"]["phase"] == "Running" for p in pods) and not condition_of(job, "Running"):
        say(job, "Running", message=f"PyTorchJob {job['metadata']['name']} is running.")
    status["replicaStatuses"] = {
        role: {
            "active": sum(_is(p, role) and p["status"]["phase"] == "Running" for p in pods),
            "succeeded": sum(_is(p, role) and p["status"]["phase"] == "Succeeded" for p in pods),
            "failed": sum(_is(p, role) and p["status"]["phase"] == "Failed" for p in pods),
        }
        for role in job["spec"]["pytorchReplicaSpecs"]
    }
    cluster.put(PYTORCHJOB, job)


def _is(pod: Object, role: str) -> bool:
    return bool(pod["metadata"]["labels"][ROLE] == role.lower())


def _decide(cluster: Kubelet, job: Object, pods: list[Object]) -> bool:
    """End a job that has ended, and take away pods that shall be made anew."""
    name, policies = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    run_policy = job["spec"].get("runPolicy") or {}
    leads = "Master" if "Master" in policies else "Worker"
    # The first elastic Worker that succeeds, or else all Workers (UpdateJobStatus, v1.9).
    needed = 1 if job["spec"].get("elasticPolicy") else policies[leads].get("replicas", 1)
    leading = 0
    gone = cluster.memory.get(job["metadata"]["uid"], set())
    restarts, failed, started = 0, "", (job.get("status") or {}).get("startTime")
    for pod in pods:
        role = pod["metadata"]["labels"][ROLE].capitalize()
        policy, phase = policies[role].get("restartPolicy", "Never"), pod["status"]["phase"]
        restarts += container_status(pod)["restartCount"]
        leading += role == leads and phase == "Succeeded"
        if leading == needed:
            words = f"PyTorchJob {name} successfully completed."
            say(job, "Succeeded", message=words)
            break
        if phase == "Failed" and "deletionTimestamp" not in pod["metadata"]:
            if policy == "ExitCode" and (exit_code(pod) or 0) >= RETRYABLE:
                say(job, "Restarting", message=f"PyTorchJob {name} is restarting.")
                cluster.put(PYTORCHJOB, job)
                cluster.end_pod(pod, None)
            else:
                failed = f"PyTorchJob {name} is failed."
    never = {n for n in gone if policies[_role_of(n, name)].get("restartPolicy") in (None, "Never")}
    limit, deadline = run_policy.get("backoffLimit"), run_policy.get("activeDeadlineSeconds")
    if limit is not None and restarts >= max(1, limit):
        failed = f"Job {name} has failed because it has reached the specified backoff limit"
    if deadline is not None and started and age_s(job, started) >= deadline:
        failed = f"Job {name} has failed because it was active longer than specified deadline"
    if never:
        failed = failed or f"PyTorchJob {name} is failed: a pod is gone."
    if not condition_of(job, "Succeeded"):
        if not failed:
            return False
        say(job, "Failed", message=failed)
    job["status"]["completionTime"] = stamp()
    cluster.put(PYTORCHJOB, job)
    return True


def _role_of(pod_name: str, job_name: str) -> str:
    return pod_name.removeprefix(f"{job_name}-").rpartition("-")[0].capitalize()


def _clean_up(cluster: Kubelet, job: Object, pods: list[Object]) -> None:
    """Delete the pods that still run some time after the job's end, by its cleanPodPolicy."""
    policy = (job["spec"].get("runPolicy") or {}).get("cleanPodPolicy", "None")
    if not cluster.auto_run or policy == "None":
        return
    # The operator takes any other word than these for All.
    running = ("Running", "Pending")
    left = [p for p in pods if policy != "Running" or p["status"]["phase"] in running]
    if not left:
        return
    key = ("cleaning", job["metadata"]["uid"])
    if key not in cluster.memory:
        cluster.memory[key] = time.monotonic() + cluster.clean_after_s
        cluster.later(cluster.clean_after_s, cluster.key(PYTORCHJOB, job))
    elif time.monotonic() >= cluster.memory[key]:
        for pod in left:
            cluster.end_pod(pod, None)


def _pod(job: Object, role: str, index: int) -> Object:
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"][role]
    template = copy.deepcopy(replicas["template"])
    metadata, spec = template.get("metadata") or {}, template["spec"]
    env = _environment(job, role, index)
    for container in spec["containers"]:
        there = container.get("env") or []
        container["env"] = [*there, *({"name": k, "value": v} for k, v in env.items())]
    policy = replicas.get("restartPolicy", "Never")
    spec["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    if role == "Worker" and "Master" in job["spec"]["pytorchReplicaSpecs"]:
        wait = f"until nslookup {name}-master-0; do echo waiting for master; sleep 2; done;"
        spec.setdefault("initContainers", []).append(
            {"name": "init-pytorch", "image": "alpine:3.10", "command": ["sh", "-c", wait]}
        )
    labels = {
        **(metadata.get("labels") or {}),
        JOB_LABEL: name,
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        ROLE: role.lower(),
        INDEX: str(index),
    }
    if role == "Master":
        labels["training.kubeflow.org/job-role"] = "master"
    return {
        "metadata": {
            "name": f"{name}-{role.lower()}-{index}",
            "labels": labels,
            "annotations": dict(metadata.get("annotations") or {}),
        },
        "spec": spec,
    }


def _environment(job: Object, role: str, index: int) -> dict[str, str]:
    """Return what the operator adds to a container's environment."""
    name, spec = job["metadata"]["name"], job["spec"]
    policy: Any = spec.get("elasticPolicy")
    processes = str(spec.get("nprocPerNode") or "auto")
    total = sum(one.get("replicas", 1) for one in spec["pytorchReplicaSpecs"].values())
    env = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": processes}
    if policy is not None:
        host = policy.get("rdzvHost") or f"{name}-worker-0"
        port = policy.get("rdzvPort") or PORT
        return env | {
            "PET_RDZV_BACKEND": policy.get("rdzvBackend", "c10d"),
            "PET_RDZV_ENDPOINT": f"{host}:{port}",
            "PET_RDZV_ID": policy.get("rdzvId", name),
            "PET_RDZV_CONF": ",".join(
                f"{c['key']}={c['value']}" for c in policy.get("rdzvConf", ())
            ),
            "PET_NNODES": f"{policy.get('minReplicas', total)}:{policy.get('maxReplicas', total)}",
            "PET_MAX_RESTARTS": str(policy.get("maxRestarts", 0)),
        }
    master = "Master" in spec["pytorchReplicaSpecs"]
    rank = index + 1 if master and role == "Worker" else index
    address = f"{name}-master-0" if master else f"{name}-worker-0"
    world = total * int(processes) if processes.isdecimal() else total
    return env | {
        "MASTER_ADDR": address,
        "MASTER_PORT": PORT,
        "WORLD_SIZE": str(world),
        "RANK": str(rank),
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": str(total),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": PORT,
    }
