"""A little Kueue: an object with a queue's label waits until the test admits it."""

import hashlib
from typing import Any

from tests.fakes.kubernetes.kubelet import Kubelet, condition_of, reference, set_condition
from tests.fakes.kubernetes.resources import Resource, of_kind
from tests.fakes.kubernetes.store import stamp
from tests.fakes.kubernetes.wire import Object

__all__ = ["QUEUE", "WORKLOAD", "admit", "hold", "is_held", "preempt", "requeue", "said"]

WORKLOAD = of_kind("Workload")
QUEUE = "kueue.x-k8s.io/queue-name"
MANAGER = "kueue.x-k8s.io/manager"
DEFAULT_KINDS = ("Job", "JobSet", "TrainJob")
"""The kinds of Kueue's default configuration; PyTorchJobs run without it."""


def is_held(kinds: tuple[str, ...], thing: Object) -> bool:
    """Whether a new object has to wait."""
    labels = thing["metadata"].get("labels") or {}
    owned = thing["metadata"].get("ownerReferences")
    return thing["kind"] in kinds and QUEUE in labels and not owned


def _spec(thing: Object) -> Any:
    spec = thing["spec"]
    return spec.setdefault("runPolicy", {}) if thing["kind"] == "PyTorchJob" else spec


def hold(cluster: Kubelet, resource: Resource, thing: Object) -> None:
    """Make the Workload of an object that waits."""
    kind, metadata = resource.kind, thing["metadata"]
    digest = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:5]
    queue = metadata["labels"][QUEUE]
    made: Object = {
        "apiVersion": WORKLOAD.api_version,
        "kind": "Workload",
        "metadata": {
            "name": f"{kind.lower()}-{metadata['name']}-{digest}",
            "namespace": metadata["namespace"],
            "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]},
            "ownerReferences": [reference(thing)],
        },
        "spec": {"queueName": queue, "active": True},
        "status": {},
    }
    if cluster.find(of_kind("LocalQueue"), metadata["namespace"], queue) is None:
        words = f"LocalQueue {queue} doesn't exist"
    else:
        words = "couldn't assign flavors to pod set: insufficient unused quota, 2 more needed"
    set_condition(made, "QuotaReserved", reason="Pending", message=words, status="False")
    cluster.put(WORKLOAD, made)


def suspend(thing: Object) -> None:
    """Keep an object from running, as Kueue's webhook does."""
    _spec(thing)["suspend"] = True


def admit(cluster: Kubelet, resource: Resource, thing: Object, workload: Object) -> None:
    """Let an object run."""
    set_condition(workload, "QuotaReserved", reason="QuotaReserved", message="Quota reserved")
    set_condition(workload, "Admitted", reason="Admitted", message="The workload is admitted")
    set_condition(workload, "Evicted", reason="Admitted", status="False")
    cluster.put(WORKLOAD, workload)
    if thing["kind"] == "TrainJob":
        thing["spec"].setdefault("runtimePatches", []).append(_patch())
    _spec(thing)["suspend"] = False
    cluster.put(resource, thing)


def _patch() -> Object:
    """Return what Kueue writes into a TrainJob that it admits, beside the patches of others."""
    pod = {"metadata": {"labels": {"kueue.x-k8s.io/podset": "node"}}}
    job = {"name": "node", "template": {"spec": {"template": pod}}}
    spec = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {"manager": MANAGER, "time": stamp(), "trainingRuntimeSpec": spec}


def said(cluster: Kubelet, workload: Object, reason: str, message: str) -> None:
    """Say why a Workload waits."""
    set_condition(workload, "QuotaReserved", reason=reason, message=message, status="False")
    cluster.put(WORKLOAD, workload)


def preempt(cluster: Kubelet, resource: Resource, thing: Object, workload: Object) -> None:
    """Evict an object: its pods are stopped, and keep their quota until they are gone."""
    words = "Preempted to accommodate a workload of a higher priority"
    set_condition(workload, "Evicted", reason="Preempted", message=words)
    cluster.put(WORKLOAD, workload)
    suspend(thing)
    if (patches := thing["spec"].get("runtimePatches")) is not None:
        patches[:] = [patch for patch in patches if patch["manager"] != MANAGER]
    cluster.put(resource, thing)


def requeue(cluster: Kubelet, workload: Object) -> None:
    """Let an evicted Workload, whose pods are gone, wait again."""
    evicted = condition_of(workload, "Evicted")
    if evicted is not None and condition_of(workload, "QuotaReserved"):
        words = evicted["message"]
        set_condition(workload, "Admitted", reason="NoReservation", message=words, status="False")
        said(cluster, workload, "Pending", words)
