"""From a job and a profile to a launch plan: every decision, as plain values.

Pure: no clock, environment, network or scheduler. Planning refuses a job that cannot work, with the
arithmetic in the message; templates only insert these values.
"""

from __future__ import annotations  # an annotation must not import a plan

from typing import TYPE_CHECKING, overload

from toolkit.errors import PlanError
from toolkit.job.spec import JobSpec
from toolkit.launcher_plugins import BUILT_IN, plugin
from toolkit.planning.compatibility import refusals
from toolkit.planning.plans import LaunchPlan

if TYPE_CHECKING:
    from toolkit.planning.kubernetes import KubernetesPlan
    from toolkit.planning.local import LocalPlan
    from toolkit.planning.slurm import SlurmPlan
    from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile

__all__ = ["LaunchPlan", "plan"]


@overload
def plan(job: JobSpec, profile: LocalProfile, *, run_name: str | None = ...) -> LocalPlan: ...
@overload
def plan(job: JobSpec, profile: SlurmProfile, *, run_name: str | None = ...) -> SlurmPlan: ...
@overload
def plan(
    job: JobSpec, profile: KubernetesProfile, *, run_name: str | None = ...
) -> KubernetesPlan: ...
@overload
def plan(job: JobSpec, profile: Profile, *, run_name: str | None = ...) -> LaunchPlan: ...


def plan(job: JobSpec, profile: Profile, *, run_name: str | None = None) -> LaunchPlan:
    """Decide how `job` runs on the site of `profile`.

    Kubernetes needs the name of the run; the default derives from the job's name and digest.

    Raises:
        PlanError: The job cannot work on this site; the message lists every reason.
    """
    name = run_name or job.name
    if problems := list(refusals(job, profile, run_name=name)):
        raise PlanError(problems)
    if profile.kind not in BUILT_IN:
        made = plugin(profile.kind).plan(job, profile)
        if job.points and not made.points:
            raise PlanError(f"sweep: a launcher of kind {profile.kind!r} runs no sweeps")
        return made
    if profile.kind == "local":
        from toolkit.planning.local import local_plan

        return local_plan(job, profile)
    if profile.kind == "slurm":
        from toolkit.planning.slurm import slurm_plan

        return slurm_plan(job, profile)
    from toolkit.planning.kubernetes import kubernetes_plan

    # The digest makes the default name: equal jobs get equal names, different jobs do not.
    return kubernetes_plan(job, profile, name, run_name or f"{job.name}-{job.digest}")
