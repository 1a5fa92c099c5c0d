"""The kinds of objects that a run can be: where the API has them, and what their words mean. Pure.

Adding a kind is adding a row here, and a template.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from toolkit.job.kubernetes_options import Workload
from toolkit.runs.state import RunState

__all__ = ["ATTEMPT_LABEL", "KINDS", "Kind", "Object", "Place", "place_of", "plural_of", "pods_of"]

Object = Mapping[str, Any]
"""An object of the API, or a part of one."""

ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
"""The label of pods in which JobSet counts the starts of all of them."""


_OF_CLUSTER = frozenset(
    (
        "ClusterQueue",
        "ClusterRole",
        "ClusterRoleBinding",
        "ClusterTrainingRuntime",
        "CustomResourceDefinition",
        "Namespace",
        "PersistentVolume",
        "PriorityClass",
        "ResourceFlavor",
        "RuntimeClass",
        "StorageClass",
        "Topology",
        "WorkloadPriorityClass",
    )
)
"""Kinds that people's manifests may hold and that are in no namespace."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the API has the objects of a kind."""

    api_version: str
    """Group and version, as in a manifest; `v1` for the core."""

    plural: str
    """The kind's name in a path."""

    kind: str
    """The kind."""

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of all of a namespace, or of one."""
        root = "/apis/" if "/" in self.api_version else "/api/"
        inside = () if self.kind in _OF_CLUSTER else ("namespaces", namespace)
        parts = (self.api_version, *inside, self.plural, name)
        return root + "/".join(quote(part, safe="/") for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Kind(Place):
    """A kind of object that makes the pods of a run."""

    operator: str
    """The operator that must be installed for it; empty where any cluster knows it."""

    container: str
    """The pods' container."""

    conditions: Mapping[str, RunState | None]
    """The state of a true condition;
    the first that is true counts. None if it does not determine the
    state."""

    counts: str = ""
    """The list in the status that counts Jobs, for kinds that have no condition for running."""

    jobs: bool = False
    """Whether Jobs stand between it and its pods."""


_PENDING, _RUNNING = RunState.PENDING, RunState.RUNNING
_FAILED, _SUCCEEDED = RunState.FAILED, RunState.SUCCEEDED

KINDS: Mapping[Workload, Kind] = {
    # kubeflow.org/v1 JobConditionType.
    "PyTorchJob": Kind(
        kind="PyTorchJob",
        api_version="kubeflow.org/v1",
        plural="pytorchjobs",
        operator="the Kubeflow Training Operator (training-operator v1)",
        container="pytorch",
        conditions={
            "Failed": _FAILED,
            "Succeeded": _SUCCEEDED,
            "Suspended": _PENDING,
            "Restarting": _RUNNING,
            "Running": _RUNNING,
            "Created": _PENDING,
        },
    ),
    # trainer.kubeflow.org/v1alpha1: nothing says that it runs but the counts of its Jobs.
    "TrainJob": Kind(
        kind="TrainJob",
        api_version="trainer.kubeflow.org/v1alpha1",
        plural="trainjobs",
        operator="Kubeflow Trainer (v2)",
        container="node",
        conditions={"Failed": _FAILED, "Complete": _SUCCEEDED, "Suspended": _PENDING},
        counts="jobsStatus",
        jobs=True,
    ),
    # jobset.x-k8s.io/v1alpha2.
    "JobSet": Kind(
        kind="JobSet",
        api_version="jobset.x-k8s.io/v1alpha2",
        plural="jobsets",
        operator="the JobSet controller (jobset.sigs.k8s.io)",
        container="node",
        conditions={
            "Failed": _FAILED,
            "Completed": _SUCCEEDED,
            "Suspended": _PENDING,
            "StartupPolicyInProgress": None,
            "StartupPolicyCompleted": None,
        },
        counts="replicatedJobsStatus",
        jobs=True,
    ),
    # batch/v1: FailureTarget and SuccessCriteriaMet come before the end, while pods still stop.
    "Job": Kind(
        kind="Job",
        api_version="batch/v1",
        plural="jobs",
        operator="",
        container="node",
        conditions={
            "Failed": _FAILED,
            "Complete": _SUCCEEDED,
            "FailureTarget": _RUNNING,
            "SuccessCriteriaMet": _RUNNING,
            "Suspended": _PENDING,
        },
    ),
}
"""The kinds by their names."""


def pods_of(kind: Kind, obj: Object) -> int:
    """Return how many pods an object has at a time."""
    spec = obj.get("spec") or {}
    match kind.kind:
        case "PyTorchJob":
            replicas = spec.get("pytorchReplicaSpecs") or {}
            return sum(int(r.get("replicas") or 1) for r in replicas.values())
        case "TrainJob":
            return int((spec.get("trainer") or {}).get("numNodes") or 1)
        case "JobSet":
            jobs = spec.get("replicatedJobs") or ()
            return sum(int(job["template"]["spec"].get("parallelism") or 1) for job in jobs)
    return int(spec.get("parallelism") or 1)


def plural_of(kind: str) -> str:
    """Return a kind's name in a path; the API's own are all formed so.

    >>> plural_of("NetworkPolicy"), plural_of("PodGroup"), plural_of("Ingress")
    ('networkpolicies', 'podgroups', 'ingresses')
    """
    name = kind.lower()
    if name.endswith("y") and name[-2] not in "aeiou":
        return name[:-1] + "ies"
    return name + ("es" if name.endswith(("s", "x", "ch")) else "s")


def place_of(document: Object) -> Place:
    """Return where the API has an object like this one."""
    kind = str(document["kind"])
    return Place(api_version=str(document["apiVersion"]), plural=plural_of(kind), kind=kind)
