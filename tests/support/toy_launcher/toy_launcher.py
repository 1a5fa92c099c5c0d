"""A launcher of another package, as small as one can be: it runs jobs on this machine, too.

Found by its entry point, in the folder beside this file.
"""

from dataclasses import replace
from typing import Literal

import toolkit
from toolkit.local.launcher import LocalLauncher, LocalRun
from toolkit.planning.local import LocalPlan
from toolkit.profile.base import SiteProfile
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.run import Launcher, Run


class ToyProfile(SiteProfile):
    """A site of the toy scheduler."""

    kind: Literal["toy"] = "toy"
    """What the profile is for."""

    runs_dir: str = "runs"
    """Where run directories are made."""


class ToyLauncher(Launcher[LocalPlan]):
    """Submits to the toy scheduler, which starts each job at once."""

    def __init__(self, profile: ToyProfile) -> None:
        """Prepare to launch."""
        self._local = LocalLauncher(profile)  # type: ignore[arg-type]  # only needs runs_dir

    def submit(self, plan: LocalPlan) -> Run:
        """Start a new run."""
        return self._local.submit(plan)

    def open(self, record: RunRecord) -> LocalRun:
        """Return the handle of an earlier run."""
        return self._local.open(record)


class Toy:
    """What the entry point names."""

    profile = ToyProfile

    def plan(self, job: toolkit.JobSpec, profile: ToyProfile) -> LocalPlan:
        """Plan as for this machine."""
        here = toolkit.LocalProfile(name=profile.name, runs_dir=profile.runs_dir)
        return replace(toolkit.plan(job, here), profile=profile)  # type: ignore[arg-type]

    def render(self, plan: LocalPlan) -> str:
        """Render as for this machine."""
        here = toolkit.LocalProfile(name=plan.profile.name, runs_dir=plan.profile.runs_dir)
        return toolkit.render(replace(plan, profile=here))

    def launcher(self, profile: ToyProfile) -> ToyLauncher:
        """Return the launcher."""
        return ToyLauncher(profile)
