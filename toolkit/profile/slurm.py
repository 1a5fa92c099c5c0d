"""The model of a Slurm cluster."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from toolkit.job import types
from toolkit.job.sbatch_options import SbatchOptions
from toolkit.job.spec import Mount
from toolkit.job.types import FrozenModel, Text, matching
from toolkit.profile.base import SiteProfile

REMOTE_DIR = "~/torch-deploy-toolkit"


class Switches(FrozenModel):
    """How many leaf switches a job may span, if the site has a tree topology (topology/tree)."""

    count: types.PositiveInt
    """The most switches; with 1, all nodes are below one switch."""

    max_wait_s: types.Duration | None = Field(default=None, alias="max_wait")
    """How long the job waits for such nodes before it takes any; the site limits this wait
    (`max_switch_wait`, 5 minutes by default)."""


class SlurmProfile(SiteProfile):
    """A Slurm cluster."""

    kind: Literal["slurm"] = "slurm"
    """The kind of site."""

    runs_dir: types.FolderPath = "runs"
    """Where run directories are created, on a file system that all nodes share; a relative path is
    below the current folder, or below `remote_dir`."""

    via: types.Via | None = None
    """`ssh HOST`: Slurm's commands run on this login node, and the code is copied there. See
    [from a laptop](../how-to/laptop.md)."""

    remote_dir: types.HomePath = REMOTE_DIR
    """With `via`: the folder on the login node below which a relative `runs_dir`, `venv` or pixi
    project lies; all nodes share it."""

    code_limit_bytes: types.Size | None = Field(default=None, alias="code_limit")
    """With `via`: the most code that is copied there; 1GiB by default."""

    partition: types.Word | None = None
    """The partition; by default the cluster's."""

    account: types.Word | None = None
    """The account that is charged."""

    qos: types.Word | None = None
    """The quality of service."""

    gpu_type: types.Word | None = None
    """The GPU's name in the cluster's gres.conf, like `h100`, if the site requires it."""

    gpus_flag: Literal["gpus-per-node", "gres", "gpus-per-task"] = "gpus-per-node"
    """The option that requests GPUs: use `gres` if the site's submit filter or older select plugin
    knows only that one. `gpus-per-task` excludes `gpu_type`: Slurm 22.05 would leave
    CUDA_VISIBLE_DEVICES unset, and every job would see all GPUs of its node, unless the site
    confines devices by cgroup."""

    memory_flag: Literal["mem", "mem-per-cpu"] = "mem"
    """The option that requests memory: use `mem-per-cpu` if the site's submit filter refuses
    `--mem`. The job's memory per node is then divided by its CPUs, and rounded up."""

    switches: Switches | None = None
    """How close to each other the nodes must be: gradients cross the switches between them."""

    exclusive: types.Flag = False
    """Whether a job has its nodes to itself on a site that shares them; other jobs on a node take
    memory bandwidth and network. Variants like `user` go under `sbatch`."""

    licenses: tuple[types.Word, ...] = ()
    """Licenses of each job, like `matlab:1` or `fs_scratch@db`, unless the job's `sbatch` sets
    `licenses`; sites use them to count software and file systems."""

    slurm_version: (
        Annotated[Text, *matching(r"[0-9]{2}\.[0-9]{2}(\.[0-9]+)?", 'write it like "23.02"')] | None
    ) = None
    """The site's version of Slurm, in quotes, like `"23.02"`, for `toolkit check` of batch
    scripts: some rules apply to single versions. `--server` asks the site instead."""

    plugin_options: tuple[types.Word, ...] = ()
    """Options of sbatch from the site's plug-ins (SPANK), by their long names, like `environment`:
    `toolkit check` then accepts them in batch scripts."""

    sbatch: SbatchOptions = Field(default={})
    """More options of sbatch for every job, by their long names; a job's own take precedence."""

    runtime: Literal["bare", "pyxis", "apptainer", "podman"] = "bare"
    """How workers run: `bare` with `venv` or `environment`, the others in the job's `image`.
    See [containers](../how-to/containers.md)."""

    container_options: tuple[Text, ...] = ()
    """More options of srun (pyxis), `apptainer exec` or `podman run`, one per item."""

    mounts: tuple[Mount, ...] = ()
    """Folders to mount into every job's container, besides the run directory and the job's own."""

    prolog: tuple[types.ShellLine, ...] = ()
    """Lines of bash to run before the environment is set up, unchanged: unset what login shells
    leak, source what defines `module`. A line that fails stops the job."""

    epilog: tuple[types.ShellLine, ...] = ()
    """Lines of bash to run on the first node when the script ends, with success or a failure:
    remove the job's files from the local disk there. They cannot change the exit status. They do
    not run if the node is lost, if a line before torchrun fails, or if Slurm kills the script."""

    kill_wait_s: types.Duration = Field(
        default=30, alias="kill_wait", json_schema_extra={"default": "30s"}
    )
    """The cluster's KillWait: the time between SIGTERM and SIGKILL after scancel."""

    modules: tuple[types.Word, ...] = ()
    """Environment modules to load, in order."""

    venv: types.FolderPath | None = None
    """The virtual environment to activate; a relative path is below the submit folder, or below
    `remote_dir`."""

    environment: types.Environment | None = None
    """Instead of `venv`, the environment of another manager to activate: `conda:NAME`,
    `conda:/PATH`, the same with `mamba` and `micromamba`, `pixi:/PATH` or `pixi:/PATH#NAME`. The
    manager must be in PATH on the first node, by `modules`, `prolog` or the shell that submits."""

    supervisor: types.SupervisorOrNone = "carried"
    """Where scripts and nodes find the supervisor, which starts and watches torchrun: `carried` in
    the script, `installed` with the toolkit in the venv or image, or the path of its file on a
    shared file system. It needs Python 3.6, in containers 3.8, with the module bz2. With `none`,
    srun starts torchrun, and nothing restarts a job whose ranks have failed (Slurm itself requeues
    after the loss of a node, with `retries.requeue`), finds hanging ranks, or writes why a run has
    ended."""

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
            f"{key!r} is set both under sbatch and as a profile key: keep one"
            for key in ("partition", "account", "qos", "switches", "exclusive", "licenses")
            if isinstance(options, dict) and key in options and given.get(key)
        ]
        if not given.get("via") and given.get("remote_dir", REMOTE_DIR) != REMOTE_DIR:
            problems.append("remote_dir needs via: it is for a login node reached by ssh")
        runtime = given.get("runtime") or "bare"
        problems += (
            f"{key} without containers; write runtime: pyxis, apptainer or podman"
            for key in ("container_options", "mounts")
            if runtime == "bare" and given.get(key)
        )
        problems += (
            f"{key} with runtime {runtime!r}: no container sees it; install into the image, or "
            "write runtime: bare"
            for key in ("venv", "environment")
            if runtime != "bare" and given.get(key)
        )
        if given.get("venv") and given.get("environment"):
            problems.append("venv and environment: a job has one of them; leave the other out")
        if given.get("gpus_flag") == "gpus-per-task" and given.get("gpu_type"):
            problems.append(
                "gpus_flag 'gpus-per-task' with a gpu_type: Slurm 22.05 leaves "
                "CUDA_VISIBLE_DEVICES unset then; write gpus_flag: gres, or choose the nodes by "
                "sbatch: {constraint: …} and leave gpu_type out"
            )
        return problems
