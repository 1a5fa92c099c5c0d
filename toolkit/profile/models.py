"""The models of profiles: what every site has, this machine, a Slurm cluster, Kubernetes."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict

from toolkit.job.kubernetes_options import (
    LabelKey,
    LabelValue,
    Network,
    Patch,
    Toleration,
    Topology,
    Workload,
)
from toolkit.job.loader import FrozenModel, Text
from toolkit.job.sbatch_options import SbatchOptions
from toolkit.job.spec import Mount
from toolkit.job.types import (
    AbsolutePath,
    Duration,
    EnvName,
    HomePath,
    NaturalInt,
    PositiveInt,
    SecretName,
    Size,
    Via,
    matching,
)

__all__ = [
    "KubernetesProfile",
    "LocalProfile",
    "NodeFacts",
    "Profile",
    "SiteProfile",
    "SlurmProfile",
    "Switches",
]


def _no_home_sign(value: str) -> str:
    if not value or value.startswith("~"):
        raise ValueError(f"{value!r} is not expanded; write the path out")
    return value


Flag = Annotated[bool, Strict()]
Word = Annotated[Text, *matching(r"\S+", "write one word, or leave the key out")]
FolderPath = Annotated[Text, AfterValidator(_no_home_sign)]


class NodeFacts(FrozenModel):
    """What one node of the site has, so that a job that cannot fit is refused before it queues."""

    gpus: NaturalInt | None = None
    """GPUs of a node."""

    cpus: PositiveInt | None = None
    """CPUs of a node."""

    memory_bytes: Size | None = Field(default=None, alias="memory")
    """Memory of a node that jobs may use, like `480GiB`."""


class SiteProfile(FrozenModel):
    """What every kind of site has."""

    name: Text = ""
    """The profile's name; the file's name where it is left out."""

    node: NodeFacts = Field(default_factory=NodeFacts)
    """What a node has."""

    env: dict[EnvName, Text] = Field(default={})
    """Environment variables of every job; the job's own win."""

    network_interface: Word | None = None
    """The interface for NCCL and gloo, like `ib0`; they choose one where it is left out."""

    templates_dir: FolderPath | None = None
    """A folder whose templates replace or extend the toolkit's; a relative path is below the
    profile's own folder. See [templates](../how-to/templates.md)."""


class LocalProfile(SiteProfile):
    """This machine: one torchrun per simulated node."""

    kind: Literal["local"] = "local"
    """What the profile is for."""

    runs_dir: FolderPath = "runs"
    """Where run directories are made; a relative path is below the current folder."""


# ---- Slurm


ShellLine = Annotated[
    Text, *matching(r"[^\x00-\x08\x0a-\x1f\x7f]*", "write one line of bash per item")
]

REMOTE_DIR = "~/torch-deploy-toolkit"


class Switches(FrozenModel):
    """How many leaf switches a job may be spread over, where the site has a topology plugin."""

    count: PositiveInt
    """The most switches; 1 keeps all nodes below one."""

    max_wait_s: Duration | None = Field(default=None, alias="max_wait")
    """How long the job waits for that before it takes any nodes; the site has a longest wait of
    its own (`max_switch_wait`, 5 minutes unless set)."""


class SlurmProfile(SiteProfile):
    """A Slurm cluster."""

    kind: Literal["slurm"] = "slurm"
    """What the profile is for."""

    runs_dir: FolderPath = "runs"
    """Where run directories are made, on a file system that all nodes share; a relative path is
    below the current folder, or below `remote_dir`."""

    via: Via | None = None
    """`ssh HOST`: Slurm's commands run there, on a login node, and the code is brought there. See
    [from a laptop](../how-to/laptop.md)."""

    remote_dir: HomePath = REMOTE_DIR
    """With `via`: the folder on the login node below which relative paths of this profile lie; all
    nodes share it."""

    code_limit_bytes: Size | None = Field(default=None, alias="code_limit")
    """With `via`: the most code that is brought there; 1GiB where it is left out."""

    partition: Word | None = None
    """The partition; the cluster's default where it is left out."""

    account: Word | None = None
    """The account that is charged."""

    qos: Word | None = None
    """The quality of service."""

    gpu_type: Word | None = None
    """The GPU's name in the cluster's gres.conf, like `h100`, where it must be given."""

    gpus_flag: Literal["gpus-per-node", "gres", "gpus-per-task"] = "gpus-per-node"
    """The option that requests GPUs: sites whose submit filter or older select plugin knows only
    `gres` need that. With `gpus-per-task` no `gpu_type` may be given: Slurm 22.05 then leaves
    CUDA_VISIBLE_DEVICES unset, and every job sees all GPUs of its node."""

    switches: Switches | None = None
    """How near to each other the nodes must be, since gradients cross every switch in between."""

    exclusive: Flag = False
    """Whether a job has its nodes to itself, where the site shares them; other jobs on a node
    take memory bandwidth and network. Kinds like `user` go under `sbatch`."""

    licenses: tuple[Word, ...] = ()
    """Licenses that every job takes, like `matlab:1` or `fs_scratch@db`; sites count file systems
    and software by them."""

    sbatch: SbatchOptions = Field(default={})
    """More options of sbatch for every job, by their long names; a job's own win."""

    runtime: Literal["bare", "pyxis", "apptainer", "podman"] = "bare"
    """How workers run: `bare` in the profile's modules and venv, the others in the job's `image`.
    See [containers](../how-to/containers.md)."""

    container_options: tuple[Text, ...] = ()
    """More options of srun (pyxis), `apptainer exec` or `podman run`, one per item."""

    mounts: tuple[Mount, ...] = ()
    """Folders that every job's container sees, beside the run directory and the job's own."""

    prolog: tuple[ShellLine, ...] = ()
    """Lines of bash that the site wants before the environment is made, as they are: unset what
    login shells leak, source what defines `module`. A line that fails stops the job."""

    epilog: tuple[ShellLine, ...] = ()
    """Lines of bash for the end of the script, however it ends: remove what the job left on local
    disks. They cannot change the exit status; after a node's loss nothing runs them."""

    kill_wait_s: Duration = Field(default=30, alias="kill_wait")
    """The cluster's KillWait: what scancel leaves a job between SIGTERM and SIGKILL."""

    modules: tuple[Word, ...] = ()
    """Environment modules to load, in order."""

    venv: FolderPath | None = None
    """The virtual environment to activate; a relative path is below the submit folder, or below
    `remote_dir`."""

    @property
    def host(self) -> str:
        """The login node as ssh knows it; empty without `via`."""
        return (self.via or "").partition(" ")[2]

    def below(self, path: str) -> str:
        """Return a path of this profile as the login node knows it.

        >>> SlurmProfile(via="ssh login1").below("runs"), SlurmProfile().below("runs")
        ('~/torch-deploy-toolkit/runs', 'runs')
        """
        beneath = self.via is not None and not path.startswith("/")
        return f"{self.remote_dir.rstrip('/')}/{path}" if beneath else path

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        options = given.get("sbatch")
        problems = [
            f"{key!r} stands under sbatch and as a key of its own; keep one"
            for key in ("partition", "account", "qos", "switches", "exclusive", "licenses")
            if isinstance(options, dict) and key in options and given.get(key)
        ]
        if not given.get("via") and given.get("remote_dir", REMOTE_DIR) != REMOTE_DIR:
            problems.append("remote_dir without via: it is for a login node that is reached by ssh")
        runtime = given.get("runtime") or "bare"
        problems += (
            f"{key} without containers; write runtime: pyxis, apptainer or podman"
            for key in ("container_options", "mounts")
            if runtime == "bare" and given.get(key)
        )
        if runtime != "bare" and given.get("venv"):
            problems.append(
                f"venv with runtime {runtime!r}: no container sees it; install into the image, or "
                "write runtime: bare"
            )
        if given.get("gpus_flag") == "gpus-per-task" and given.get("gpu_type"):
            problems.append(
                "gpus_flag 'gpus-per-task' with a gpu_type: Slurm 22.05 leaves "
                "CUDA_VISIBLE_DEVICES unset then; write gpus_flag: gres, or choose the nodes by "
                "sbatch: {constraint: …} and leave gpu_type out"
            )
        return problems


# ---- Kubernetes


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


Profile = LocalProfile | SlurmProfile | KubernetesProfile
