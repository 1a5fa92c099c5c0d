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
        raise ValueError(f"{value!r} is not expanded; write the whole path")
    return value


Flag = Annotated[bool, Strict()]
Word = Annotated[Text, *matching(r"\S+", "write one word, or leave the key out")]
FolderPath = Annotated[Text, AfterValidator(_no_home_sign)]


class NodeFacts(FrozenModel):
    """The size of one node, so that a job that cannot fit is refused before it is queued."""

    gpus: NaturalInt | None = None
    """GPUs of a node."""

    cpus: PositiveInt | None = None
    """CPUs of a node."""

    memory_bytes: Size | None = Field(default=None, alias="memory")
    """Memory of a node that jobs can use, like `480GiB`."""


class SiteProfile(FrozenModel):
    """The settings of every kind of site."""

    name: Text = ""
    """The profile's name; by default the file's."""

    node: NodeFacts = Field(default_factory=NodeFacts)
    """The size of a node."""

    env: dict[EnvName, Text] = Field(default={})
    """Environment variables of every job; the job's own take precedence."""

    network_interface: Word | None = None
    """The network interface for NCCL and gloo, like `ib0`; by default they choose."""

    templates_dir: FolderPath | None = None
    """A folder whose templates replace or extend the toolkit's; a relative path is below the
    profile's own folder. See [templates](../how-to/templates.md)."""


class LocalProfile(SiteProfile):
    """This machine: one torchrun per simulated node."""

    kind: Literal["local"] = "local"
    """The kind of site."""

    runs_dir: FolderPath = "runs"
    """Where run directories are created; a relative path is below the current folder."""


# ---- Slurm


ShellLine = Annotated[
    Text, *matching(r"[^\x00-\x08\x0a-\x1f\x7f]*", "write one line of bash per item")
]

REMOTE_DIR = "~/torch-deploy-toolkit"


class Switches(FrozenModel):
    """How many leaf switches a job may span, if the site has a topology plugin."""

    count: PositiveInt
    """The most switches; with 1, all nodes are below one switch."""

    max_wait_s: Duration | None = Field(default=None, alias="max_wait")
    """How long the job waits for such nodes before it takes any; the site limits this wait
    (`max_switch_wait`, 5 minutes by default)."""


class SlurmProfile(SiteProfile):
    """A Slurm cluster."""

    kind: Literal["slurm"] = "slurm"
    """The kind of site."""

    runs_dir: FolderPath = "runs"
    """Where run directories are created, on a file system that all nodes share; a relative path is
    below the current folder, or below `remote_dir`."""

    via: Via | None = None
    """`ssh HOST`: Slurm's commands run on this login node, and the code is copied there. See
    [from a laptop](../how-to/laptop.md)."""

    remote_dir: HomePath = REMOTE_DIR
    """With `via`: the folder on the login node that relative paths of this profile start from; all
    nodes share it."""

    code_limit_bytes: Size | None = Field(default=None, alias="code_limit")
    """With `via`: the most code that is copied there; 1GiB by default."""

    partition: Word | None = None
    """The partition; by default the cluster's."""

    account: Word | None = None
    """The account that is charged."""

    qos: Word | None = None
    """The quality of service."""

    gpu_type: Word | None = None
    """The GPU's name in the cluster's gres.conf, like `h100`, if the site requires it."""

    gpus_flag: Literal["gpus-per-node", "gres", "gpus-per-task"] = "gpus-per-node"
    """The option that requests GPUs: a site whose submit filter or older select plugin knows only
    `gres` needs that one. `gpus-per-task` excludes `gpu_type`: Slurm 22.05 would leave
    CUDA_VISIBLE_DEVICES unset, and every job would see all GPUs of its node."""

    switches: Switches | None = None
    """How close to each other the nodes must be, since gradients cross every switch in between."""

    exclusive: Flag = False
    """Whether a job has its nodes to itself on a site that shares them; other jobs on a node take
    memory bandwidth and network. Variants like `user` go under `sbatch`."""

    licenses: tuple[Word, ...] = ()
    """Licenses that every job takes, like `matlab:1` or `fs_scratch@db`; sites use them to count
    software and file systems."""

    sbatch: SbatchOptions = Field(default={})
    """More options of sbatch for every job, by their long names; a job's own take precedence."""

    runtime: Literal["bare", "pyxis", "apptainer", "podman"] = "bare"
    """How workers run: `bare` with the profile's modules and venv, the others in the job's `image`.
    See [containers](../how-to/containers.md)."""

    container_options: tuple[Text, ...] = ()
    """More options of srun (pyxis), `apptainer exec` or `podman run`, one per item."""

    mounts: tuple[Mount, ...] = ()
    """Folders to mount into every job's container, besides the run directory and the job's own."""

    prolog: tuple[ShellLine, ...] = ()
    """Lines of bash to run before the environment is set up, unchanged: unset what login shells
    leak, source what defines `module`. A line that fails stops the job."""

    epilog: tuple[ShellLine, ...] = ()
    """Lines of bash to run at the end of the script, however it ends: remove the job's files from
    local disks. They cannot change the exit status; after the loss of a node they do not run."""

    kill_wait_s: Duration = Field(default=30, alias="kill_wait")
    """The cluster's KillWait: the time between SIGTERM and SIGKILL after scancel."""

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
        """Return a path of this profile on the login node.

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
            problems.append("remote_dir without via: it is for a login node reached by ssh")
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
    """The kind of site."""

    workload: Workload = "PyTorchJob"
    """The kind of object: `PyTorchJob` (Kubeflow Training Operator), `TrainJob` (Kubeflow Trainer),
    `JobSet`, or `Job`, which needs no operator. See [Kubernetes](../how-to/kubernetes.md)."""

    namespace: SecretName = "default"
    """The namespace of the jobs."""

    context: Text | None = None
    """The context of the kubeconfig; by default the current one."""

    master: Flag = False
    """Whether a PyTorchJob has a Master besides its workers, as the tools of older clusters expect.
    The operator then gives the workers an init container that Pod Security `restricted` refuses."""

    training_runtime: SecretName = "torch-deploy-toolkit"
    """The TrainingRuntime that a TrainJob refers to; `k8s/base` holds it."""

    queue: SecretName | None = None
    """The LocalQueue of Kueue in which jobs wait."""

    queue_priority: SecretName | None = None
    """The WorkloadPriorityClass of Kueue."""

    gang_scheduler: Literal["volcano", "scheduler-plugins"] | None = None
    """The installed scheduler that starts either all pods of a job or none: Volcano, or the
    coscheduling of scheduler-plugins. Kueue admits whole jobs without one."""

    pod_security: Literal["restricted", "baseline", "privileged"] = "restricted"
    """The Pod Security level of the namespace; only `privileged` allows folders of the node."""

    run_as_user: NaturalInt = 1000
    """The user and group id of the container; 0, for images that need root, violates Pod Security
    `restricted`."""

    read_only_root: Flag = True
    """Whether the container's root file system is read-only; /tmp, /dev/shm and the run directory
    are always writable."""

    capabilities: tuple[Capability, ...] = ()
    """Capabilities that the container keeps, like `IPC_LOCK` for RDMA; they violate Pod Security
    `restricted` and `baseline`."""

    host_network: Flag = False
    """Whether pods share their node's network, as some RDMA set-ups need; it violates Pod Security
    `restricted` and `baseline`, and allows one pod per node, since all use the same port."""

    network_policy: Flag = True
    """Whether each run has a NetworkPolicy, for networks that enforce it: its pods reach only each
    other, DNS and the networks under `egress`, and nothing else reaches them. Without it the
    policies of the namespace apply, like those of `k8s/base`, where all training pods reach each
    other."""

    egress: tuple[Network, ...] = ()
    """More networks that the pods of a run may reach, like `0.0.0.0/0` for everything outside. The
    addresses at which clouds hand out credentials (169.254.0.0/16) are always excluded."""

    service: SecretName | None = None
    """The namespace's headless Service that gives the pods of a Job their names, as in `k8s/base`.
    Without it, each run creates its own."""

    gpu_resource: ResourceName = "nvidia.com/gpu"
    """The name of the GPU resource."""

    resources: dict[ResourceName, PositiveInt] = Field(default={})
    """More resources of device plugins for each pod, like `rdma/hca: 1`."""

    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    """Labels that a node must have."""

    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that the pods tolerate."""

    one_pod_per_node: Flag = False
    """Whether each pod of a run gets a node of its own; a pod that uses all GPUs of a node has one
    anyway."""

    topology: Topology | None = None
    """How close to each other the pods must be; if there is a queue, Kueue arranges it."""

    priority_class: SecretName | None = None
    """The PriorityClass of the pods."""

    service_account: SecretName | None = None
    """The ServiceAccount of the pods; its token is not mounted."""

    image_pull_secrets: tuple[SecretName, ...] = ()
    """Secrets that hold the registry's credentials."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""

    runs_dir: AbsolutePath = "/runs"
    """The folder of the run directories in the container."""

    runs_claim: SecretName | None = None
    """The PersistentVolumeClaim that holds the run directories; all nodes must be able to mount it
    at the same time. Without one, run directories are lost with their pods."""

    mounts: tuple[Mount, ...] = ()
    """Volumes to mount into the pods of every job, besides the job's own."""

    secret: SecretName | None = None
    """The Kubernetes Secret that holds the secrets for which a job gives no place."""

    ttl_s: Duration | None = Field(default=None, alias="ttl")
    """How long a run that has ended stays in the cluster, with its logs; by default for ever."""

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
            problems.append("queue_priority without a queue: it orders the workloads of Kueue")
        return problems


Profile = LocalProfile | SlurmProfile | KubernetesProfile
