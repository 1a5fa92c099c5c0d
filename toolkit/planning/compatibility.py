"""What cannot work: every reason why a job does not fit a site, with the arithmetic.

Pure, like planning, which calls this first.
"""

from __future__ import annotations  # naming a profile must not import it

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.errors import Problem
from toolkit.job.spec import JobSpec, leaked_secrets
from toolkit.planning.stop_times import (
    POD_MARGIN_S,
    REQUEUE_MARGIN_S,
    SIGNAL_MAX_S,
    SIGNAL_SLACK_S,
    cpus_of,
    refusal,
    warning_lead_s,
)
from toolkit.profile import leaks_of
from toolkit.text.quantities import format_duration, format_size
from toolkit.text.yaml_reader import KeyPath

if TYPE_CHECKING:
    from toolkit.profile import Profile

__all__ = ["refusals"]

_WORKERS_MAX = 4096
"""Workers on one machine: more than any has processors for, and few enough to be started."""

_GRACE: KeyPath = ("stop", "grace")
_NNODES: KeyPath = ("resources", "nnodes")


def refusals(job: JobSpec, profile: Profile, *, run_name: str) -> list[Problem]:
    """Return why `job` cannot work with `profile`, each reason in a sentence; none if it can."""
    if job.points:
        return [*_sweep_problems(job, profile), *_of_the_points(job, profile, run_name=run_name)]
    problems = [*_does_not_fit(job, profile), *_mount_problems(job, profile)]
    problems += _elastic_problems(job, profile)
    if job.after and profile.kind != "slurm":
        problems += refusal(
            "after-elsewhere",
            f"after: only Slurm lets a job wait for another; profile {profile.name!r} is of "
            "another kind; write `toolkit wait RUN && toolkit submit …`, or leave it out",
            "after",
        )
    for key, reason in leaked_secrets(job):
        problems += refusal("secret-in-job", reason, *key)
    for _, reason in leaks_of(profile):
        problems += refusal("secret-in-job", reason)
    if profile.kind == "local":
        each = max(job.resources.nproc_per_node, job.resources.gpus_per_node)
        if job.resources.max_nodes * each > _WORKERS_MAX:
            problems += refusal(
                "workers-beyond-machine",
                f"{job.resources.max_nodes} simulated nodes with {each} workers or GPUs each are "
                f"more than {_WORKERS_MAX} on this machine; make them fewer: "
                "--set resources.nnodes=2",
                "resources",
            )
        problems += _overwritten(job)
        problems += _stop_too_long(job, needed_s=job.stop.grace_s, what="stop.grace alone")
    elif profile.kind == "slurm":
        if profile.runtime != "bare":
            from toolkit.planning.containers import refusals_of_containers

            problems += _image_missing(job, profile)
            problems += refusals_of_containers(job, profile)
        problems += _overwritten(job)
        problems += _stop_too_long(
            job,
            needed_s=warning_lead_s(job) + SIGNAL_SLACK_S,
            what=f"stop.grace, {REQUEUE_MARGIN_S}s to requeue and up to {SIGNAL_SLACK_S}s "
            "that Slurm warns early",
        )
        if warning_lead_s(job) > SIGNAL_MAX_S:
            problems += refusal(
                "stop-beyond-signal",
                f"stop.grace {format_duration(job.stop.grace_s)} is too long: Slurm warns at "
                f"most {SIGNAL_MAX_S}s ahead, and {REQUEUE_MARGIN_S}s of them go to the "
                "requeue",
                *_GRACE,
            )
    elif profile.kind == "kubernetes":
        from toolkit.planning.compatibility_kubernetes import kubernetes_problems

        problems += _stop_too_long(
            job,
            needed_s=job.stop.grace_s + POD_MARGIN_S,
            what=f"stop.grace and {POD_MARGIN_S}s for torchrun to end",
        )
        problems += _image_missing(job, profile)
        problems += kubernetes_problems(job, profile, run_name)
    return problems


def _sweep_problems(job: JobSpec, profile: Profile) -> list[Problem]:
    problems: list[Problem] = []
    if profile.kind == "local":
        return refusal(
            "sweep-elsewhere",
            f"sweep: its points are one job array of Slurm, or an object each on Kubernetes, and "
            f"profile {profile.name!r} is of another kind; submit them one by one: "
            "`--set sweep=null` and the values of a point",
            "sweep",
        )
    if job.resources.elastic:
        problems += refusal(
            "sweep-elastic",
            "sweep: nnodes with min and max is for single runs; write one number of nodes",
            *_NNODES,
        )
    limit = job.sweep.max_running if job.sweep else None
    if profile.kind == "kubernetes" and limit and not (job.kubernetes.queue or profile.queue):
        problems += refusal(
            "sweep-max-running",
            f"sweep.max_running {limit}: nobody on Kubernetes holds points back but a queue of "
            "Kueue, by its quota; name one (queue), or leave it out: --set sweep.max_running=null",
            *("sweep", "max_running"),
        )
    return problems


def _of_the_points(job: JobSpec, profile: Profile, *, run_name: str) -> list[Problem]:
    """Return the reasons of all points; a reason that all points share is reported once."""
    reasons: dict[Problem, list[int]] = {}
    longest = f"{run_name}-{job.points[-1].index}"
    for point in job.points:
        for reason in refusals(job.at(point), profile, run_name=longest):
            reasons.setdefault(reason, []).append(point.index)  # its name may hold a secret
    problems = []
    for reason, points in reasons.items():
        if len(points) < len(job.points):
            which = f"point {points[0]}{f' and {len(points) - 1} more' if points[1:] else ''}"
            reason = replace(reason, message=f"{which}: {reason.message}", key=("sweep",))
        problems.append(reason)
    return problems


def _does_not_fit(job: JobSpec, profile: Profile) -> list[Problem]:
    """Compare the needs of a node with its resources."""
    need, node = job.resources, profile.node
    problems: list[Problem] = []
    if node.gpus is not None:
        has = f"the {node.gpus} GPUs per node of profile {profile.name!r}"
        if need.gpus_per_node > node.gpus:
            problems += refusal(
                "gpus-exceed-node",
                f"gpus_per_node {need.gpus_per_node} exceeds {has}",
                *("resources", "gpus_per_node"),
            )
        elif node.gpus and need.gpus_per_node and need.nproc_per_node > node.gpus:
            problems += refusal(
                "workers-exceed-gpus",
                f"nproc_per_node {need.nproc_per_node} exceeds {has}",
                *("resources", "nproc_per_node"),
            )
    if not problems and 0 < need.gpus_per_node < need.nproc_per_node:
        problems += refusal(
            "workers-exceed-gpus",
            f"nproc_per_node {need.nproc_per_node} exceeds gpus_per_node {need.gpus_per_node}; "
            "each worker needs a GPU of its own",
            *("resources", "nproc_per_node"),
        )
    if node.cpus is not None and (cpus := cpus_of(job)) > node.cpus:
        problems += refusal(
            "cpus-exceed-node",
            f"cpus_per_node {cpus} exceeds the {node.cpus} CPUs per node of "
            f"profile {profile.name!r}",
            *("resources", "cpus_per_node"),
        )
    if node.memory_bytes is not None and (need.memory_bytes or 0) > node.memory_bytes:
        problems += refusal(
            "memory-exceeds-node",
            f"memory {format_size(need.memory_bytes or 0)} exceeds the "
            f"{format_size(node.memory_bytes)} per node of profile {profile.name!r}",
            *("resources", "memory"),
        )
    if need.memory_bytes and need.shm_bytes and need.shm_bytes >= need.memory_bytes:
        problems += refusal(
            "shm-exceeds-memory",
            f"shm {format_size(need.shm_bytes)} leaves nothing of memory "
            f"{format_size(need.memory_bytes)}, which it is part of",
            *("resources", "shm"),
        )
    return problems


def _elastic_problems(job: JobSpec, profile: Profile) -> list[Problem]:
    if not job.resources.elastic:
        return []
    problems: list[Problem] = []
    if not job.retries.in_job:
        problems += refusal(
            "elastic-without-restarts",
            "nnodes with min and max needs retries.in_job: without it, no rank starts again after "
            "a node is lost or has come",
            *_NNODES,
        )
    if profile.kind == "slurm" and profile.gpus_flag == "gpus-per-task":
        problems += refusal(
            "elastic-gpus-per-task",
            "nnodes with min and max cannot be had by gpus-per-task, since Slurm chooses how many "
            "tasks there are; write gpus_flag: gres",
            *_NNODES,
        )
    return problems


def _mount_problems(job: JobSpec, profile: Profile) -> list[Problem]:
    problems: list[Problem] = []
    site = getattr(profile, "mounts", ())  # this machine's profile has none
    targets = [mount.target.rstrip("/") for mount in (*site, *job.mounts)]
    if twice := sorted({target for target in targets if targets.count(target) > 1}):
        problems += refusal(
            "mount-target-taken", f"two mounts have the target {twice[0]!r}", "mounts"
        )
    if profile.kind == "kubernetes":
        return problems
    if profile.kind == "slurm" and profile.runtime != "bare":
        return problems  # refusals_of_containers checks the site's mounts, too
    for index, mount in enumerate(job.mounts):
        place, key = f"mounts[{index}]", ("mounts", index)
        if mount.kind != "path":
            problems += refusal(
                "mount-elsewhere",
                f"{place}: {mount.source!r} exists only on Kubernetes; write a path",
                *key,
            )
        elif mount.source != mount.target:
            problems += refusal(
                "mount-without-container",
                f"{place}: profile {profile.name!r} runs without containers, so {mount.source!r} "
                f"cannot appear at {mount.target!r}; make source and target equal",
                *key,
            )
    return problems


def _overwritten(job: JobSpec) -> Iterable[Problem]:
    """Return the problems of secrets that a script would overwrite or interpret."""
    if not job.secrets:
        return ()
    from toolkit.planning.reserved_variables import of_scripts

    return of_scripts(job)


def _stop_too_long(job: JobSpec, *, needed_s: int, what: str) -> list[Problem]:
    if job.time_limit_s is None or needed_s < job.time_limit_s:
        return []
    return refusal(
        "stop-beyond-time-limit",
        f"stop.grace {format_duration(job.stop.grace_s)} does not fit: {what} takes "
        f"{format_duration(needed_s)}, and time_limit is {format_duration(job.time_limit_s)}",
        "time_limit",
    )


def _image_missing(job: JobSpec, profile: Profile) -> list[Problem]:
    if job.image is not None:
        return []
    return refusal(
        "image-missing",
        f"profile {profile.name!r} runs containers; the job needs the key 'image'",
        "image",
    )
