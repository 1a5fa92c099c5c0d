"""Runs, wherever they are: submit a job, open a run again, list them all."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from toolkit.errors import LauncherError, Problem, ProfileError, RunNotFound
from toolkit.extensions import BUILT_IN, extension
from toolkit.job.dependencies import Dependency, parse_dependency
from toolkit.job.spec import JobSpec
from toolkit.planning import LaunchPlan, plan
from toolkit.planning.local import LocalPlan
from toolkit.planning.slurm import SlurmPlan
from toolkit.profile import (
    KubernetesProfile,
    LocalProfile,
    Profile,
    SlurmProfile,
    load_profile,
    model_of,
    require_default_profile,
)
from toolkit.runs import registry
from toolkit.runs.foreign import ForeignRun, ShownRun
from toolkit.runs.run import Launcher, Run, pauses
from toolkit.runs.state import RunStatus

__all__ = ["ask_site", "list_runs", "open_run", "resubmit", "run", "statuses", "submit", "wait"]


def submit(
    job: JobSpec | LaunchPlan,
    *,
    to: str | Profile | None = None,
    after: Sequence[str | Dependency] = (),
    chain: int = 1,
) -> Run:
    """Start a new run of a job, or of all the points of its sweep.

    Args:
        job: The job, or a plan of one, which is submitted as it is.
        to: The profile, its name, or the path of its file; of a job the default one if it is left
            out. A plan has its own.
        after: Runs that it waits for, besides those of the job file: `RUN`, `RUN:any`, `RUN:fail`.
        chain: How many jobs take turns at it, each going on where the one before has ended.

    Raises:
        ProfileError: no such profile.
        PlanError: the job cannot work there.
        LauncherError: the scheduler refused, or cannot be reached.
    """
    made = _planned(job, to)
    if not after and chain == 1:
        return launcher_for(made.profile).submit(made)
    if not isinstance(made, SlurmPlan):
        raise made.not_on_slurm("after and chain")
    from toolkit.slurm import SlurmLauncher

    wanted = [parse_dependency(item) if isinstance(item, str) else item for item in after]
    return SlurmLauncher(made.profile).submit(made, after=wanted, chain=chain)


def run(job: JobSpec | LaunchPlan, *, to: str | Profile | None = None) -> Run:
    """Start a run on this machine that ends with this process, however this process ends.

    Args:
        job: The job, or a plan of one.
        to: A profile of this machine, its name, or the path of its file; `local` if it is left
            out. A plan has its own.

    Raises:
        ProfileError: no such profile, or one of another place.
        PlanError: the job cannot work here.
        LauncherError: the run cannot be started.
    """
    made = _planned(job, to, default="local")
    if not isinstance(made, LocalPlan):
        name = made.profile.name
        raise ProfileError(f"profile {name!r} is not of this machine; use toolkit.submit()")
    from toolkit.local.launcher import LocalLauncher

    return LocalLauncher(made.profile, tied=True).submit(made)


def _planned(
    job: JobSpec | LaunchPlan, to: str | Profile | None, *, default: str | None = None
) -> LaunchPlan:
    if isinstance(job, LaunchPlan):
        if to is not None:
            raise ProfileError("a plan is for the profile that it was made with; leave `to` out")
        return job
    if to is None:
        to = default or require_default_profile()
    return plan(job, load_profile(to) if isinstance(to, str) else to)


def resubmit(run: str | Run, *, chain: int = 1) -> Run:
    """Let a run that has ended go on from its checkpoints; of a sweep, what did not succeed.

    Args:
        run: The run, or its URI, name or run directory.
        chain: How many jobs take turns at it.

    Raises:
        RunNotFound: there is none.
        LauncherError: it has succeeded or not ended, or the place refused.
    """
    opened = open_run(run) if isinstance(run, str) else run
    if isinstance(opened, ShownRun):
        opened.refuse("go on")
    return launcher_for(_stored_profile(opened.record)).resubmit(opened, chain=chain)


def ask_site(job: JobSpec, *, to: str | Profile) -> list[Problem]:
    """Return where the scheduler's configuration contradicts the job or profile; submit nothing.

    Args:
        job: What is to run.
        to: The profile, its name, or the path of its file.

    Raises:
        ProfileError: the profile does not exist, or is not of a Slurm site.
        PlanError: the job cannot work there.
        LauncherError: the scheduler cannot be reached.
    """
    profile = load_profile(to) if isinstance(to, str) else to
    if not isinstance(profile, SlurmProfile):
        raise ProfileError(f"profile {profile.name!r} is no Slurm site; only those can be asked")
    from toolkit.slurm import SlurmLauncher

    return SlurmLauncher(profile).findings(plan(job, profile))


def open_run(name: str, *, trust: bool = False, environ: Mapping[str, str] = os.environ) -> Run:
    """Return the handle of a run by its URI, its name, or its run directory.

    That of a sweep's point is `RUN_7`, or `RUN/NAME` with the point's name. A run that was not
    submitted from here is opened by its run directory, or as `k8s://NAMESPACE/NAME` from its
    objects in the cluster.

    Args:
        name: One of these.
        trust: Whether to believe which jobs, hosts and clusters a run directory names that is not
        in the user's list, and may be another user's. Without that it is shown only.
        environ: Where the user's list of runs is looked for.

    Raises:
        RunNotFound: there is none.
    """
    try:
        record, point = registry.find_point(name, trust=trust, environ=environ)
    except RunNotFound:
        if not name.startswith("k8s://"):
            raise
        from toolkit.kubernetes.foreign import is_uri, run_in_cluster

        if not is_uri(name):
            raise
        return run_in_cluster(name, environ=environ)
    return _open(record) if point is None else _open(record).point(point)


def list_runs(
    *, job: str | None = None, last: int | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[Run]:
    """Yield the handles of the runs that were submitted, oldest first.

    Args:
        job: The name of the job whose runs are wanted; those of all where it is None.
        last: How many of the newest are wanted; all where it is None.
        environ: Where the user's list of runs is looked for.
    """
    wanted = (r for r in registry.records(environ=environ) if job is None or r.job == job)
    launchers: dict[str, Launcher[Any]] = {}
    for record in wanted if last is None else deque(wanted, maxlen=last):
        key = repr(record.profile)  # there are many runs, and few profiles
        try:
            if key not in launchers:
                launchers[key] = launcher_for(_stored_profile(record))
            run = launchers[key].open(record)
        except LauncherError as error:  # one odd record takes no other run away
            run = ShownRun(record, str(error))
        yield run


def statuses(runs: Iterable[Run]) -> list[RunStatus]:
    """Return the statuses of runs.

    The runs on one Slurm cluster share one query, whose answer is at most seconds old.

    Runs of a place that does not answer are UNKNOWN, with the reason; the others are not touched.
    """
    asked = list(runs)
    by_index: dict[int, RunStatus] = {}
    for indices in _by_place(asked).values():
        together = [asked[index] for index in indices]
        by_index |= zip(indices, together[0].statuses_of(together), strict=True)
    return [by_index[index] for index in range(len(asked))]


def wait(
    runs: Iterable[Run],
    timeout_s: float | None = None,
    *,
    on_end: Callable[[Run, RunStatus], object] = lambda run, status: None,
) -> list[RunStatus]:
    """Return the statuses of runs once all have ended, or are lost for good.

    Args:
        runs: The runs; those that still run are polled together, with growing pauses.
        timeout_s: How long to wait.
        on_end: Called for each run when it has ended.

    Raises:
        TimeoutError: one has not ended, `timeout_s` seconds later.
    """
    watched = list(runs)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    ended: dict[int, RunStatus] = {}
    with contextlib.ExitStack() as stack:
        for together in _by_place(watched).values():
            stack.enter_context(watched[together[0]].watching([watched[i] for i in together]))
        for pause_s in pauses():
            waiting = [index for index in range(len(watched)) if index not in ended]
            for index, status in zip(
                waiting, statuses(watched[index] for index in waiting), strict=True
            ):
                if status.state.final or status.lost:
                    ended[index] = status
                    on_end(watched[index], status)
            still = [run.uri for index, run in enumerate(watched) if index not in ended]
            if not still:
                break
            if deadline is not None and time.monotonic() > deadline:
                shown = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if still[3:] else "")
                raise TimeoutError(f"not ended after {timeout_s:g} s: {shown}")
            time.sleep(pause_s)
    return [ended[index] for index in range(len(watched))]


def _by_place(runs: Sequence[Run]) -> dict[Hashable, list[int]]:
    """Return the indices of runs by batch key: the runs of one key share a query."""
    places: dict[Hashable, list[int]] = {}
    for index, run in enumerate(runs):
        places.setdefault(run.place, []).append(index)
    return places


def _open(record: registry.RunRecord) -> Run:
    if not record.believed:
        return ForeignRun(record)
    return launcher_for(_stored_profile(record)).open(record)


def _stored_profile(record: registry.RunRecord) -> Profile:
    if record.problem:
        raise LauncherError(f"{record.uri}: {record.problem}")
    if (model := model_of(record.profile.get("kind"))) is not None:
        with contextlib.suppress(ValidationError):
            return model.model_validate(dict(record.profile))
    raise LauncherError(f"{record.uri} was submitted with a profile that this version cannot read")


def launcher_for(profile: Profile) -> Launcher[Any]:
    """Return the launcher of a profile's kind."""
    if profile.kind not in BUILT_IN:
        return extension(profile.kind).launcher(profile)
    match profile:
        case LocalProfile():
            from toolkit.local.launcher import LocalLauncher

            return LocalLauncher(profile)
        case SlurmProfile():
            from toolkit.slurm import SlurmLauncher

            return SlurmLauncher(profile)
        case KubernetesProfile():
            from toolkit.kubernetes import KubernetesLauncher

            return KubernetesLauncher(profile)
