"""From a job and a profile to a launch plan: every decision, as plain values.

Pure: no clock, environment, network or scheduler. What cannot work is refused here, with the
arithmetic in the message; templates only place these values.
"""

from __future__ import annotations  # naming a plan must not import it

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

    Kubernetes must know the name of the run; by default it is the job's.

    Raises:
        PlanError: Every reason why this job cannot work there.
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

    # Without a name, the digest makes the name: equal jobs get one name, others another.
    return kubernetes_plan(job, profile, name, run_name or f"{job.name}-{job.digest}")
