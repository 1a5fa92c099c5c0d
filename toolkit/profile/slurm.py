"""The facts of a Slurm cluster."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from toolkit.job.loader import FrozenModel, Text
from toolkit.job.sbatch_options import SbatchOptions
from toolkit.job.spec import Mount
from toolkit.job.types import Duration, HomePath, PositiveInt, Size, Via, matching
from toolkit.profile.base import FolderPath, SiteProfile, Word

__all__ = ["SlurmProfile", "Switches"]

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

    exclusive: Annotated[bool, Strict()] = False
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
