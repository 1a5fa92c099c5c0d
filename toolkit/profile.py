"""Profiles: the facts of a site, one file each, so that a job file need not know them."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from toolkit.documents import read_document, read_text
from toolkit.errors import InputError, Problem, ProfileError
from toolkit.fields import (
    AbsolutePath,
    Duration,
    EnvName,
    NaturalInt,
    PositiveInt,
    SecretName,
    Size,
    matching,
)
from toolkit.validation import FrozenModel, Text, nearest, validate

__all__ = [
    "KubernetesProfile",
    "LocalProfile",
    "NodeFacts",
    "Profile",
    "SlurmProfile",
    "load_profile",
    "profile_names",
]


def _no_home_sign(value: str) -> str:
    if not value or value.startswith("~"):
        raise ValueError(f"{value!r} is not expanded; write the path out")
    return value


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


class LocalProfile(_SiteProfile):
    """This machine: one torchrun per simulated node."""

    kind: Literal["local"] = "local"
    """What the profile is for."""

    runs_dir: FolderPath = "runs"
    """Where run directories are made; a relative path is below the current folder."""


class SlurmProfile(_SiteProfile):
    """A Slurm cluster."""

    kind: Literal["slurm"] = "slurm"
    """What the profile is for."""

    runs_dir: FolderPath = "runs"
    """Where run directories are made, on a file system that all nodes share."""

    partition: Word | None = None
    """The partition; the cluster's default where it is left out."""

    account: Word | None = None
    """The account that is charged."""

    qos: Word | None = None
    """The quality of service."""

    gpu_type: Word | None = None
    """The GPU's name in the cluster's gres.conf, like `h100`, where it must be given."""

    kill_wait_s: Duration = Field(default=30, alias="kill_wait")
    """The cluster's KillWait: what scancel leaves a job between SIGTERM and SIGKILL."""

    modules: tuple[Word, ...] = ()
    """Environment modules to load, in order."""

    venv: FolderPath | None = None
    """The virtual environment to activate; a relative path is below the submit folder."""


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


def _folders(folder: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where profiles may lie, first come first."""
    for above in (folder, *folder.parents):
        places = [p for p in (above / "slurm/profiles", above / "k8s/profiles") if p.is_dir()]
        if places:
            yield from places
            break
    home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    yield Path(home) / "torch-deploy-toolkit" / "profiles"


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
    return profile if profile.name else profile.model_copy(update={"name": path.stem})
