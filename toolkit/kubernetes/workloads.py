"""Objects in the cluster: the kinds of workload, and the objects of one run. Pure.

The table contains the API group of each kind and the meaning of its conditions. A new kind needs a
row here and a template.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from toolkit.job.kubernetes_options import Workload
from toolkit.planning.kubernetes import STARTED, KubernetesPlan, with_checksums
from toolkit.planning.pods import RUN_LABEL
from toolkit.rendering import render
from toolkit.rendering.payload import FILE
from toolkit.runs.state import RunState
from toolkit.text.yaml_reader import documents_of

Object = Mapping[str, Any]
"""An object of the API, or a part of one."""

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of Jobs with the name of their JobSet."""

PAYLOAD_LIMIT = 1024 * 1024 - 16 * 1024
"""Maximum bytes of a run's files in a ConfigMap; its limit of 1 MiB includes keys and names."""

_JOB_ANNOTATION = "torch-deploy-toolkit/job"

_OF_CLUSTER = (
    *("ClusterQueue", "ClusterRole", "ClusterRoleBinding", "ClusterTrainingRuntime"),
    *("CustomResourceDefinition", "Namespace", "Node", "PersistentVolume", "PriorityClass"),
    *("ResourceFlavor", "RuntimeClass", "StorageClass", "Topology", "WorkloadPriorityClass"),
)
"""Cluster-scoped kinds that users' manifests may contain."""


@dataclass(frozen=True, kw_only=True)
class ApiResource:
    """The place of a kind's objects in the API."""

    api_version: str
    """Group and version, as in a manifest; `v1` for the core group."""

    kind: str

    @property
    def plural(self) -> str:
        """The kind's name in a path; all built-in kinds follow this rule.

        >>> kinds = ("NetworkPolicy", "PodGroup", "Ingress")
        >>> [ApiResource(api_version="v1", kind=kind).plural for kind in kinds]
        ['networkpolicies', 'podgroups', 'ingresses']
        """
        name = self.kind.lower()
        if name.endswith("y") and name[-2] not in "aeiou":
            return name[:-1] + "ies"
        return name + ("es" if name.endswith(("s", "x", "ch")) else "s")

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of all objects of this kind in a namespace, or of one of them."""
        root = "/apis/" if "/" in self.api_version else "/api/"
        inside = () if self.kind in _OF_CLUSTER else ("namespaces", namespace)
        parts = (self.api_version, *inside, self.plural, name)
        return root + "/".join(quote(part, safe="/") for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class WorkloadKind(ApiResource):
    """A kind of object that creates the pods of a run."""

    operator: str
    """The required operator; empty for a built-in kind."""

    container: str
    """The name of the pods' container."""

    conditions: Mapping[str, RunState | None]
    """The state for each true condition, the first counts; None if it determines no state."""

    counts: str = ""
    """The list of Job counts in the status, for kinds without a condition for running."""

    jobs: bool = False
    """Whether Jobs create its pods."""

    replaces_failed: bool = True
    """Whether permanently failed pods are replaced a few times before the object fails."""


_PENDING, _RUNNING = RunState.PENDING, RunState.RUNNING
_FAILED, _SUCCEEDED = RunState.FAILED, RunState.SUCCEEDED

KINDS: Mapping[Workload, WorkloadKind] = {
    # kubeflow.org/v1 JobConditionType.
    "PyTorchJob": WorkloadKind(
        kind="PyTorchJob",
        api_version="kubeflow.org/v1",
        operator="the Kubeflow Training Operator (training-operator v1)",
        container="pytorch",
        replaces_failed=False,
        conditions={
            "Failed": _FAILED,
            "Succeeded": _SUCCEEDED,
            "Suspended": _PENDING,
            "Restarting": _RUNNING,
            "Running": _RUNNING,
            "Created": _PENDING,
        },
    ),
    # trainer.kubeflow.org/v1alpha1: only the counts of its Jobs show that it runs.
    "TrainJob": WorkloadKind(
        kind="TrainJob",
        api_version="trainer.kubeflow.org/v1alpha1",
        operator="Kubeflow Trainer (v2)",
        container="node",
        conditions={"Failed": _FAILED, "Complete": _SUCCEEDED, "Suspended": _PENDING},
        counts="jobsStatus",
        jobs=True,
    ),
    # jobset.x-k8s.io/v1alpha2.
    "JobSet": WorkloadKind(
        kind="JobSet",
        api_version="jobset.x-k8s.io/v1alpha2",
        operator="the JobSet controller (jobset.sigs.k8s.io)",
        container="node",
        conditions={
            "Failed": _FAILED,
            "Completed": _SUCCEEDED,
            "Suspended": _PENDING,
            "RestartingJobSet": _RUNNING,
            "StartupPolicyInProgress": None,
            "StartupPolicyCompleted": None,
        },
        counts="replicatedJobsStatus",
        jobs=True,
    ),
    # batch/v1: FailureTarget and SuccessCriteriaMet come before the end, while pods stop.
    "Job": WorkloadKind(
        kind="Job",
        api_version="batch/v1",
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


@dataclass(frozen=True, kw_only=True)
class RunObjects:
    """A run's objects."""

    kind: WorkloadKind
    companions: Sequence[Object]
    """Objects that must exist before the workload and are deleted with it."""

    workload: Object
    """The object that creates the pods."""

    payloads: Sequence[Object] = ()
    """ConfigMaps with the supervisor and the run's files, which the pods wait for: created after
    the workload, and owned by it."""

    apart: Mapping[str, bytes] = field(default_factory=dict)
    """Files in the run directory, by path, that are too large for a ConfigMap."""

    @property
    def name(self) -> str:
        """The name of the workload."""
        return str(self.workload["metadata"]["name"])


def pod_names_of(kind: WorkloadKind, obj: Object) -> list[str]:
    """Return the short names of an object's simultaneous pods, by role and index."""
    spec = obj.get("spec") or {}
    counts = {"node": spec.get("parallelism")}
    match kind.kind:
        case "PyTorchJob":
            roles = spec.get("pytorchReplicaSpecs") or {}
            counts = {role.lower(): one.get("replicas") for role, one in roles.items()}
        case "TrainJob":
            counts = {"node": (spec.get("trainer") or {}).get("numNodes")}
        case "JobSet":
            jobs = spec.get("replicatedJobs") or ()
            parallel = (int(job["template"]["spec"].get("parallelism") or 1) for job in jobs)
            counts = {"node": sum(parallel)}
    return [
        f"{role}-{index}"
        for role, count in sorted(counts.items())
        for index in range(1 if count is None else int(count))
    ]


def pods_of(kind: WorkloadKind, obj: Object) -> int:
    """Return the number of an object's simultaneous pods."""
    return len(pod_names_of(kind, obj))


def resource_of(document: Object) -> ApiResource:
    """Return the API resource of an object."""
    return ApiResource(api_version=str(document["apiVersion"]), kind=str(document["kind"]))


def manifest_for(plan: KubernetesPlan, files: Mapping[str, bytes]) -> str:
    """Return the manifest of a run with submitted files.

    The checksums of the files in its ConfigMap, in the format of `sha256sum -c`, are in the
    workload itself, which a user with only permission to create ConfigMaps cannot change.
    """
    rows = (f"{sha256(text).hexdigest()}  {name}" for name, text in _small(files).items())
    return render(with_checksums(plan, "\n".join(sorted(rows))) if files else plan)


def objects_by_run(
    manifest: str, kind: WorkloadKind, files: Mapping[str, bytes] = MappingProxyType({})
) -> list[RunObjects]:
    """Return the objects of a run with submitted files; for a sweep, of each point."""
    runs: list[RunObjects] = []
    companions: list[Object] = []
    payloads: list[Object] = []
    for document in documents_of(manifest):
        if holds_supervisor(document):
            payloads.append(document)
            continue
        if document["kind"] != kind.kind:
            # A template may add objects after the workload.
            own = runs[-1] if runs and _run_of(document) == runs[-1].name else None
            if own is not None:
                runs[-1] = replace(own, companions=[*own.companions, document])
            else:
                companions.append(document)
            continue
        run = RunObjects(kind=kind, companions=companions, workload=document, payloads=payloads)
        companions, payloads = [], []
        if files:
            metadata = document["metadata"]
            payload = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {key: metadata[key] for key in ("name", "namespace", "labels")},
                "binaryData": {n: b64encode(text).decode() for n, text in _small(files).items()},
                "immutable": True,
            }
            run = replace(run, payloads=[*run.payloads, payload], apart=too_large(files))
        runs.append(run)
    if runs and companions:
        runs[-1] = replace(runs[-1], companions=[*runs[-1].companions, *companions])
    return runs


def _run_of(document: Object) -> str:
    return str((document["metadata"].get("labels") or {}).get(RUN_LABEL) or "")


def holds_supervisor(document: Object) -> bool:
    """Whether an object is the ConfigMap with the supervisor."""
    return document["kind"] == "ConfigMap" and FILE in (document.get("binaryData") or ())


def too_large(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the largest files, which do not fit into the ConfigMap with the others."""
    rest = dict(sorted(files.items(), key=lambda item: len(item[1])))
    contents: dict[str, bytes] = {}
    while sum(map(len, rest.values())) > PAYLOAD_LIMIT:
        contents |= [rest.popitem()]
    return contents


def _small(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the other files, by file name, as the pods see them."""
    large = too_large(files)
    return {name.rpartition("/")[2]: text for name, text in files.items() if name not in large}


def started_again(run: RunObjects, token: str) -> RunObjects:
    """Return the objects of a run that is resubmitted under its name.

    The pods of a PyTorchJob have no label that distinguishes submissions, so a variable contains a
    unique token. For all other kinds, the cluster labels the starts. The ConfigMaps get new names,
    since those of the deleted run may still exist for a while.
    """
    names = [payload["metadata"]["name"] for payload in run.payloads]

    def renewed(value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.get("name") == STARTED and "value" in value:
                return {**value, "value": f"{run.name}-{token}"}
            source = value.get("configMap")
            if isinstance(source, Mapping) and source.get("name") in names:
                return {**value, "configMap": {"name": f"{source['name']}-{token}"}}
            return {key: renewed(entry) for key, entry in value.items()}
        return [renewed(item) for item in value] if isinstance(value, list) else value

    payloads = [
        {**one, "metadata": {**one["metadata"], "name": f"{one['metadata']['name']}-{token}"}}
        for one in run.payloads
    ]
    return replace(run, workload=renewed(run.workload), payloads=payloads)


def owned(document: Object, kind: WorkloadKind, workload: Object) -> Object:
    """Return an object that is deleted with a workload."""
    owner = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": workload["metadata"]["name"],
        "uid": workload["metadata"]["uid"],
    }
    return {**document, "metadata": {**document["metadata"], "ownerReferences": [owner]}}


def is_of(body: Object, obj: Object | None) -> bool:
    """Whether an existing object, if any, is the one to create."""

    def identity(thing: Object) -> tuple[str, str]:
        labels = thing["metadata"].get("labels") or {}
        annotations = thing["metadata"].get("annotations") or {}
        return str(labels.get(RUN_LABEL)), str(annotations.get(_JOB_ANNOTATION))

    return obj is not None and identity(body) == identity(obj)
