"""Profiles: the facts of a site, one file each, so that a job file need not know them.

The models of Slurm and Kubernetes are imported when they are first used, since a command mostly
needs one of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from toolkit.profile.base import LocalProfile as LocalProfile
from toolkit.profile.base import NodeFacts as NodeFacts
from toolkit.profile.base import leaks_of as leaks_of
from toolkit.profile.base import model_of as model_of
from toolkit.profile.finder import as_profile as as_profile
from toolkit.profile.finder import configuration_folder as configuration_folder
from toolkit.profile.finder import default_profile as default_profile
from toolkit.profile.finder import load_profile as load_profile
from toolkit.profile.finder import origin_notes as origin_notes
from toolkit.profile.finder import profile_names as profile_names
from toolkit.profile.finder import require_default_profile as require_default_profile

if TYPE_CHECKING:
    from toolkit.profile.kubernetes import KubernetesProfile as KubernetesProfile
    from toolkit.profile.slurm import SlurmProfile as SlurmProfile
    from toolkit.profile.slurm import Switches as Switches

    Profile = LocalProfile | SlurmProfile | KubernetesProfile

_HOMES = {"KubernetesProfile": "kubernetes", "SlurmProfile": "slurm", "Switches": "slurm"}


def __getattr__(name: str) -> Any:
    if name == "Profile":
        slurm, kubernetes = map(model_of, ("slurm", "kubernetes"))
        return LocalProfile | slurm | kubernetes
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit.profile.{_HOMES[name]}"), name)
