"""Profiles: the facts of a site, one file each, so that a job file need not know them.

The models are imported when they are first used, since a command mostly needs one of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from toolkit.profile.finder import (
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
    from toolkit.profile.base import LocalProfile, NodeFacts
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

_HOME = {
    "KubernetesProfile": "kubernetes",
    "LocalProfile": "base",
    "NodeFacts": "base",
    "SlurmProfile": "slurm",
    "Switches": "slurm",
}


def __getattr__(name: str) -> Any:
    if name == "Profile":
        local, slurm, kubernetes = map(model_of, ("local", "slurm", "kubernetes"))
        return local | slurm | kubernetes  # type: ignore[operator]  # of classes
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit.profile.{_HOME[name]}"), name)
