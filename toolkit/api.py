"""The Python API, which the command line also calls: submit jobs; open, list and await runs."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.errors import LauncherError, Problem, ProfileError, RunNotFound
from toolkit.job.spec import Dependency, JobSpec, load, parse_dependency
from toolkit.launcher_plugins import BUILT_IN, plugin
from toolkit.planning import LaunchPlan, plan
from toolkit.planning.local import LocalPlan
from toolkit.planning.slurm import SlurmPlan
from toolkit.profile import (
    KubernetesProfile,
    LocalProfile,
    Profile,
    SlurmProfile,
    as_profile,
    model_of,
    require_default_profile,
)
from toolkit.runs.long_operation import operation
from toolkit.runs.records import registry
from toolkit.runs.run import ForeignRun, Launcher, Run, ShownRun, pauses
from toolkit.runs.state import RunStatus, sum_of


def submit(
    job: JobSpec | LaunchPlan | str | Path,
    *,
    to: str | Profile | None = None,
    after: Sequence[str | Dependency] = (),
    chain: int = 1,
) -> Run:
    """Start a new run of a job, or of all the points of its sweep.

    Args:
        job: The job, or a plan, which is submitted unchanged.
        to: The profile, its name, or the path of its file; without it, the default profile. A plan
            already has a profile.
        after: Runs to wait for, besides those of the job file: `RUN`, `RUN:any`, `RUN:fail`.
        chain: The number of jobs in a chain, each continuing where the previous one ended.

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

    dependencies = [parse_dependency(item) if isinstance(item, str) else item for item in after]
    return SlurmLauncher(made.profile).submit(made, after=dependencies, chain=chain)


def run(job: JobSpec | LaunchPlan | str | Path, *, to: str | Profile | None = None) -> Run:
    """Start a run on this machine that ends with this process, however this process ends.

    Args:
        job: The job, or a plan.
        to: A profile of this machine, its name, or the path of its file; without it, `local`. A
            plan already has a profile.

    Raises:
        ProfileError: no such profile, or one of another site.
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
    job: JobSpec | LaunchPlan | str | Path, to: str | Profile | None, *, default: str | None = None
) -> LaunchPlan:
    if isinstance(job, LaunchPlan):
        if to is not None:
            raise ProfileError("a plan already has a profile; leave `to` out")
        return job
    if isinstance(job, str | os.PathLike):
        job = load(job)
    if to is None:
        to = default or require_default_profile()
    return plan(job, as_profile(to))


def resubmit(run: str | Run, *, chain: int = 1) -> Run:
    """Continue a run from its checkpoint; in a sweep, the points that did not succeed.

    Args:
        run: The run, or its URI, name or run directory.
        chain: The number of jobs in a chain.

    Raises:
        RunNotFound: the run does not exist.
        LauncherError: the run has succeeded or not ended, or the site refused.
    """
    opened = open_run(run) if isinstance(run, str) else run
    if isinstance(opened, ShownRun):
        opened.refuse("continue")
    return launcher_for(_stored_profile(opened.record)).resubmit(opened, chain=chain)


def ask_site(job: JobSpec, *, to: str | Profile) -> list[Problem]:
    """Return where the scheduler's configuration contradicts the job or profile; submit nothing.

    Args:
        job: The job.
        to: The profile, its name, or the path of its file.

    Raises:
        ProfileError: the profile does not exist, or is not of a Slurm site.
        PlanError: the job cannot work there.
        LauncherError: the scheduler cannot be reached.
    """
    profile = as_profile(to)
    if not isinstance(profile, SlurmProfile):
        raise ProfileError(
            f"profile {profile.name!r} is not a Slurm site; only a Slurm site can be queried"
        )
    from toolkit.slurm import SlurmLauncher

    return SlurmLauncher(profile).findings(plan(job, profile))


def open_run(name: str, *, trust: bool = False, environ: Mapping[str, str] = os.environ) -> Run:
    """Return the handle of a run by its URI, its name, or its run directory.

    `RUN_7`, or `RUN/NAME` with the point's name, opens a point of a sweep. A run that was not
    submitted from here is opened by its run directory, or as `k8s://NAMESPACE/NAME` from its
    objects in the cluster.

    Args:
        name: The URI, name or run directory.
        trust: Whether to act on the jobs, hosts and clusters named by a run directory that is not
            in the user's list of runs, and may be another user's. Otherwise it is only shown.
        environ: The variables that locate the user's list of runs.

    Raises:
        RunNotFound: the run does not exist.
    """
    try:
        record, point = registry.find_point(name, trust=trust, environ=environ)
    except RunNotFound:
        if not registry.OBJECT_URI.fullmatch(name):
            raise
        from toolkit.kubernetes.launcher import run_in_cluster

        return run_in_cluster(name, environ=environ)
    return _open(record) if point is None else _open(record).point(point)


def list_runs(
    *, job: str | None = None, last: int | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[Run]:
    """Yield the handles of the submitted runs, oldest first.

    Args:
        job: The name of a job, to list only its runs; None for all jobs.
        last: The number of newest runs to list; None for all.
        environ: The variables that locate the user's list of runs.
    """
    records = (r for r in registry.records(environ=environ) if job is None or r.job == job)
    launchers: dict[str, Launcher[Any]] = {}
    for record in records if last is None else deque(records, maxlen=last):
        key = repr(record.profile)  # many runs share few profiles
        try:
            if key not in launchers:
                launchers[key] = launcher_for(_stored_profile(record))
            run = launchers[key].open(record)
        except LauncherError as error:  # a damaged record must not hide the other runs
            run = ShownRun(record, str(error))
        yield run


def statuses(runs: Iterable[Run]) -> list[RunStatus]:
    """Return the statuses of runs.

    All runs on a Slurm cluster share one query; its answer is at most seconds old.

    Runs on a site that does not answer are UNKNOWN, with the reason; other runs are not affected.
    """
    runs = list(runs)
    by_index: dict[int, RunStatus] = {}
    for indices in _batches(runs):
        batch = [runs[index] for index in indices]
        by_index |= zip(indices, batch[0].statuses_of(batch), strict=True)
    return [by_index[index] for index in range(len(runs))]


def wait(
    runs: Iterable[Run],
    timeout_s: float | None = None,
    *,
    on_end: Callable[[Run, RunStatus], object] = lambda run, status: None,
) -> list[RunStatus]:
    """Return the statuses of runs once all have ended or are permanently lost.

    Args:
        runs: The runs; those that have not ended are polled together, with growing pauses.
        timeout_s: The time limit in seconds; None waits without limit.
        on_end: Called for each run when it has ended.

    Raises:
        TimeoutError: a run has not ended after `timeout_s` seconds.
    """
    watched = list(runs)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    ended: dict[int, RunStatus] = {}
    seen: dict[int, RunStatus] = {}
    with contextlib.ExitStack() as stack:
        for indices in _batches(watched):
            batch = [watched[index] for index in indices]
            stack.enter_context(batch[0].watching(batch))
        count = len(watched)
        report = stack.enter_context(operation(f"waiting for {count} run{'s' * (count != 1)}"))
        for pause_s in pauses():
            waiting = [index for index in range(len(watched)) if index not in ended]
            for index, status in zip(
                waiting, statuses(watched[index] for index in waiting), strict=True
            ):
                seen[index] = status
                if status.state.final or status.lost:
                    ended[index] = status
                    if status.state.final:
                        watched[index].tell_end(status)
                    on_end(watched[index], status)
            still = [run.uri for index, run in enumerate(watched) if index not in ended]
            if not still:
                break
            states = sum_of(list(seen.values())).reason
            report(len(ended), count, f"{len(ended)} of {count} ended: {states}")
            if deadline is not None and time.monotonic() > deadline:
                shown = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if still[3:] else "")
                raise TimeoutError(f"not ended after {timeout_s:g} s: {shown}")
            time.sleep(pause_s)
    return [ended[index] for index in range(len(watched))]


def _batches(runs: Sequence[Run]) -> Iterable[list[int]]:
    """Return for each query the indices of the runs that share it."""
    batches: dict[Hashable, list[int]] = {}
    for index, run in enumerate(runs):
        batches.setdefault(run.batch_key, []).append(index)
    return batches.values()


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
        return plugin(profile.kind).launcher(profile)
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
