"""Kubeflow Trainer (trainer.kubeflow.org/v1alpha1): a TrainJob and its runtime make a JobSet."""

import copy
from typing import Any

from tests.fakes.kubernetes.indexed import age_s
from tests.fakes.kubernetes.jobsets import JOBSET
from tests.fakes.kubernetes.kubelet import Kubelet, condition_of, reference, set_condition
from tests.fakes.kubernetes.patching import laid_over
from tests.fakes.kubernetes.resources import of_kind
from tests.fakes.kubernetes.store import stamp
from tests.fakes.kubernetes.wire import Object

__all__ = ["TRAINJOB", "date_patches", "reconcile"]

TRAINJOB = of_kind("TrainJob")
RUNTIME = of_kind("TrainingRuntime")
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
PORT = 29500


def date_patches(trainjob: Object, before: Object | None) -> None:
    """Write into each new or changed entry of `runtimePatches` when that was, as the webhook does.

    Who sends the list as in a file sends it without these times: to the server a change.
    """
    old = (before or {}).get("spec", {}).get("runtimePatches") or []
    for patch in trainjob["spec"].get("runtimePatches") or ():
        if patch not in old:
            patch["time"] = stamp()


def reconcile(cluster: Kubelet, trainjob: Object) -> None:
    """Act on what a TrainJob and its JobSet have become."""
    metadata, spec = trainjob["metadata"], trainjob["spec"]
    if "deletionTimestamp" in metadata:
        return
    keys = [key for key in cluster.owned(metadata["uid"]) if key.resource is JOBSET]
    jobset = cluster.get(*keys[0]) if keys else None
    if condition_of(trainjob, "Complete") or condition_of(trainjob, "Failed"):
        return
    limit = spec.get("activeDeadlineSeconds")
    if jobset is None:
        runtime = cluster.find(RUNTIME, metadata["namespace"], spec["runtimeRef"]["name"])
        try:
            made = None if runtime is None else _jobset(trainjob, runtime)
        except LookupError as error:
            words = f"TrainJob resources creation failed: {error.args[0]}"
            cluster.warn(
                metadata["name"], "TrainJobResourcesCreationFailed", words, kind="TrainJob"
            )
            return
        if made is not None:
            cluster.put(JOBSET, made)
        if limit is not None and cluster.auto_run:
            cluster.later(limit + 0.05, cluster.key(TRAINJOB, trainjob))
        return
    if jobset["spec"].get("suspend", False) != spec.get("suspend", False):
        jobset["spec"]["suspend"] = spec.get("suspend", False)
        if not jobset["spec"]["suspend"]:  # patches may have come meanwhile
            runtime = cluster.get(RUNTIME, metadata["namespace"], spec["runtimeRef"]["name"])
            jobset["spec"] = _jobset(trainjob, runtime)["spec"]
        cluster.put(JOBSET, jobset)
    if not cluster.auto_run:
        return
    if limit is not None and age_s(trainjob, metadata["creationTimestamp"]) >= limit:
        words = "TrainJob exceeded its active deadline"
        set_condition(trainjob, "Failed", reason="DeadlineExceeded", message=words)
        cluster.put(TRAINJOB, trainjob)
        cluster.remove(JOBSET, jobset, propagation="Foreground")
        return
    _status(cluster, trainjob, jobset)


def _status(cluster: Kubelet, trainjob: Object, jobset: Object) -> None:
    status = trainjob.setdefault("status", {})
    status["jobsStatus"] = copy.deepcopy(
        (jobset.get("status") or {}).get("replicatedJobsStatus", [])
    )
    for theirs, ours in (("Completed", "Complete"), ("Failed", "Failed")):
        if (found := condition_of(jobset, theirs)) is not None:
            set_condition(trainjob, ours, reason=found["reason"], message=found["message"])
    if trainjob["spec"].get("suspend"):
        words = "TrainJob is suspended"
        set_condition(trainjob, "Suspended", reason="Suspended", message=words)
    elif condition_of(trainjob, "Suspended"):
        words = "TrainJob is resumed"
        set_condition(trainjob, "Suspended", reason="Resumed", message=words, status="False")
    cluster.put(TRAINJOB, trainjob)


def _jobset(trainjob: Object, runtime: Object) -> Object:
    """Return the JobSet of a TrainJob.

    Raises:
        LookupError: a patch names a job or container that the runtime does not have.
    """
    spec, metadata = trainjob["spec"], trainjob["metadata"]
    template: Any = copy.deepcopy(runtime["spec"]["template"])
    for patch in spec.get("runtimePatches") or ():
        theirs = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
        _refuse_strangers(template["spec"], theirs.get("spec") or {})
        template = laid_over(template, theirs)
    for job in template["spec"]["replicatedJobs"]:
        labels = (job["template"].get("metadata") or {}).get("labels") or {}
        if labels.get(STEP) == "trainer":
            _train(job, trainjob, runtime)
    template["spec"]["suspend"] = spec.get("suspend", False)
    own = template.get("metadata") or {}
    for key in ("labels", "annotations"):
        own[key] = (own.get(key) or {}) | (spec.get(key) or {})
    return {
        "apiVersion": JOBSET.api_version,
        "kind": "JobSet",
        "metadata": own
        | {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "ownerReferences": [reference(trainjob)],
        },
        "spec": template["spec"],
    }


def _refuse_strangers(spec: Object, patch: Object) -> None:
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    for job in patch.get("replicatedJobs") or ():
        if job["name"] not in jobs:
            raise LookupError(f"the runtime has no replicatedJob {job['name']!r}")
        pod = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
        known = jobs[job["name"]]["template"]["spec"]["template"]["spec"]["containers"]
        for container in (pod.get("spec") or {}).get("containers") or ():
            if container["name"] not in [one["name"] for one in known]:
                raise LookupError(f"the runtime has no container {container['name']!r}")


def _train(job: Object, trainjob: Object, runtime: Object) -> None:
    """Let the trainer's part of a TrainJob be what the job of a runtime runs."""
    trainer, name = trainjob["spec"].get("trainer") or {}, trainjob["metadata"]["name"]
    policy = runtime["spec"].get("mlPolicy") or {}
    nodes = trainer.get("numNodes") or policy.get("numNodes") or 1
    spec = job["template"]["spec"]
    spec |= {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
    pod = spec["template"]["spec"]
    (container,) = [one for one in pod["containers"] if one["name"] == "node"]
    for key in ("image", "command", "args"):
        if trainer.get(key):
            container[key] = copy.deepcopy(trainer[key])
    if trainer.get("resourcesPerNode"):
        container["resources"] = copy.deepcopy(trainer["resourcesPerNode"])
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    processes = trainer.get("numProcPerNode") or (policy.get("torch") or {}).get("numProcPerNode")
    own = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(processes or "auto")},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": field}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{job['name']}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    env = laid_over(container.get("env") or [], trainer.get("env") or [], "env")
    container["env"] = laid_over(env, own, "env") if "torch" in policy else env
    container.setdefault("ports", []).append({"containerPort": PORT})
