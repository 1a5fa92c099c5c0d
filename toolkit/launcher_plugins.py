"""Launchers of other packages, found by the entry point group `torch_deploy_toolkit.launchers`.

The name of the entry point is the `kind` of a profile; its object is a `LauncherPlugin`:

    [project.entry-points."torch_deploy_toolkit.launchers"]
    pbs = "toolkit_pbs:PBS"

An entry point is loaded only when a profile of its kind is read.
"""

import functools
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import ProfileError

if TYPE_CHECKING:
    from toolkit.job.spec import JobSpec
    from toolkit.planning.plans import LaunchPlan
    from toolkit.profile.base import SiteProfile
    from toolkit.runs.run import Launcher

GROUP = "torch_deploy_toolkit.launchers"
"""The group of entry points."""

BUILT_IN = ("local", "slurm", "kubernetes")
"""The built-in kinds; a package cannot replace them."""


class LauncherPlugin(Protocol):
    """The interface of a package that runs jobs on another kind of site."""

    profile: "type[SiteProfile]"
    """The profile's model, with a field `kind: Literal["…"] = "…"`."""

    def plan(self, job: "JobSpec", profile: Any) -> "LaunchPlan":
        """Decide how a job runs there. Pure: no clock, environment, network or scheduler.

        Raises:
            PlanError: every reason why it cannot.
        """

    def render(self, plan: Any) -> str:
        """Return the script of a plan, byte for byte what `launcher` submits. Pure."""

    def launcher(self, profile: Any) -> "Launcher[Any]":
        """Return the launcher, which submits plans and opens the submitted runs."""


@functools.cache
def kinds() -> tuple[str, ...]:
    """Return the kinds of profiles that installed packages provide."""
    from importlib import metadata  # slow, and rarely needed

    names = {entry.name for entry in metadata.entry_points(group=GROUP)}
    return tuple(sorted(names.difference(BUILT_IN)))


@functools.cache
def plugin(kind: str) -> LauncherPlugin:
    """Return the plugin of a package for a kind of profile.

    Raises:
        ProfileError: no package provides one, several do, or it cannot be loaded.
    """
    from importlib import metadata

    entries = list(metadata.entry_points(group=GROUP, name=kind))
    if len(entries) != 1:
        packages = ", ".join(sorted(entry.value for entry in entries)) or "no package"
        raise ProfileError(f"kind {kind!r}: {packages} brings a launcher for it; install one")
    try:
        loaded = entries[0].load()
    except Exception as error:  # another package's code
        name = entries[0].value
        raise ProfileError(f"kind {kind!r}: {name} cannot be loaded: {error}") from error
    made: LauncherPlugin = loaded() if isinstance(loaded, type) else loaded
    return made
