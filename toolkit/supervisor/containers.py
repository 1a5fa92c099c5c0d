"""The command that starts torchrun in a container of apptainer or podman.

The options are those of `apptainer exec --help` and podman-run(1). Values of variables are on no
command line but those of the job file: everybody on a node can read command lines.
"""

import os
import re
import subprocess
from typing import Dict, List, Mapping, NamedTuple, Sequence

from .evidence.files import read

APPTAINERS = ("apptainer", "singularity")
"""The older one has the same options, and variables of another name."""

NOT_STARTED = {"apptainer": 255, "podman": 125}
"""The exit status by which a runtime says that it could not start the container."""

LABEL = "torch-deploy-toolkit"
"""Of podman's containers; the value is the boot in which one was started."""


class Container(NamedTuple):
    """What a job and its site say about containers."""

    runtime: str
    """`apptainer` or `podman`."""
    image: str
    name: str
    """The job's, with which podman names the container."""
    mounts: Sequence[str] = ()
    """`SOURCE:TARGET` or `SOURCE:TARGET:ro`."""
    workdir: str = ""
    gpus: bool = False
    """Whether the container sees the step's GPUs."""
    shm: str = "0"
    """The size of podman's /dev/shm; 0 is no limit of its own."""
    options: Sequence[str] = ()
    """Of the runtime, from the site's profile."""
    secrets: Sequence[str] = ()
    """Variables with secret values."""


class Node(NamedTuple):
    """Where a container runs."""

    environ: Mapping[str, str]
    folders: Sequence[str]
    """What the container sees under the same path: the run directory first."""
    boot: str
    """Which boot of the node this is."""
    user: str
    """UID:GID."""


def names_for(container: Container, environ: Mapping[str, str]) -> List[str]:
    """Return the variables that the container gets by their names.

    podman's containers count their own GPUs from 0; apptainer's see those of the node.
    """
    kinds = "SLURM|PET_|NCCL_|TRAIN_"
    if container.runtime == "apptainer":
        kinds += "|CUDA_VISIBLE_DEVICES$"
    names = (name for name in environ if re.match(kinds, name))
    return sorted({*names, *container.secrets})


# ---- apptainer


def apptainer_argv(program: str, container: Container, node: Node) -> List[str]:
    """Return the command that stands before the container's own."""
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
    """Return the variables by which apptainer sets those of a container."""
    prefix = os.path.basename(program).upper() + "ENV_"
    names = names_for(container, node.environ)
    return {prefix + name: node.environ[name] for name in names if name in node.environ}


# ---- podman


def podman_argv(container: Container, node: Node, pid_file: str) -> List[str]:
    """Return the command that stands before the container's own.

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
    """Return which boot this is: a node of the same kernel may have had another init before.

    What cannot be read, as where /proc hides processes of others, is left out.
    """
    kernel = read("/proc/sys/kernel/random/boot_id").strip()
    fields = read("/proc/1/stat").rpartition(")")[2].split()
    return f"{kernel}-{fields[19] if len(fields) > 19 else ''}"  # proc(5), field 22


def remove_containers_of_earlier_boots(boot: str) -> None:
    """Remove our containers that a power cut has left: none of them can be running.

    Raises:
        OSError: there is no podman.
    """
    listed = [_containers(label) for label in (LABEL, f"{LABEL}={boot}")]
    if any(done.returncode for done in listed):
        return  # a list that was cut would leave out containers that run
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
    """Whether an image is only podman's own, so that nothing can be pulled, and is missing.

    Raises:
        OSError: there is no podman.
    """
    if not image.startswith("localhost/"):
        return False
    # 1 by podman-image-exists(1); a podman that is killed ends otherwise.
    argv = ["podman", "image", "exists", image]
    return subprocess.run(argv, env=dict(os.environ), check=False).returncode == 1
