"""The model of a Kubernetes namespace."""

from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Literal

from pydantic import Field

from toolkit.job import types
from toolkit.job.kubernetes_options import PLAIN_CAPABILITIES, Patch, Workload
from toolkit.job.spec import Mount
from toolkit.job.types import Checked, FrozenModel, Text, matching
from toolkit.profile.base import SiteProfile

_PREFIX = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/"
LabelKey = Annotated[
    Text,
    *matching(
        rf"({_PREFIX})?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
        "write it as Kubernetes does, like topology.kubernetes.io/zone",
    ),
]
"""A label's key (Kubernetes, labels: an optional DNS prefix and a name of at most 63)."""

LabelValue = Annotated[
    Text,
    *matching(
        r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?",
        "a label's value has at most 63 letters, digits, '-', '_' and '.', none of these at an end",
    ),
]
"""A label's value."""

ResourceName = Annotated[
    LabelKey, *matching(".+/.+", "write a device plugin's resource, like nvidia.com/gpu")
]
Capability = Annotated[Text, *matching("(?!CAP_)[A-Z_]+", "write it without CAP_, like IPC_LOCK")]

_METADATA = (ip_network("169.254.0.0/16"), ip_network("fd00:ec2::/32"))
"""Link-local addresses of IPv4, and Amazon's own of IPv6, at which clouds give the node's
rights to any client."""


def _network(value: str) -> str:
    try:
        network = ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write a network like 10.0.0.0/8") from None
    if any(_holds(one, network) for one in _METADATA):
        raise ValueError(f"{value!r} is where clouds hand out credentials; leave it out")
    return str(network)


def _holds(outer: IPv4Network | IPv6Network, inner: IPv4Network | IPv6Network) -> bool:
    return inner.network_address in outer and inner.prefixlen >= outer.prefixlen


Network = Annotated[
    Text, Checked(_network), types.schema_extra(examples=["10.0.0.0/8", "0.0.0.0/0"])
]
"""Addresses that pods may reach, like `10.0.0.0/8`."""


def block_of(network: str) -> dict[str, Any]:
    """Return a network as an `ipBlock` of a NetworkPolicy, except the clouds' metadata services.

    >>> block_of("0.0.0.0/0")
    {'cidr': '0.0.0.0/0', 'except': ['169.254.0.0/16']}
    """
    whole = ip_network(network)
    inner = [str(one) for one in _METADATA if _holds(whole, one)]
    return {"cidr": network} | ({"except": inner} if inner else {})


class Toleration(FrozenModel):
    """A taint of nodes that the pods tolerate."""

    key: LabelKey | None = None
    """The taint's key; by default any."""

    operator: Literal["Equal", "Exists"] = "Equal"
    """`Equal` compares the value, `Exists` does not."""

    value: LabelValue | None = None
    """The taint's value."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; by default any."""

    toleration_seconds: types.NaturalInt | None = Field(default=None, alias="tolerationSeconds")
    """How many seconds a pod stays after a taint of `NoExecute`."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other (Kubernetes, validation of tolerations)."""
        problems = []
        if given.get("operator") == "Exists" and given.get("value"):
            problems.append(
                "operator Exists takes no value; leave it out, or write operator: Equal"
            )
        if not given.get("key") and given.get("operator") != "Exists":
            problems.append("a toleration without a key needs operator: Exists")
        waits = [given.get(key) for key in ("tolerationSeconds", "toleration_seconds")]
        if waits != [None, None] and given.get("effect") != "NoExecute":
            problems.append("tolerationSeconds needs effect: NoExecute")
        return problems


class Topology(FrozenModel):
    """How close to each other the pods must be."""

    key: LabelKey
    """The label with a node's location, like `topology.kubernetes.io/zone`."""

    required: types.Flag = False
    """Whether the run waits until nodes with the same value are free, instead of taking others."""


class KubernetesProfile(SiteProfile):
    """A namespace of a Kubernetes cluster."""

    kind: Literal["kubernetes"] = "kubernetes"
    """The kind of site."""

    workload: Workload = "PyTorchJob"
    """The kind of object: `PyTorchJob` (Kubeflow Training Operator), `TrainJob` (Kubeflow Trainer),
    `JobSet`, or `Job`, which needs no operator. See [Kubernetes](../how-to/kubernetes.md)."""

    namespace: types.SecretName = "default"
    """The namespace of the jobs."""

    context: Text | None = None
    """The context of the kubeconfig; by default the current one."""

    master: types.Flag = False
    """Whether the first pod of a PyTorchJob is a Master, as the tools of older clusters expect.
    The operator then gives the workers an init container that Pod Security `restricted` refuses."""

    training_runtime: types.SecretName = "torch-deploy-toolkit"
    """The TrainingRuntime that a TrainJob refers to; `k8s/base/trainer` holds the default one."""

    queue: types.SecretName | None = None
    """The LocalQueue of Kueue in which jobs wait."""

    queue_priority: types.SecretName | None = None
    """The WorkloadPriorityClass of Kueue."""

    gang_scheduler: Literal["volcano", "scheduler-plugins"] | None = None
    """The installed scheduler that starts either all pods of a job (of an elastic job at least
    `min`) or none: Volcano, or the coscheduling of scheduler-plugins. Kueue admits whole jobs
    without one."""

    pod_security: Literal["restricted", "baseline", "privileged"] = "restricted"
    """The Pod Security level of the namespace; only `privileged` allows folders of the node."""

    run_as_user: types.NaturalInt = 1000
    """The user and group id of the container; 0, for images that need root, violates Pod Security
    `restricted`."""

    read_only_root: types.Flag = True
    """Whether the container's root file system is read-only; /tmp, /dev/shm and the run directory
    are always writable."""

    capabilities: tuple[Capability, ...] = ()
    """Capabilities added to the container, like `IPC_LOCK` for RDMA. A process gets them only as
    root, so they need `run_as_user: 0`. Pod Security `baseline` allows thirteen, such as `CHOWN`;
    others, such as `IPC_LOCK`, need `pod_security: privileged`. As another user, RDMA needs
    `LimitMEMLOCK=infinity` for the nodes' container runtime instead."""

    host_network: types.Flag = False
    """Whether pods share their node's network, as some RDMA set-ups need; it violates Pod Security
    `restricted` and `baseline`, and allows one pod of a run per node, since all use the same
    port."""

    network_policy: types.Flag = True
    """Whether each run has a NetworkPolicy, for networks that enforce it: it lets the run's pods
    reach only each other, DNS and the networks under `egress`, and lets nothing else reach them.
    Policies of the namespace apply as well, and policies add up: with `training-pods` of
    `k8s/base`, all training pods reach each other in any case. Most network plugins apply no policy
    to pods with `host_network`."""

    egress: tuple[Network, ...] = ()
    """More networks that the pods of a run may reach, like `0.0.0.0/0` for everything outside. The
    addresses at which most clouds hand out credentials (169.254.0.0/16 and fd00:ec2::/32) are
    excluded, except a node's DNS cache."""

    service: types.SecretName | None = None
    """The namespace's headless Service that gives the pods of a Job their names, as in `k8s/base`.
    Without it, each Job creates its own."""

    gpu_resource: ResourceName = "nvidia.com/gpu"
    """The name of the GPU resource."""

    resources: dict[ResourceName, types.PositiveInt] = Field(default={})
    """More resources of device plugins for each pod, like `rdma/hca: 1`."""

    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    """Labels that a node must have."""

    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that the pods tolerate."""

    lost_node_toleration_s: types.Duration = Field(
        default=5, alias="lost_node_toleration", json_schema_extra={"default": "5s"}
    )
    """How long a pod stays on a node that is not ready or unreachable before Kubernetes deletes
    it. Kubernetes waits 40 to 55 s before it marks a silent node so, and its own default here is
    five minutes."""

    one_pod_per_node: types.Flag = False
    """Whether each pod of a run gets a separate node; a pod that uses all GPUs of a node always
    does."""

    topology: Topology | None = None
    """How close to each other the pods must be; if there is a queue, Kueue arranges it."""

    priority_class: types.SecretName | None = None
    """The PriorityClass of the pods."""

    service_account: types.SecretName | None = None
    """The ServiceAccount of the pods; its token is not mounted, unless the `training_runtime` of a
    TrainJob mounts it."""

    image_pull_secrets: tuple[types.SecretName, ...] = ()
    """Secrets that hold the registry's credentials."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""

    runs_dir: types.AbsolutePath = "/runs"
    """The folder of the run directories in the container."""

    runs_claim: types.SecretName | None = None
    """The PersistentVolumeClaim that holds the run directories; all nodes must be able to mount it
    at the same time. Without one, run directories are lost with their pods."""

    mounts: tuple[Mount, ...] = ()
    """Volumes to mount into the pods of every job, besides the job's own."""

    secret: types.SecretName | None = None
    """The Kubernetes Secret that holds the secrets for which a job gives no place."""

    ttl_s: types.Duration | None = Field(default=None, alias="ttl")
    """How long a run stays in the cluster after its end, with its logs; by default until you delete
    it."""

    supervisor: types.SupervisorPlace = "carried"
    """Where pods find the supervisor, which needs Python 3.8 with the module bz2 in the image:
    `carried` in a ConfigMap of the run, `installed` with the toolkit in the image, or the path of
    its file in the image or on a volume."""

    patches: tuple[Patch, ...] = ()
    """Changes to the rendered objects, for settings that have no key."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        level, problems = given.get("pod_security") or "restricted", []

        def breaks(what: str, *levels: str) -> None:
            if level in levels:
                problems.append(
                    f"{what} violates Pod Security {level!r}, so the cluster would refuse the "
                    f"pods; leave it out, or set what the namespace allows: pod_security: "
                    f"{'privileged' if 'baseline' in levels else 'baseline'}"
                )

        if given.get("run_as_user") == 0:
            breaks("run_as_user 0", "restricted")
        if given.get("master"):
            breaks("master: the operator's init container, which runs as root,", "restricted")
        if given.get("host_network"):
            breaks("host_network", "restricted", "baseline")
        added = [str(name) for name in given.get("capabilities") or ()]
        if beyond := [name for name in added if name not in PLAIN_CAPABILITIES]:
            breaks(f"capabilities: {', '.join(beyond)}", "restricted", "baseline")
        elif set(added) - {"NET_BIND_SERVICE"}:
            breaks("capabilities", "restricted")
        if given.get("capabilities") and given.get("run_as_user") != 0:
            problems.append(
                "capabilities without run_as_user: 0: a process gets added capabilities only as "
                "root; add run_as_user: 0, or leave capabilities out (RDMA works for other users "
                "if the nodes' container runtime has LimitMEMLOCK=infinity)"
            )
        if given.get("master") and (given.get("workload") or "PyTorchJob") != "PyTorchJob":
            problems.append(f"master is for a PyTorchJob; workload is {given['workload']!r}")
        gpu = given.get("gpu_resource") or "nvidia.com/gpu"
        if isinstance(gpu, str) and gpu in (given.get("resources") or ()):
            problems.append(
                f"resources: {gpu!r} is what gpus_per_node of a job asks for; leave it out"
            )
        if given.get("queue_priority") and not given.get("queue"):
            problems.append("queue_priority without a queue: it orders the workloads of Kueue")
        return problems
