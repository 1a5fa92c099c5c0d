"""What cannot work: every reason why a job does not fit a site, with the arithmetic.

Pure, like planning, which asks here first.
"""

from dataclasses import replace

from toolkit.containers import refusals_of_containers
from toolkit.documents import KeyPath
from toolkit.errors import Problem
from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile, leaks_of
from toolkit.quantities import format_duration, format_size
from toolkit.spec import JobSpec, leaked_secrets

__all__ = ["POD_MARGIN_S", "REQUEUE_MARGIN_S", "cpus_of", "refusals", "warning_lead_s"]

REQUEUE_MARGIN_S = 30
"""What the batch script needs after the checkpoint: srun's end and the requeue call."""

SIGNAL_SLACK_S = 60
"""Slurm may send the `--signal` warning up to this much early (sbatch manual, `--signal`)."""

SIGNAL_MAX_S = 65535
"""The earliest warning that sbatch takes (sbatch manual, `--signal`)."""

POD_MARGIN_S = 15
"""What torchrun needs after its workers are gone, before the kubelet kills the container."""

SCRIPT_VARIABLES = frozenset(
    {
        *("before", "entry", "mode", "point", "run_job", "since", "variables"),
        *(
            "attempt",
            "devices",
            "environment",
            "gpu",
            "gpus",
            "head_node",
            "hosts",
            "logs",
            "pid",
            "pids",
        ),
        *(
            "port",
            "rank",
            "restarts",
            "run_dir",
            "running",
            "status",
            "step",
            "stopped",
            "stopping",
        ),
    }
)
"""What the templates assign; a secret of such a name would not reach the workers."""

KUBERNETES_NAME_MAX = 63
"""Pods carry the run's name and a suffix; RFC 1035 allows 63 characters."""

_GRACE: KeyPath = ("stop", "grace")
_NNODES: KeyPath = ("resources", "nnodes")


def refusals(job: JobSpec, profile: Profile, *, run_name: str) -> list[Problem]:
    """Return why `job` cannot work with `profile`, each reason in a sentence; none if it can."""
    if job.points:
        return [*_sweep_problems(job, profile), *_of_the_points(job, profile, run_name=run_name)]
    found = [*_does_not_fit(job, profile), *_mount_problems(job, profile)]
    found += _elastic_problems(job, profile)
    if job.after and not isinstance(profile, SlurmProfile):
        found += _no(
            "after-elsewhere",
            f"after: only Slurm lets a job wait for another; profile {profile.name!r} is of "
            "another kind; write `toolkit wait RUN && toolkit submit …`, or leave it out",
            "after",
        )
    for key, reason in leaked_secrets(job):
        found += _no("secret-in-job", reason, *key)
    for _, reason in leaks_of(profile):
        found += _no("secret-in-job", reason)
    match profile:
        case LocalProfile():
            found += _secrets_lost(job)
            found += _stop_too_long(job, needed_s=job.stop.grace_s, what="stop.grace alone")
        case SlurmProfile():
            if profile.runtime != "bare":
                found += _image_missing(job, profile)
                found += refusals_of_containers(job, profile)
            found += _secrets_lost(job)
            found += _stop_too_long(
                job,
                needed_s=warning_lead_s(job) + SIGNAL_SLACK_S,
                what=f"stop.grace, {REQUEUE_MARGIN_S}s to requeue and up to {SIGNAL_SLACK_S}s "
                "that Slurm warns early",
            )
            if warning_lead_s(job) > SIGNAL_MAX_S:
                found += _no(
                    "stop-beyond-signal",
                    f"stop.grace {format_duration(job.stop.grace_s)} is too long: Slurm warns at "
                    f"most {SIGNAL_MAX_S}s ahead, and {REQUEUE_MARGIN_S}s of them go to the "
                    "requeue",
                    *_GRACE,
                )
        case KubernetesProfile():
            found += _stop_too_long(
                job,
                needed_s=job.stop.grace_s + POD_MARGIN_S,
                what=f"stop.grace and {POD_MARGIN_S}s for torchrun to end",
            )
            found += _kubernetes_problems(job, profile, run_name)
    return found


def _no(rule: str, message: str, *key: str | int) -> list[Problem]:
    return [Problem(rule=rule, message=message, key=key)]


def _sweep_problems(job: JobSpec, profile: Profile) -> list[Problem]:
    if not isinstance(profile, SlurmProfile):
        return _no(
            "sweep-elsewhere",
            f"sweep: its points are one job array of Slurm, and profile {profile.name!r} is of "
            "another kind; submit them one by one: `--set sweep=null` and the values of a point",
            "sweep",
        )
    if job.resources.elastic:
        return _no(
            "sweep-elastic",
            "sweep: nnodes with min and max is for single runs; write one number of nodes",
            *_NNODES,
        )
    return []


def _of_the_points(job: JobSpec, profile: Profile, *, run_name: str) -> list[Problem]:
    """Return the reasons of all points; one that all have in common is told once."""
    reasons: dict[Problem, list[int]] = {}
    for point in job.points:
        for reason in refusals(job.at(point), profile, run_name=run_name):
            reasons.setdefault(reason, []).append(point.index)  # its name may hold a secret
    found = []
    for reason, points in reasons.items():
        if len(points) < len(job.points):
            which = f"point {points[0]}{f' and {len(points) - 1} more' if points[1:] else ''}"
            reason = replace(reason, message=f"{which}: {reason.message}", key=("sweep",))
        found.append(reason)
    return found


def warning_lead_s(job: JobSpec) -> int:
    """Return how long before the time limit Slurm warns: the checkpoint and the requeue."""
    return job.stop.grace_s + REQUEUE_MARGIN_S


def _does_not_fit(job: JobSpec, profile: Profile) -> list[Problem]:
    """Compare what a node needs with what it has."""
    need, node = job.resources, profile.node
    found: list[Problem] = []
    if node.gpus is not None:
        has = f"the {node.gpus} GPUs per node of profile {profile.name!r}"
        if need.gpus_per_node > node.gpus:
            found += _no(
                "gpus-exceed-node",
                f"gpus_per_node {need.gpus_per_node} exceeds {has}",
                *("resources", "gpus_per_node"),
            )
        elif node.gpus and need.gpus_per_node and need.nproc_per_node > node.gpus:
            found += _no(
                "workers-exceed-gpus",
                f"nproc_per_node {need.nproc_per_node} exceeds {has}",
                *("resources", "nproc_per_node"),
            )
    if not found and 0 < need.gpus_per_node < need.nproc_per_node:
        found += _no(
            "workers-exceed-gpus",
            f"nproc_per_node {need.nproc_per_node} exceeds gpus_per_node {need.gpus_per_node}; "
            "each worker needs a GPU of its own",
            *("resources", "nproc_per_node"),
        )
    if node.cpus is not None and (cpus := cpus_of(job)) > node.cpus:
        found += _no(
            "cpus-exceed-node",
            f"cpus_per_node {cpus} exceeds the {node.cpus} CPUs per node of "
            f"profile {profile.name!r}",
            *("resources", "cpus_per_node"),
        )
    if node.memory_bytes is not None and (need.memory_bytes or 0) > node.memory_bytes:
        found += _no(
            "memory-exceeds-node",
            f"memory {format_size(need.memory_bytes or 0)} exceeds the "
            f"{format_size(node.memory_bytes)} per node of profile {profile.name!r}",
            *("resources", "memory"),
        )
    if need.memory_bytes and need.shm_bytes and need.shm_bytes >= need.memory_bytes:
        found += _no(
            "shm-exceeds-memory",
            f"shm {format_size(need.shm_bytes)} leaves nothing of memory "
            f"{format_size(need.memory_bytes)}, which it is part of",
            *("resources", "shm"),
        )
    return found


def _elastic_problems(job: JobSpec, profile: Profile) -> list[Problem]:
    if not job.resources.elastic:
        return []
    found: list[Problem] = []
    if not job.retries.in_job:
        found += _no(
            "elastic-without-restarts",
            "nnodes with min and max needs retries.in_job: without it, no rank starts again after "
            "a node is lost or has come",
            *_NNODES,
        )
    if isinstance(profile, SlurmProfile) and profile.gpus_flag == "gpus-per-task":
        found += _no(
            "elastic-gpus-per-task",
            "nnodes with min and max cannot be had by gpus-per-task, since Slurm chooses how many "
            "tasks there are; write gpus_flag: gres",
            *_NNODES,
        )
    return found


def _mount_problems(job: JobSpec, profile: Profile) -> list[Problem]:
    found: list[Problem] = []
    site = profile.mounts if isinstance(profile, SlurmProfile) else ()
    targets = [mount.target.rstrip("/") for mount in (*site, *job.mounts)]
    if twice := sorted({target for target in targets if targets.count(target) > 1}):
        found += _no("mount-target-taken", f"two mounts have the target {twice[0]!r}", "mounts")
    for index, mount in enumerate(job.mounts):
        place = f"mounts[{index}]"
        key = ("mounts", index)
        claim = mount.kind != "path"
        if isinstance(profile, KubernetesProfile):
            taken = ("/tmp", "/dev/shm", profile.runs_dir.rstrip("/"))
            if mount.target.rstrip("/") in taken:
                found += _no(
                    "mount-target-taken",
                    f"{place}: {mount.target!r} is taken; every pod has its own {', '.join(taken)}",
                    *key,
                )
            if not claim and profile.pod_security != "privileged":
                found += _no(
                    "mount-forbidden",
                    f"{place}: Pod Security {profile.pod_security!r} of profile {profile.name!r} "
                    f"allows no folder of the node ({mount.source!r}); write claim:NAME",
                    *key,
                )
        elif isinstance(profile, SlurmProfile) and profile.runtime != "bare":
            continue  # refusals_of_containers looks at the site's, too
        elif claim:
            found += _no(
                "mount-elsewhere",
                f"{place}: {mount.source!r} exists only on Kubernetes; write a path",
                *key,
            )
        elif mount.source != mount.target:
            found += _no(
                "mount-without-container",
                f"{place}: profile {profile.name!r} runs without containers, so {mount.source!r} "
                f"cannot appear at {mount.target!r}; make source and target equal",
                *key,
            )
    return found


def _secrets_lost(job: JobSpec) -> list[Problem]:
    """Find secrets that a rendered script would overwrite with a variable of its own."""
    return [
        problem
        for name in job.secrets
        if name in SCRIPT_VARIABLES
        for problem in _no(
            "secret-overwritten",
            f"secrets: {name!r} is a variable of the rendered script; use capital letters",
            *("secrets", name),
        )
    ]


def _stop_too_long(job: JobSpec, *, needed_s: int, what: str) -> list[Problem]:
    if job.time_limit_s is None or needed_s < job.time_limit_s:
        return []
    return _no(
        "stop-beyond-time-limit",
        f"stop.grace {format_duration(job.stop.grace_s)} does not fit: {what} takes "
        f"{format_duration(needed_s)}, and time_limit is {format_duration(job.time_limit_s)}",
        "time_limit",
    )


def cpus_of(job: JobSpec) -> int:
    """Return the CPUs of a node: one per worker where the job does not say."""
    return job.resources.cpus_per_node or job.resources.nproc_per_node


def _image_missing(job: JobSpec, profile: Profile) -> list[Problem]:
    if job.image is not None:
        return []
    return _no(
        "image-missing",
        f"profile {profile.name!r} runs containers; the job needs the key 'image'",
        "image",
    )


def _kubernetes_problems(job: JobSpec, profile: KubernetesProfile, run_name: str) -> list[Problem]:
    found: list[Problem] = []
    for name, place in job.secrets.items():
        if place is not None and place.file is not None:
            found += _no(
                "secret-not-in-cluster",
                f"secrets: {name!r} is in a file, which no pod sees; write {{secret: …, key: …}} "
                f"for profile {profile.name!r}",
                *("secrets", name),
            )
    found += _image_missing(job, profile)
    for name, place in job.secrets.items() if profile.secret is None else ():
        if place is None:
            found += _no(
                "secret-not-in-cluster",
                f"secrets: where is {name}? Write {{{name}: {{secret: …, key: …}}}} in the job, or "
                f"the key 'secret' in profile {profile.name!r}",
                *("secrets", name),
            )
    longest = f"{run_name}-worker-{job.resources.max_nodes - 1}"
    if len(longest) > KUBERNETES_NAME_MAX:
        found += _no(
            "name-too-long",
            f"the pod name {longest!r} has {len(longest)} characters, more than "
            f"{KUBERNETES_NAME_MAX}; shorten 'name'",
            "name",
        )
    return found
