"""Profiles: the facts of a site, one file each, so that a job file need not know them."""

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
from toolkit.profile.models import (
    KubernetesProfile,
    LocalProfile,
    NodeFacts,
    Profile,
    SlurmProfile,
    Switches,
)

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
