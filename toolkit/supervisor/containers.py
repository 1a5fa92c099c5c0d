"""The command that starts torchrun in a container of apptainer or podman.

The options are those of `apptainer exec --help` and podman-run(1). Command lines contain only
variable values from the job file, because every user of a node can read command lines.
"""

import os
import re
import subprocess
from typing import Dict, List, Mapping, NamedTuple, Sequence

from .evidence.files import read

APPTAINERS = ("apptainer", "singularity")
"""singularity, the older one, has the same options, but other variable names."""

NOT_STARTED = {"apptainer": 255, "podman": 125}
"""The exit status of a runtime that could not start the container."""

LABEL = "torch-deploy-toolkit"
"""Label of podman containers; the value is the boot in which the container was started."""


class Container(NamedTuple):
    """Container settings of a job and its site."""

    runtime: str
    """`apptainer` or `podman`."""
    image: str
    name: str
    """The job name; podman names the container after it."""
    mounts: Sequence[str] = ()
    """`SOURCE:TARGET` or `SOURCE:TARGET:ro`."""
    workdir: str = ""
    gpus: bool = False
    """Whether the container sees the step's GPUs."""
    shm: str = "0"
    """The size of podman's /dev/shm; 0: no separate limit."""
    options: Sequence[str] = ()
    """Options of the runtime, from the site profile."""
    secrets: Sequence[str] = ()
    """Variables with secret values."""


class Node(NamedTuple):
    """The node that runs a container."""

    environ: Mapping[str, str]
    folders: Sequence[str]
    """Folders mounted at the same path in the container; the run directory is first."""
    boot: str
    """The id of the node's current boot."""
    user: str
    """UID:GID."""


def names_for(container: Container, environ: Mapping[str, str]) -> List[str]:
    """Return the names of the variables that the container inherits.

    podman containers number their GPUs from 0; apptainer containers see the node's numbers.
    """
    kinds = "SLURM|PET_|NCCL_|TRAIN_"
    if container.runtime == "apptainer":
        kinds += "|CUDA_VISIBLE_DEVICES$"
    names = (name for name in environ if re.match(kinds, name))
    return sorted({*names, *container.secrets})


# ---- apptainer


def apptainer_argv(program: str, container: Container, node: Node) -> List[str]:
    """Return the command that runs another command in a container."""
    folders = (f"{folder}:{folder}" for folder in node.folders)
    return [
        *(program, "exec", "--cleanenv", "--no-home"),
        *(["--nv"] if container.gpus else []),
        *(word for mount in [*container.mounts, *folders] for word in ("--bind", mount)),
        *(["--pwd", container.workdir] if container.workdir else []),
        *container.options,
        container.image,
    ]


def apptainer_environ(program: str, container: Container, node: Node) -> Dict[str, str]:
    """Return the variables from which apptainer sets the container's variables."""
    prefix = os.path.basename(program).upper() + "ENV_"
    names = names_for(container, node.environ)
    return {prefix + name: node.environ[name] for name in names if name in node.environ}


# ---- podman


def podman_argv(container: Container, node: Node, pid_file: str) -> List[str]:
    """Return the command that runs another command in a container.

    The container stays in the job's cgroup, so that Slurm limits it. `pid_file`: where podman
    writes the process id of the container's first ancestor.
    """
    environ, names = node.environ, names_for(container, node.environ)
    gpus = filter(None, environ.get("SLURM_STEP_GPUS", "").split(",")) if container.gpus else ()
    folders = (f"{folder}:{folder}" for folder in node.folders)
    return [
        *("podman", "run", "--rm", "--replace"),
        *("--name", f"{container.name}-{environ['SLURM_JOB_ID']}-{environ['SLURM_NODEID']}"),
        *("--label", f"{LABEL}={node.boot}", "--conmon-pidfile", pid_file),
        *("--interactive", "--log-driver=none", "--cgroups=disabled", "--network=host"),
        *(f"--shm-size={container.shm}", "--ulimit=host", "--security-opt=label=disable"),
        *("--user", node.user),
        *(word for name in names for word in ("--env", name)),
        *(word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}")),
        *([] if node.user.startswith("0:") else ["--userns=keep-id"]),
        *(word for mount in [*container.mounts, *folders] for word in ("--volume", mount)),
        *(["--workdir", container.workdir] if container.workdir else []),
        *container.options,
        container.image,
    ]


def boot_id() -> str:
    """Return the id of this boot: with the same kernel, a node may have had another init before.

    Unreadable parts are left out, for example if /proc hides the processes of other users.
    """
    kernel = read("/proc/sys/kernel/random/boot_id").strip()
    fields = read("/proc/1/stat").rpartition(")")[2].split()
    return f"{kernel}-{fields[19] if len(fields) > 19 else ''}"  # proc(5), field 22


def remove_containers_of_earlier_boots(boot: str) -> None:
    """Remove our containers from before a power failure: none of them can be running.

    Raises:
        OSError: podman is missing.
    """
    listed = [_containers(label) for label in (LABEL, f"{LABEL}={boot}")]
    if any(done.returncode for done in listed):
        return  # an incomplete list could lack running containers
    every, of_this_boot = (set(done.stdout.split()) for done in listed)
    left = sorted(every - of_this_boot)
    if left:
        argv = ["podman", "rm", "--force", *left]
        subprocess.run(argv, stdout=subprocess.DEVNULL, env=dict(os.environ), check=False)


def _containers(label: str) -> "subprocess.CompletedProcess[str]":
    argv = ["podman", "ps", "--all", "--quiet", "--filter", f"label={label}"]
    environ = dict(os.environ)
    return subprocess.run(argv, stdout=subprocess.PIPE, env=environ, encoding="utf-8", check=False)


def is_nowhere(image: str) -> bool:
    """Whether an image exists only in podman's local storage, cannot be pulled, and is missing.

    Raises:
        OSError: podman is missing.
    """
    if not image.startswith("localhost/"):
        return False
    # 1 by podman-image-exists(1); a killed podman has another exit status.
    argv = ["podman", "image", "exists", image]
    return subprocess.run(argv, env=dict(os.environ), check=False).returncode == 1
