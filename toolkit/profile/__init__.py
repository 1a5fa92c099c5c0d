"""Profiles: the facts of a site, one file each, so that a job file need not know them.

The models of Slurm and Kubernetes are imported when they are first used, since a command mostly
needs one of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from toolkit.profile.base import (
    LocalProfile,
    NodeFacts,
    as_profile,
    configuration_folder,
    default_profile,
    leaks_of,
    load_profile,
    model_of,
    profile_names,
    require_default_profile,
)

if TYPE_CHECKING:
    from toolkit.profile.kubernetes import KubernetesProfile
    from toolkit.profile.slurm import SlurmProfile, Switches

    Profile = LocalProfile | SlurmProfile | KubernetesProfile

__all__ = [
    "KubernetesProfile",
    "LocalProfile",
    "NodeFacts",
    "Profile",
    "SlurmProfile",
    "Switches",
    "as_profile",
    "configuration_folder",
    "default_profile",
    "leaks_of",
    "load_profile",
    "model_of",
    "profile_names",
    "require_default_profile",
]

_HOMES = {"KubernetesProfile": "kubernetes", "SlurmProfile": "slurm", "Switches": "slurm"}


def __getattr__(name: str) -> Any:
    if name == "Profile":
        slurm, kubernetes = map(model_of, ("slurm", "kubernetes"))
        return LocalProfile | slurm | kubernetes
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit.profile.{_HOMES[name]}"), name)
