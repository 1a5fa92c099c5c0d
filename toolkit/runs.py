"""Runs, wherever they are: submit a job, open a run again, list them all."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from toolkit.errors import LauncherError, Problem, ProfileError
from toolkit.launchers import registry
from toolkit.launchers.base import Launcher, Run
from toolkit.planning import plan
from toolkit.profile import (
    KubernetesProfile,
    LocalProfile,
    Profile,
    SlurmProfile,
    load_profile,
)
from toolkit.spec import JobSpec

__all__ = ["ask_site", "list_runs", "open_run", "submit"]


def submit(job: JobSpec, *, to: str | Profile) -> Run:
    """Start a new run of `job`.

    Args:
        job: What to run.
        to: The profile, its name, or the path of its file.

    Raises:
        ProfileError: no such profile.
        PlanError: the job cannot work there.
        LauncherError: the scheduler refused, or cannot be reached.
    """
    profile = load_profile(to) if isinstance(to, str) else to
    return launcher_for(profile).submit(plan(job, profile))


def ask_site(job: JobSpec, *, to: str | Profile) -> list[Problem]:
    """Ask the scheduler where it contradicts the job or the profile; nothing is submitted.

    Args:
        job: What is to run.
        to: The profile, its name, or the path of its file.

    Raises:
        ProfileError: no such profile, or one of a place that has no scheduler to ask.
        PlanError: the job cannot work there.
        LauncherError: the scheduler cannot be reached.
    """
    profile = load_profile(to) if isinstance(to, str) else to
    if not isinstance(profile, SlurmProfile):
        raise ProfileError(f"profile {profile.name!r} is no Slurm site; only those can be asked")
    from toolkit.launchers.slurm import SlurmLauncher

    return SlurmLauncher(profile).findings(plan(job, profile))


def open_run(name: str, *, environ: Mapping[str, str] = os.environ) -> Run:
    """Return the handle of a run by its URI, its name, or its run directory.

    Raises:
        RunNotFound: there is none.
    """
    return _open(registry.find(name, environ=environ))


def list_runs(*, environ: Mapping[str, str] = os.environ) -> Iterator[Run]:
    """Yield the handles of every run that was submitted, oldest first."""
    return map(_open, registry.records(environ=environ))


def _open(record: registry.RunRecord) -> Run:
    return launcher_for(_stored_profile(record)).open(record)


def _stored_profile(record: registry.RunRecord) -> Profile:
    kind = record.profile.get("kind")
    for profile in (LocalProfile, SlurmProfile, KubernetesProfile):
        if kind == profile.model_fields["kind"].default:
            try:
                return profile.model_validate(dict(record.profile))
            except ValidationError:
                break
    raise LauncherError(f"{record.uri} was submitted with a profile that this version cannot read")


def launcher_for(profile: Profile) -> Launcher[Any]:
    """Return the launcher of a profile's kind."""
    match profile:
        case LocalProfile():
            from toolkit.launchers.local import LocalLauncher

            return LocalLauncher(profile)
        case SlurmProfile():
            from toolkit.launchers.slurm import SlurmLauncher

            return SlurmLauncher(profile)
        case KubernetesProfile():
            from toolkit.launchers.k8s import KubernetesLauncher

            return KubernetesLauncher(profile)
