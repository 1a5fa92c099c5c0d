"""What cannot work: every reason why a job does not fit a site, with the arithmetic.

Pure, like planning, which asks here first.
"""

from toolkit.containers import refusals_of_containers
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


def refusals(job: JobSpec, profile: Profile, *, run_name: str) -> list[str]:
    """Return why `job` cannot work with `profile`, each reason in a sentence; none if it can."""
    if job.points:
        return [*_sweep_problems(job, profile), *_of_the_points(job, profile, run_name=run_name)]
    found = [*_does_not_fit(job, profile), *_mount_problems(job, profile)]
    found += _elastic_problems(job, profile)
    if job.after and not isinstance(profile, SlurmProfile):
        found.append(
            f"after: only Slurm lets a job wait for another; profile {profile.name!r} is of "
            "another kind; write `toolkit wait RUN && toolkit submit …`, or leave it out"
        )
    found += (reason for _, reason in (*leaked_secrets(job), *leaks_of(profile)))
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
                found.append(
                    f"stop.grace {format_duration(job.stop.grace_s)} is too long: Slurm warns at "
                    f"most {SIGNAL_MAX_S}s ahead, and {REQUEUE_MARGIN_S}s of them go to the requeue"
                )
        case KubernetesProfile():
            found += _stop_too_long(
                job,
                needed_s=job.stop.grace_s + POD_MARGIN_S,
                what=f"stop.grace and {POD_MARGIN_S}s for torchrun to end",
            )
            found += _kubernetes_problems(job, profile, run_name)
    return found


def _sweep_problems(job: JobSpec, profile: Profile) -> list[str]:
    if not isinstance(profile, SlurmProfile):
        return [
            f"sweep: its points are one job array of Slurm, and profile {profile.name!r} is of "
            "another kind; submit them one by one: `--set sweep=null` and the values of a point"
        ]
    if job.resources.elastic:
        return ["sweep: nnodes with min and max is for single runs; write one number of nodes"]
    return []


def _of_the_points(job: JobSpec, profile: Profile, *, run_name: str) -> list[str]:
    """Return the reasons of all points; one that all have in common is told once."""
    reasons: dict[str, list[int]] = {}
    for point in job.points:
        for reason in refusals(job.at(point), profile, run_name=run_name):
            reasons.setdefault(reason, []).append(point.index)  # its name may hold a secret
    return [
        reason
        if len(points) == len(job.points)
        else f"point {points[0]}{f' and {len(points) - 1} more' if points[1:] else ''}: {reason}"
        for reason, points in reasons.items()
    ]


def warning_lead_s(job: JobSpec) -> int:
    """Return how long before the time limit Slurm warns: the checkpoint and the requeue."""
    return job.stop.grace_s + REQUEUE_MARGIN_S


def _does_not_fit(job: JobSpec, profile: Profile) -> list[str]:
    """Compare what a node needs with what it has."""
    need, node = job.resources, profile.node
    found = []
    if node.gpus is not None:
        has = f"the {node.gpus} GPUs per node of profile {profile.name!r}"
        if need.gpus_per_node > node.gpus:
            found.append(f"gpus_per_node {need.gpus_per_node} exceeds {has}")
        elif node.gpus and need.gpus_per_node and need.nproc_per_node > node.gpus:
            found.append(f"nproc_per_node {need.nproc_per_node} exceeds {has}")
    if not found and 0 < need.gpus_per_node < need.nproc_per_node:
        found.append(
            f"nproc_per_node {need.nproc_per_node} exceeds gpus_per_node {need.gpus_per_node}; "
            "each worker needs a GPU of its own"
        )
    if node.cpus is not None and (cpus := cpus_of(job)) > node.cpus:
        found.append(
            f"cpus_per_node {cpus} exceeds the {node.cpus} CPUs per node of "
            f"profile {profile.name!r}"
        )
    if node.memory_bytes is not None and (need.memory_bytes or 0) > node.memory_bytes:
        found.append(
            f"memory {format_size(need.memory_bytes or 0)} exceeds the "
            f"{format_size(node.memory_bytes)} per node of profile {profile.name!r}"
        )
    if need.memory_bytes and need.shm_bytes and need.shm_bytes >= need.memory_bytes:
        found.append(
            f"shm {format_size(need.shm_bytes)} leaves nothing of memory "
            f"{format_size(need.memory_bytes)}, which it is part of"
        )
    return found


def _elastic_problems(job: JobSpec, profile: Profile) -> list[str]:
    if not job.resources.elastic:
        return []
    found = []
    if not job.retries.in_job:
        found.append(
            "nnodes with min and max needs retries.in_job: without it, no rank starts again after "
            "a node is lost or has come"
        )
    if isinstance(profile, SlurmProfile) and profile.gpus_flag == "gpus-per-task":
        found.append(
            "nnodes with min and max cannot be had by gpus-per-task, since Slurm chooses how many "
            "tasks there are; write gpus_flag: gres"
        )
    return found


def _mount_problems(job: JobSpec, profile: Profile) -> list[str]:
    found: list[str] = []
    site = profile.mounts if isinstance(profile, SlurmProfile) else ()
    targets = [mount.target.rstrip("/") for mount in (*site, *job.mounts)]
    if twice := sorted({target for target in targets if targets.count(target) > 1}):
        found.append(f"two mounts have the target {twice[0]!r}")
    for index, mount in enumerate(job.mounts):
        place = f"mounts[{index}]"
        claim = mount.claim is not None
        if isinstance(profile, KubernetesProfile):
            taken = ("/tmp", "/dev/shm", profile.runs_dir.rstrip("/"))
            if mount.target.rstrip("/") in taken:
                found.append(
                    f"{place}: {mount.target!r} is taken; every pod has its own {', '.join(taken)}"
                )
            if not claim and profile.pod_security != "privileged":
                found.append(
                    f"{place}: Pod Security {profile.pod_security!r} of profile {profile.name!r} "
                    f"allows no folder of the node ({mount.source!r}); write claim:NAME"
                )
        elif isinstance(profile, SlurmProfile) and profile.runtime != "bare":
            continue  # refusals_of_containers looks at the site's, too
        elif claim:
            found.append(f"{place}: {mount.source!r} exists only on Kubernetes; write a path")
        elif mount.source != mount.target:
            found.append(
                f"{place}: profile {profile.name!r} runs without containers, so {mount.source!r} "
                f"cannot appear at {mount.target!r}; make source and target equal"
            )
    return found


def _secrets_lost(job: JobSpec) -> list[str]:
    """Find secrets that a rendered script would overwrite with a variable of its own."""
    return [
        f"secrets: {name!r} is a variable of the rendered script; use capital letters"
        for name in job.secrets
        if name in SCRIPT_VARIABLES
    ]


def _stop_too_long(job: JobSpec, *, needed_s: int, what: str) -> list[str]:
    if job.time_limit_s is None or needed_s < job.time_limit_s:
        return []
    return [
        f"stop.grace {format_duration(job.stop.grace_s)} does not fit: {what} takes "
        f"{format_duration(needed_s)}, and time_limit is {format_duration(job.time_limit_s)}"
    ]


def cpus_of(job: JobSpec) -> int:
    """Return the CPUs of a node: one per worker where the job does not say."""
    return job.resources.cpus_per_node or job.resources.nproc_per_node


def _image_missing(job: JobSpec, profile: Profile) -> list[str]:
    if job.image is not None:
        return []
    return [f"profile {profile.name!r} runs containers; the job needs the key 'image'"]


def _kubernetes_problems(job: JobSpec, profile: KubernetesProfile, run_name: str) -> list[str]:
    found = [
        f"secrets: {name!r} is in a file, which no pod sees; write {{secret: …, key: …}} for "
        f"profile {profile.name!r}"
        for name, place in job.secrets.items()
        if place is not None and place.file is not None
    ]
    found += _image_missing(job, profile)
    if profile.secret is None:
        found += (
            f"secrets: where is {name}? Write {{{name}: {{secret: …, key: …}}}} in the job, or the "
            f"key 'secret' in profile {profile.name!r}"
            for name, place in job.secrets.items()
            if place is None
        )
    longest = f"{run_name}-worker-{job.resources.max_nodes - 1}"
    if len(longest) > KUBERNETES_NAME_MAX:
        found.append(
            f"the pod name {longest!r} has {len(longest)} characters, more than "
            f"{KUBERNETES_NAME_MAX}; shorten 'name'"
        )
    return found
