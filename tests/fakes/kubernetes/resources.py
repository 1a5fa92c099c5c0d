"""The table of what the API server serves."""

from dataclasses import dataclass

__all__ = ["RESOURCES", "WORKLOADS", "Resource", "of_kind", "served"]


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One kind of objects."""

    group: str
    """The API group; empty for the core."""

    versions: tuple[str, ...]
    """Its versions; the first is how objects are kept."""

    plural: str
    """As in paths."""

    kind: str
    """As in manifests."""

    namespaced: bool = True
    """Whether its objects live in namespaces."""

    short: tuple[str, ...] = ()
    """Short names for kubectl."""

    status: bool = False
    """Whether writing the object leaves its status alone, and `/status` writes only that."""

    model: str | None = None
    """The model of the Python client that knows its fields."""

    crd: bool = False
    """Whether it is a custom resource; `schemas/PLURAL.json`, where there is one, is its schema."""

    generated: bool = True
    """Whether it counts generations of its spec."""

    @property
    def api_version(self) -> str:
        """Return what manifests call it by."""
        return f"{self.group}/{self.versions[0]}" if self.group else self.versions[0]

    @property
    def full(self) -> str:
        """Return the name that messages use, like `pytorchjobs.kubeflow.org`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _core(plural: str, kind: str, model: str, *short: str, status: bool = False) -> Resource:
    return Resource(
        group="",
        versions=("v1",),
        plural=plural,
        kind=kind,
        namespaced=kind not in ("Namespace", "Node"),
        short=short,
        status=status,
        model=model,
        generated=False,
    )


def _custom(group: str, versions: str, plural: str, kind: str, *short: str) -> Resource:
    return Resource(
        group=group,
        versions=tuple(versions.split()),
        plural=plural,
        kind=kind,
        short=short,
        status=kind not in ("TrainingRuntime",),
        crd=True,
    )


RESOURCES = (
    _core("namespaces", "Namespace", "V1Namespace", "ns", status=True),
    _core("nodes", "Node", "V1Node", "no", status=True),
    _core("pods", "Pod", "V1Pod", "po", status=True),
    _core("events", "Event", "CoreV1Event", "ev"),
    _core("services", "Service", "V1Service", "svc", status=True),
    _core("configmaps", "ConfigMap", "V1ConfigMap", "cm"),
    _core("secrets", "Secret", "V1Secret"),
    _core("serviceaccounts", "ServiceAccount", "V1ServiceAccount", "sa"),
    _core(
        "persistentvolumeclaims",
        "PersistentVolumeClaim",
        "V1PersistentVolumeClaim",
        "pvc",
        status=True,
    ),
    Resource(
        group="batch", versions=("v1",), plural="jobs", kind="Job", status=True, model="V1Job"
    ),
    Resource(
        group="networking.k8s.io",
        versions=("v1",),
        plural="networkpolicies",
        kind="NetworkPolicy",
        short=("netpol",),
        model="V1NetworkPolicy",
    ),
    Resource(
        group="rbac.authorization.k8s.io",
        versions=("v1",),
        plural="roles",
        kind="Role",
        model="V1Role",
        generated=False,
    ),
    Resource(
        group="rbac.authorization.k8s.io",
        versions=("v1",),
        plural="rolebindings",
        kind="RoleBinding",
        model="V1RoleBinding",
        generated=False,
    ),
    _custom("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
    _custom("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    _custom("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime"),
    _custom("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    _custom("kueue.x-k8s.io", "v1beta2 v1beta1", "workloads", "Workload", "wl"),
    _custom("kueue.x-k8s.io", "v1beta2 v1beta1", "localqueues", "LocalQueue", "lq"),
    _custom("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup"),
    _custom("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup"),
)

OPERATORS = frozenset(r.group for r in RESOURCES if r.crd)
"""The groups that exist only where their operator is installed."""

WORKLOADS = ("PyTorchJob", "TrainJob", "JobSet", "Job")
"""The kinds that a run can be, those first that make others."""


def of_kind(kind: str, api_version: str | None = None) -> Resource:
    """Return the resource of a kind.

    Raises:
        LookupError: no such kind is served.
    """
    for one in RESOURCES:
        group = (api_version or one.api_version).rpartition("/")[0]
        if one.kind == kind and one.group == group:
            return one
    raise LookupError(f"no kind {kind!r} in {api_version}")


def served(group: str, version: str, plural: str) -> Resource | None:
    """Return what a path means, or None."""
    for one in RESOURCES:
        if one.group == group and version in one.versions and one.plural == plural:
            return one
    return None
