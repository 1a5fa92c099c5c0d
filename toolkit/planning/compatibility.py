"""Compatibility checks: every reason why a job does not fit a site, with the arithmetic.

Pure, like planning, which calls these checks first.
"""

from __future__ import annotations  # an annotation must not import a profile

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.errors import Problem
from toolkit.job.spec import JobSpec, leaked_secrets
from toolkit.planning.plans import (
    REQUEUE_MARGIN_S,
    SCRIPT_VARIABLES,
    is_told,
    name_attempt,
    notify_of,
    refusal,
)
from toolkit.profile import leaks_of
from toolkit.text.quantities import format_duration, format_size

if TYPE_CHECKING:
    from toolkit.profile import Profile, SlurmProfile

_WORKERS_MAX = 4096
"""Maximum number of workers on one machine: above any processor count, but still startable."""

SHELL_VARIABLES = (
    "_|BASH.*|CDPATH|COLUMNS|COMP_.*|COMPREPLY|COPROC|DIRSTACK|ENV|EPOCH.*|EUID|EXECIGNORE|FIGNORE"
    "|FUNCNAME|FUNCNEST|GLOBIGNORE|GROUPS|HIST.*|HOST(FILE|NAME|TYPE)|IFS|IGNOREEOF|LANG(UAGE)?"
    "|LC_.*|LD_.*|LINENO|LINES|MACHTYPE|MAIL.*|MAPFILE|OLDPWD|OPT(ARG|ERR|IND)|OSTYPE|PATH"
    "|PIPESTATUS|POSIXLY_CORRECT|PPID|PROMPT_.*|PS[0-4]|PWD|PYTHON(HOME|PATH|STARTUP)|RANDOM"
    "|READLINE_.*|REPLY|SECONDS|SHELL(OPTS)?|SHLVL|SRANDOM|TERM|SRUN_.*|SBATCH_.*|TIMEFORMAT|TMOUT|TMPDIR"
    "|UID|USER|LOGNAME"
)
"""Names with a meaning for bash (its manual, "Shell Variables"), the dynamic loader, Python or
Slurm's commands. bash evaluates the values of some as arithmetic and prints part of them."""


def refusals(job: JobSpec, profile: Profile, *, run_name: str) -> Iterator[Problem]:
    """Yield the reasons why `job` cannot work with `profile`."""
    if job.points:
        yield from _sweep_problems(job, profile)
        yield from _problems_of_points(job, profile, run_name=run_name)
        return
    yield from _node_problems(job, profile)
    yield from _mount_problems(job, profile)
    if job.resources.elastic and not job.retries.in_job:
        yield refusal(
            "elastic-without-restarts",
            "nnodes with min and max needs retries.in_job: without it, the run ends with the "
            "first node that is lost",
            *("resources", "nnodes"),
        )
    if job.resources.elastic and profile.kind == "slurm" and profile.gpus_flag == "gpus-per-task":
        yield refusal(
            "elastic-gpus-per-task",
            "nnodes with min and max does not work with gpus-per-task, since Slurm chooses the "
            "number of tasks; write gpus_flag: gres",
            *("resources", "nnodes"),
        )
    if job.after and profile.kind != "slurm":
        yield refusal(
            "after-elsewhere",
            f"after: only Slurm lets a job wait for another; profile {profile.name!r} is of "
            "another kind; write `toolkit wait RUN && toolkit submit …`, or leave it out",
            "after",
        )
    yield from _log_pattern_problems(job)
    yield from _notify_problems(job, profile)
    for key, reason in leaked_secrets(job):
        yield refusal("secret-in-job", reason, *key)
    for _, reason in leaks_of(profile):
        yield refusal("secret-in-job", reason)
    if profile.kind == "local":
        each = max(job.resources.nproc_per_node, job.resources.gpus_per_node)
        if job.resources.max_nodes * each > _WORKERS_MAX:
            yield refusal(
                "workers-beyond-machine",
                f"{job.resources.max_nodes} simulated nodes with {each} workers or GPUs each are "
                f"more than {_WORKERS_MAX} on this machine; make them fewer: "
                "--set resources.nnodes=2",
                "resources",
            )
        yield from _overwritten_secrets(job)
        yield from _stop_too_long(job, needed_s=job.stop.grace_s, what="stop.grace alone")
    elif profile.kind == "slurm":
        from toolkit.planning import slurm

        if profile.runtime != "bare":
            yield from _image_missing(job, profile)
            yield from slurm.container_problems(job, profile)
        if profile.supervisor == "none":
            yield from _without_supervisor(job, profile)
        yield from _overwritten_secrets(job)
        yield from _stop_too_long(
            job,
            needed_s=slurm.warning_lead_s(job) + slurm.SIGNAL_SLACK_S,
            what=f"stop.grace, {REQUEUE_MARGIN_S}s to requeue and up to {slurm.SIGNAL_SLACK_S}s "
            "that Slurm warns early",
        )
        if slurm.warning_lead_s(job) > slurm.SIGNAL_MAX_S:
            yield refusal(
                "stop-beyond-signal",
                f"stop.grace {format_duration(job.stop.grace_s)} is too long: Slurm warns at "
                f"most {slurm.SIGNAL_MAX_S}s ahead, and {REQUEUE_MARGIN_S}s of them go to the "
                "requeue",
                *("stop", "grace"),
            )
    elif profile.kind == "kubernetes":
        from toolkit.planning.compatibility_kubernetes import kubernetes_problems
        from toolkit.planning.pods import POD_MARGIN_S

        yield from _stop_too_long(
            job,
            needed_s=job.stop.grace_s + POD_MARGIN_S,
            what=f"stop.grace and {POD_MARGIN_S}s for torchrun to end",
        )
        yield from _image_missing(job, profile)
        yield from kubernetes_problems(job, profile, run_name)


def _without_supervisor(job: JobSpec, profile: SlurmProfile) -> Iterator[Problem]:
    """Yield the job's requests that need a supervisor, for a batch script without one."""
    asked: list[tuple[bool, str, tuple[str, ...]]] = [
        (job.resources.elastic, "nnodes with min and max", ("resources", "nnodes")),
        (bool(job.stall_timeout_s), "stall_timeout", ("stall_timeout",)),
        (bool(job.log_pattern), "log_pattern", ("log_pattern",)),
        (job.start == "warm", "start: warm", ("start",)),
        (job.carried, "a function", ()),
        (notify_of(job, profile) is not None, "notify", ("notify",) if job.notify else ()),
        (profile.runtime in ("apptainer", "podman"), f"runtime {profile.runtime}", ()),
        (name_attempt(job.entry), "$TRAIN_ATTEMPT in args", ("args",)),
    ]
    for is_asked, what, place in asked:
        if is_asked:
            yield refusal(
                "needs-supervisor",
                f"{what} needs the supervisor, and profile {profile.name!r} says supervisor: none; "
                "write supervisor: carried, or leave it out",
                *place,
            )


def _log_pattern_problems(job: JobSpec) -> Iterator[Problem]:
    if job.log_pattern and (job.stall_timeout_s == 0 or job.carried):
        why = "stall_timeout is never" if job.stall_timeout_s == 0 else "torchrun forks the workers"
        yield refusal(
            "log-pattern-without-watchdog",
            f"log_pattern needs the watchdog, which is off: {why}; leave one of them out",
            "log_pattern",
        )


def _notify_problems(job: JobSpec, profile: Profile) -> Iterator[Problem]:
    notify = notify_of(job, profile)
    if is_told(job.notify, "stall") and job.stall_timeout_s == 0:
        yield refusal(
            "notify-without-watchdog",
            "notify.events lists stall, but stall_timeout: never disables stall detection; leave "
            "one of them out",
            "notify",
            "events",
        )
    if notify and notify.variable and notify.variable not in job.secrets:
        at, key = "", ["notify", "webhook"]
        if not job.notify:
            at, key = f"profile {profile.name!r}: ", []
        yield refusal(
            "notify-without-secret",
            f"{at}notify.webhook is ${notify.variable}, which is not a secret of the job; name "
            "it under secrets, or give the file that holds the address: notify: {webhook_file: …}",
            *key,
        )
    if notify and profile.kind == "kubernetes" and profile.runs_claim is None:
        yield refusal(
            "notify-without-claim",
            f"notify: profile {profile.name!r} names no runs_claim, so each pod would report "
            "the end of the run; name one, or leave notify out",
            *(["notify"] if job.notify else []),
        )


def _sweep_problems(job: JobSpec, profile: Profile) -> Iterator[Problem]:
    if job.resources.elastic:
        yield refusal(
            "sweep-elastic",
            "sweep: nnodes with min and max is for single runs; write one number of nodes",
            *("resources", "nnodes"),
        )
    limit = job.sweep.max_running if job.sweep else None
    if profile.kind == "kubernetes" and limit and not (job.kubernetes.queue or profile.queue):
        yield refusal(
            "sweep-max-running",
            f"sweep.max_running {limit}: on Kubernetes only the quota of a Kueue queue limits "
            "the active points; set queue, or leave it out: --set sweep.max_running=null",
            *("sweep", "max_running"),
        )


def _problems_of_points(job: JobSpec, profile: Profile, *, run_name: str) -> Iterator[Problem]:
    """Yield the reasons of all points; a reason shared by all points is reported once."""
    points_by_reason: dict[Problem, list[int]] = {}
    longest = f"{run_name}-{job.points[-1].index}"
    for point in job.points:
        for reason in refusals(job.at(point), profile, run_name=longest):
            points_by_reason.setdefault(reason, []).append(point.index)
    for reason, points in points_by_reason.items():
        if len(points) < len(job.points):
            # Named by number, since its name may contain a secret.
            which = f"point {points[0]}{f' and {len(points) - 1} more' if points[1:] else ''}"
            reason = replace(reason, message=f"{which}: {reason.message}", key=("sweep",))
        yield reason


def _node_problems(job: JobSpec, profile: Profile) -> Iterator[Problem]:
    """Compare the requirements of a node with its resources."""
    need, node = job.resources, profile.node
    gpus, workers = need.gpus_per_node, need.nproc_per_node
    has = f"the {node.gpus} GPUs per node of profile {profile.name!r}"
    workers_key = ("resources", "nproc_per_node")
    if node.gpus is not None and gpus > node.gpus:
        message, key = f"gpus_per_node {gpus} exceeds {has}", ("resources", "gpus_per_node")
        yield refusal("gpus-exceed-node", message, *key)
    elif node.gpus and gpus and workers > node.gpus:
        message = f"nproc_per_node {workers} exceeds {has}"
        yield refusal("workers-exceed-gpus", message, *workers_key)
    elif 0 < gpus < workers:
        yield refusal(
            "workers-exceed-gpus",
            f"nproc_per_node {workers} exceeds gpus_per_node {gpus}; each worker needs its own GPU",
            *workers_key,
        )
    if node.cpus is not None and need.cpus > node.cpus:
        yield refusal(
            "cpus-exceed-node",
            f"cpus_per_node {need.cpus} exceeds the {node.cpus} CPUs per node of "
            f"profile {profile.name!r}",
            *("resources", "cpus_per_node"),
        )
    if (
        need.memory_bytes
        and node.memory_bytes is not None
        and need.memory_bytes > node.memory_bytes
    ):
        yield refusal(
            "memory-exceeds-node",
            f"memory {format_size(need.memory_bytes)} exceeds the "
            f"{format_size(node.memory_bytes)} per node of profile {profile.name!r}",
            *("resources", "memory"),
        )
    if need.memory_bytes and need.shm_bytes and need.shm_bytes >= need.memory_bytes:
        yield refusal(
            "shm-exceeds-memory",
            f"shm {format_size(need.shm_bytes)} uses all of memory "
            f"{format_size(need.memory_bytes)}, and shm counts as memory",
            *("resources", "shm"),
        )


def _mount_problems(job: JobSpec, profile: Profile) -> Iterator[Problem]:
    site = getattr(profile, "mounts", ())  # this machine's profile has none
    targets = [mount.target.rstrip("/") for mount in (*site, *job.mounts)]
    if twice := sorted({target for target in targets if targets.count(target) > 1}):
        yield refusal("mount-target-taken", f"two mounts have the target {twice[0]!r}", "mounts")
    if profile.kind == "kubernetes" or (profile.kind == "slurm" and profile.runtime != "bare"):
        return  # the checks of containers include mounts
    for index, mount in enumerate(job.mounts):
        place, key = f"mounts[{index}]", ("mounts", index)
        if mount.kind != "path":
            message = f"{place}: {mount.source!r} exists only on Kubernetes; write a path"
            yield refusal("mount-elsewhere", message, *key)
        elif mount.source != mount.target:
            yield refusal(
                "mount-without-container",
                f"{place}: profile {profile.name!r} runs without containers, so {mount.source!r} "
                f"cannot appear at {mount.target!r}; make source and target equal",
                *key,
            )


def _overwritten_secrets(job: JobSpec) -> Iterator[Problem]:
    """Yield problems with secrets that a script would overwrite or interpret.

    Secrets are exported before the script starts, so the script would use their values. The
    variables of `env` are safe: the script passes them only to torchrun.
    """
    for name in job.secrets:
        if re.fullmatch(SCRIPT_VARIABLES, name):
            what = "is reserved for variables of the rendered script; leave out the underscore"
        elif re.fullmatch(SHELL_VARIABLES, name):
            what = "has a meaning in the shell that starts torchrun; use another name"
        else:
            continue
        yield refusal("secret-overwritten", f"secrets: {name!r} {what}", *("secrets", name))


def _stop_too_long(job: JobSpec, *, needed_s: int, what: str) -> Iterator[Problem]:
    if job.time_limit_s is not None and needed_s >= job.time_limit_s:
        yield refusal(
            "stop-beyond-time-limit",
            f"stop.grace {format_duration(job.stop.grace_s)} does not fit: {what} takes "
            f"{format_duration(needed_s)}, and time_limit is {format_duration(job.time_limit_s)}; "
            "set a longer time_limit, or a shorter stop: {grace: …}",
            "time_limit",
        )


def _image_missing(job: JobSpec, profile: Profile) -> Iterator[Problem]:
    if job.image is None:
        message = f"profile {profile.name!r} runs containers; the job needs the key 'image'"
        yield refusal("image-missing", message, "image")
