"""The facts of a Kubernetes cluster's namespace."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from toolkit.job.kubernetes_options import (
    LabelKey,
    LabelValue,
    Network,
    Patch,
    Toleration,
    Topology,
    Workload,
)
from toolkit.job.loader import Text
from toolkit.job.spec import Mount
from toolkit.job.types import AbsolutePath, Duration, NaturalInt, PositiveInt, SecretName, matching
from toolkit.profile.base import SiteProfile

__all__ = ["KubernetesProfile"]

Flag = Annotated[bool, Strict()]

ResourceName = Annotated[
    LabelKey, *matching(".+/.+", "write a device plugin's resource, like nvidia.com/gpu")
]
Capability = Annotated[Text, *matching("(?!CAP_)[A-Z_]+", "write it without CAP_, like IPC_LOCK")]


class KubernetesProfile(SiteProfile):
    """A namespace of a Kubernetes cluster."""

    kind: Literal["kubernetes"] = "kubernetes"
    """What the profile is for."""

    workload: Workload = "PyTorchJob"
    """What a job becomes: `PyTorchJob` (Kubeflow Training Operator), `TrainJob` (Kubeflow Trainer),
    `JobSet`, or `Job`, which needs no operator. See [Kubernetes](../how-to/kubernetes.md)."""

    namespace: SecretName = "default"
    """The namespace of the jobs."""

    context: Text | None = None
    """The context of the kubeconfig; the current one where it is left out."""

    master: Flag = False
    """Whether a PyTorchJob has a Master, as older clusters' tools expect, rather than workers only.
    The operator gives its workers an init container that Pod Security `restricted` refuses."""

    training_runtime: SecretName = "torch-deploy-toolkit"
    """The TrainingRuntime that a TrainJob refers to; `k8s/base` holds it."""

    queue: SecretName | None = None
    """The LocalQueue of Kueue that jobs wait in."""

    queue_priority: SecretName | None = None
    """The WorkloadPriorityClass of Kueue."""

    gang_scheduler: Literal["volcano", "scheduler-plugins"] | None = None
    """Who starts all pods of a job or none, where it is installed: Volcano, or the coscheduling of
    scheduler-plugins. Kueue admits whole jobs without one."""

    pod_security: Literal["restricted", "baseline", "privileged"] = "restricted"
    """The Pod Security level of the namespace; only `privileged` allows folders of the node."""

    run_as_user: NaturalInt = 1000
    """The user and group id that the container runs as; 0, for images that need root, is against
    Pod Security `restricted`."""

    read_only_root: Flag = True
    """Whether the container's root file system is read-only; /tmp, /dev/shm and the run directory
    can be written in any case."""

    capabilities: tuple[Capability, ...] = ()
    """Capabilities that the container keeps, like `IPC_LOCK` for RDMA; against Pod Security
    `restricted` and `baseline`."""

    host_network: Flag = False
    """Whether pods share their node's network, as some RDMA set-ups need; against Pod Security
    `restricted` and `baseline`. One pod per node then, since all use the same port."""

    network_policy: Flag = True
    """Whether each run brings a NetworkPolicy, for networks that enforce it: its pods reach each
    other, DNS and what `egress` names, and nobody else reaches them. Without it the namespace's own
    policies hold, like those of `k8s/base`, where all training pods reach each other."""

    egress: tuple[Network, ...] = ()
    """Networks that the pods of a run may reach besides, like `0.0.0.0/0` for all that is outside.
    The addresses at which clouds give out credentials (169.254.0.0/16) are left out of any."""

    service: SecretName | None = None
    """The headless Service of the namespace that gives the pods of a Job their names, as `k8s/base`
    has one. Without it, each run brings its own."""

    gpu_resource: ResourceName = "nvidia.com/gpu"
    """The name of the GPU resource."""

    resources: dict[ResourceName, PositiveInt] = Field(default={})
    """What else each pod asks of a device plugin, like `rdma/hca: 1`."""

    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    """Labels that a node must have."""

    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that the pods put up with."""

    one_pod_per_node: Flag = False
    """Whether each pod of a run is on a node of its own; nodes that GPUs fill do so anyway."""

    topology: Topology | None = None
    """How near to each other the pods must be; of Kueue where there is a queue."""

    priority_class: SecretName | None = None
    """The PriorityClass of the pods."""

    service_account: SecretName | None = None
    """The ServiceAccount of the pods, whose token they do not get."""

    image_pull_secrets: tuple[SecretName, ...] = ()
    """Secrets that hold the registry's credentials."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""

    runs_dir: AbsolutePath = "/runs"
    """Where the container sees the run directories."""

    runs_claim: SecretName | None = None
    """The PersistentVolumeClaim that holds them, which all nodes can mount at once; without one
    they are lost with the pod."""

    mounts: tuple[Mount, ...] = ()
    """Volumes that every job's pods see, beside the job's own."""

    secret: SecretName | None = None
    """The Kubernetes Secret for secrets that a job names without saying where they are."""

    ttl_s: Duration | None = Field(default=None, alias="ttl")
    """How long an ended run stays in the cluster, with its logs; for good where it is left out."""

    patches: tuple[Patch, ...] = ()
    """Changes to what is rendered, for what has no key here."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        level, problems = given.get("pod_security") or "restricted", []

        def breaks(what: str, *levels: str) -> None:
            if level in levels:
                problems.append(
                    f"{what} is against Pod Security {level!r}, so the cluster would refuse the "
                    f"pods; leave it out, or say what the namespace allows: pod_security: "
                    f"{'privileged' if 'baseline' in levels else 'baseline'}"
                )

        if given.get("run_as_user") == 0:
            breaks("run_as_user 0", "restricted")
        if given.get("master"):
            breaks("master: the operator's init container, which runs as root,", "restricted")
        for key in ("host_network", "capabilities"):
            if given.get(key):
                breaks(key, "restricted", "baseline")
        if given.get("master") and (given.get("workload") or "PyTorchJob") != "PyTorchJob":
            problems.append(f"master is for a PyTorchJob; workload is {given['workload']!r}")
        gpu = given.get("gpu_resource") or "nvidia.com/gpu"
        if isinstance(gpu, str) and gpu in (given.get("resources") or ()):
            problems.append(
                f"resources: {gpu!r} is what gpus_per_node of a job asks for; leave it out"
            )
        if given.get("queue_priority") and not given.get("queue"):
            problems.append(
                "queue_priority without a queue: it is a priority among Kueue's workloads"
            )
        return problems
