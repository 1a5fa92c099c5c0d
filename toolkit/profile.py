"""Profiles: the facts of a site, one file each, so that a job file need not know them."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict

from toolkit import secrecy
from toolkit.documents import KeyPath, read_document, read_text
from toolkit.errors import InputError, Problem, ProfileError
from toolkit.fields import (
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
from toolkit.sbatch_options import SbatchOptions
from toolkit.spec import Mount
from toolkit.validation import FrozenModel, Text, nearest, validate

__all__ = [
    "KubernetesProfile",
    "LocalProfile",
    "NodeFacts",
    "Profile",
    "SlurmProfile",
    "Switches",
    "configuration_folder",
    "default_profile",
    "leaks_of",
    "load_profile",
    "profile_names",
]


def _no_home_sign(value: str) -> str:
    if not value or value.startswith("~"):
        raise ValueError(f"{value!r} is not expanded; write the path out")
    return value


Word = Annotated[Text, *matching(r"\S+", "write one word, or leave the key out")]
FolderPath = Annotated[Text, AfterValidator(_no_home_sign)]
ShellLine = Annotated[
    Text, *matching(r"[^\x00-\x08\x0a-\x1f\x7f]*", "write one line of bash per item")
]

REMOTE_DIR = "~/torch-deploy-toolkit"


class NodeFacts(FrozenModel):
    """What one node of the site has, so that a job that cannot fit is refused before it queues."""

    gpus: NaturalInt | None = None
    """GPUs of a node."""

    cpus: PositiveInt | None = None
    """CPUs of a node."""

    memory_bytes: Size | None = Field(default=None, alias="memory")
    """Memory of a node that jobs may use, like `480GiB`."""


class _SiteProfile(FrozenModel):
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


class LocalProfile(_SiteProfile):
    """This machine: one torchrun per simulated node."""

    kind: Literal["local"] = "local"
    """What the profile is for."""

    runs_dir: FolderPath = "runs"
    """Where run directories are made; a relative path is below the current folder."""


class Switches(FrozenModel):
    """How many leaf switches a job may be spread over, where the site has a topology plugin."""

    count: PositiveInt
    """The most switches; 1 keeps all nodes below one."""

    max_wait_s: Duration | None = Field(default=None, alias="max_wait")
    """How long the job waits for that before it takes any nodes; the site has a longest wait of
    its own (`max_switch_wait`, 5 minutes unless set)."""


class SlurmProfile(_SiteProfile):
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
    """How GPUs are asked for: sites whose submit filter or older select plugin knows only `gres`
    need that. With `gpus-per-task` no `gpu_type` may be given: Slurm 22.05 then leaves
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
        found = [
            f"{key!r} stands under sbatch and as a key of its own; keep one"
            for key in ("partition", "account", "qos", "switches", "exclusive", "licenses")
            if isinstance(options, dict) and key in options and given.get(key)
        ]
        if not given.get("via") and given.get("remote_dir", REMOTE_DIR) != REMOTE_DIR:
            found.append("remote_dir without via: it is for a login node that is reached by ssh")
        runtime = given.get("runtime") or "bare"
        found += (
            f"{key} without containers; write runtime: pyxis, apptainer or podman"
            for key in ("container_options", "mounts")
            if runtime == "bare" and given.get(key)
        )
        if runtime != "bare" and given.get("venv"):
            found.append(
                f"venv with runtime {runtime!r}: no container sees it; install into the image, or "
                "write runtime: bare"
            )
        if given.get("gpus_flag") == "gpus-per-task" and given.get("gpu_type"):
            found.append(
                "gpus_flag 'gpus-per-task' with a gpu_type: Slurm 22.05 leaves "
                "CUDA_VISIBLE_DEVICES unset then; write gpus_flag: gres, or choose the nodes by "
                "sbatch: {constraint: …} and leave gpu_type out"
            )
        return found


class KubernetesProfile(_SiteProfile):
    """A namespace of a Kubernetes cluster with the Kubeflow Training Operator."""

    kind: Literal["kubernetes"] = "kubernetes"
    """What the profile is for."""

    namespace: SecretName = "default"
    """The namespace of the jobs."""

    context: Text | None = None
    """The context of the kubeconfig; the current one where it is left out."""

    pod_security: Literal["restricted", "baseline", "privileged"] = "restricted"
    """The Pod Security level of the namespace; only `privileged` allows folders of the node."""

    run_as_user: PositiveInt = 1000
    """The user and group id that the container runs as."""

    gpu_resource: Word = "nvidia.com/gpu"
    """The name of the GPU resource."""

    node_selector: dict[Text, Text] = Field(default={})
    """Labels that a node must have."""

    runs_dir: AbsolutePath = "/runs"
    """Where the container sees the run directories."""

    runs_claim: SecretName | None = None
    """The PersistentVolumeClaim that holds them; without one they are lost with the pod."""

    secret: SecretName | None = None
    """The Kubernetes Secret for secrets that a job names without saying where they are."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""


Profile = LocalProfile | SlurmProfile | KubernetesProfile

_KINDS: dict[str, type[LocalProfile] | type[SlurmProfile] | type[KubernetesProfile]] = {
    "local": LocalProfile,
    "slurm": SlurmProfile,
    "kubernetes": KubernetesProfile,
}
_BUILT_IN: dict[str, type[LocalProfile] | type[SlurmProfile] | type[KubernetesProfile]] = {
    "local": LocalProfile,
    "slurm": SlurmProfile,
    "k8s": KubernetesProfile,
}


def load_profile(
    name: str, *, folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Profile:
    """Return a profile by its name or by the path of its file.

    A name is looked up in `slurm/profiles` and `k8s/profiles` of `folder` or the nearest folder
    above it that has them, then in the user's configuration folder, then among the built-in ones.

    Raises:
        ProfileError: no such profile, or every problem of its file.
    """
    folder = folder or Path.cwd()
    if "/" in name or name.endswith((".yaml", ".yml")):
        return _read(Path(name))
    for place in _folders(folder, environ):
        for path in place.glob("*.yaml"):  # a name need not be one that a file can have
            if path.stem == name:
                return _read(path)
    if name in _BUILT_IN:
        return _BUILT_IN[name](name=name)
    names = profile_names(folder=folder, environ=environ)
    searched = ", ".join(map(str, _folders(folder, environ)))
    raise ProfileError(
        f"no profile {name!r}; {nearest(name, names)} (searched {searched}; a path works too)"
    )


def profile_names(
    *, folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the names of all profiles that `load_profile` finds, sorted."""
    folder = folder or Path.cwd()
    files = (p for place in _folders(folder, environ) for p in place.glob("*.yaml"))
    return sorted({path.stem for path in files} | set(_BUILT_IN))


def default_profile(*, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the file of the profile that is used where none is named; None where there is none.

    The file `default` in the user's configuration folder holds its path, below that folder or
    absolute; `toolkit init` writes it.
    """
    folder = configuration_folder(environ)
    try:
        named = (folder / "default").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{folder / 'default'} cannot be read: {error}") from None
    return str(folder / named)


def configuration_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's configuration folder of the toolkit."""
    home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    return Path(home) / "torch-deploy-toolkit"


def _folders(folder: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where profiles may lie, first come first."""
    for above in (folder, *folder.parents):
        places = [p for p in (above / "slurm/profiles", above / "k8s/profiles") if p.is_dir()]
        if places:
            yield from places
            break
    yield configuration_folder(environ) / "profiles"


def _read(path: Path) -> Profile:
    try:
        document = read_document(read_text(path), str(path))
    except InputError as error:
        raise ProfileError(error.problems) from None
    data: Any = document.data
    kind = data.get("kind") if isinstance(data, dict) else None
    if isinstance(data, dict) and (not isinstance(kind, str) or kind not in _KINDS):
        said = "the key 'kind' is missing" if kind is None else f"kind: {kind!r} is not a choice"
        place = document.place(("kind",))
        problem = Problem(place=place, message=f"{said}; {nearest(kind, _KINDS)}")
        raise ProfileError([problem, *document.problems])
    profile = validate(_KINDS.get(str(kind), LocalProfile), document, ProfileError)
    if leaks := leaks_of(profile):
        raise ProfileError([Problem(place=document.place(at), message=why) for at, why in leaks])
    found = {} if profile.name else {"name": path.stem}
    if profile.templates_dir is not None:
        found["templates_dir"] = str(path.absolute().parent / profile.templates_dir)
    return profile.model_copy(update=found)


def leaks_of(profile: Profile) -> list[tuple[KeyPath, str]]:
    """Return where a profile holds a secret, and what to do about it."""
    found: list[tuple[KeyPath, str]] = []
    for name, why in secrecy.leaks_of_mapping("env", profile.env):
        found.append((("env", name), why))
    if isinstance(profile, SlurmProfile):
        for name, why in secrecy.leaks_of_mapping("sbatch", profile.sbatch):
            found.append((("sbatch", name), why))
        options = profile.container_options
        for index, why in secrecy.leaks_of_words("container_options", options):
            found.append((("container_options", index), why))
        for key, lines in (("prolog", profile.prolog), ("epilog", profile.epilog)):
            for index, line in enumerate(lines):
                words = re.sub("[\"']", "", line).replace(";", " ").split()
                whys = [why for _, why in secrecy.leaks_of_words(f"{key}[{index}]", words)]
                found += (((key, index), why) for why in whys)
    return found
