"""Settings of all profiles, the profile of this machine, and the reader of profile files."""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field

from toolkit import launcher_plugins
from toolkit.errors import Problem, ProfileError, did_you_mean
from toolkit.job import types
from toolkit.job.loader import refuse_newer, validate
from toolkit.job.spec import Notify
from toolkit.job.types import FrozenModel, Text
from toolkit.text import secret_scan
from toolkit.text.yaml_reader import KeyPath, read_file

if TYPE_CHECKING:
    from toolkit.profile import Profile


class NodeFacts(FrozenModel):
    """The size of one node, so that a job that cannot fit is refused before it is queued."""

    gpus: types.NaturalInt | None = None
    """GPUs of a node."""

    cpus: types.PositiveInt | None = None
    """CPUs of a node."""

    memory_bytes: types.Size | None = Field(default=None, alias="memory")
    """Memory of a node that jobs can use, like `480GiB`."""


class Price(FrozenModel):
    """The price of computing, for `toolkit goodput` and reports."""

    rank_hour: types.Amount
    """The price of one rank, with its GPU if it has one, for an hour."""

    currency: types.Word = "USD"
    """The currency to show."""


class SiteProfile(FrozenModel):
    """The settings of every kind of site."""

    version: types.FormatVersion = types.VERSION
    """The version of the [format](formats.md) in which the file is written."""

    name: Text = ""
    """The profile's name; by default the file's."""

    node: NodeFacts = Field(default_factory=NodeFacts.model_construct)
    """The size of a node."""

    env: dict[types.EnvName, Text] = Field(default={})
    """Environment variables of every job; the job's own take precedence."""

    network_interface: types.Word | None = None
    """The network interface for sockets of NCCL and gloo, like `ib0`; by default they choose."""

    price: Price | None = None
    """The price of computing at this site; `toolkit goodput` then also shows costs."""

    notify: Notify | None = None
    """Notifications of runs; a job's own take precedence."""

    templates_dir: types.FolderPath | None = None
    """A folder with templates that replace or extend the toolkit's; a relative path is below the
    profile's folder. See [templates](../how-to/templates.md)."""


class LocalProfile(SiteProfile):
    """This machine: one torchrun per simulated node."""

    kind: Literal["local"] = "local"
    """The kind of site."""

    runs_dir: types.FolderPath = "runs"
    """Where run directories are created; a relative path is below the current folder."""


# ---- How a profile is read

_MODELS = {
    "local": "toolkit.profile.base.LocalProfile",
    "slurm": "toolkit.profile.slurm.SlurmProfile",
    "kubernetes": "toolkit.profile.kubernetes.KubernetesProfile",
}
"""The model of each kind of profile, imported when it is first used."""

BUILT_IN = {"local": "local", "slurm": "slurm", "k8s": "kubernetes"}
"""The kinds of the profiles that need no file, by their names."""


def built_in(name: str) -> "Profile | None":
    """Return the profile of this name that needs no file; None if there is none."""
    return _model(BUILT_IN[name])(name=name) if name in BUILT_IN else None


def read_profile(path: Path) -> "Profile":
    """Return the profile in a file.

    Raises:
        ProfileError: every problem of the file.
    """
    document = read_file(path, ProfileError)
    refuse_newer(document, ProfileError)
    data: Any = document.data
    kind = data.get("kind") if isinstance(data, dict) else None
    model = model_of(kind)
    if isinstance(data, dict) and model is None:
        mistake = "the key 'kind' is missing" if kind is None else f"kind: {kind!r} is not a choice"
        place = document.place(("kind",))
        way_out = did_you_mean(kind, [*_MODELS, *launcher_plugins.kinds()])
        problem = Problem(place=place, message=f"{mistake}; {way_out}")
        raise ProfileError([problem, *document.problems])
    profile = validate(model or LocalProfile, document, ProfileError)
    if leaks := leaks_of(profile):
        raise ProfileError([Problem(place=document.place(at), message=why) for at, why in leaks])
    changes = {} if profile.name else {"name": path.stem}
    if profile.templates_dir is not None:
        changes["templates_dir"] = str(path.absolute().parent / profile.templates_dir)
    return profile.model_copy(update=changes)


def model_of(kind: object) -> "type[Profile] | None":
    """Return the model of a kind of profile, ours or another package's; None if it is unknown."""
    if not isinstance(kind, str):
        return None
    if kind in _MODELS:
        return _model(kind)
    if kind not in launcher_plugins.kinds():
        return None
    # The package that defines a kind also handles its profiles.
    return cast("type[Profile]", launcher_plugins.plugin(kind).profile)


def _model(kind: str) -> "type[Profile]":
    module, _, name = _MODELS[kind].rpartition(".")
    return cast("type[Profile]", getattr(importlib.import_module(module), name))


def leaks_of(profile: "Profile") -> list[tuple[KeyPath, str]]:
    """Return the keys of a profile that hold a secret, each with the problem."""
    shell = ("prolog", "epilog")  # lines of bash, each of several words
    plain = profile.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={*shell})
    leaks: list[tuple[KeyPath, str]] = list(secret_scan.leaks_of_document(plain))
    for key in shell if profile.kind == "slurm" else ():
        for index, line in enumerate(getattr(profile, key)):
            argv = re.sub("[\"']", "", line).replace(";", " ").split()
            reasons = secret_scan.leaks_of_words(f"{key}[{index}]", argv)
            leaks += (((key, index), reason) for _, reason in reasons)
    return leaks
