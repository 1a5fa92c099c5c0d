"""Decisions for a Kubernetes cluster: the kind of object, its restarts, where pods meet."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.job.kubernetes_options import Workload, block_of
from toolkit.job.spec import JobSpec, Secret
from toolkit.planning.plans import STARTED, KubernetesPlan
from toolkit.planning.pods import (
    MANAGER,
    RUN_LABEL,
    SWEEP_LABEL,
    first_pod,
    payload_dir_of,
    pod_of,
    workload_of,
)
from toolkit.planning.stop_times import POD_MARGIN_S
from toolkit.planning.torchrun import carried_options, environment, torchrun_options
from toolkit.profile import KubernetesProfile

__all__ = ["kubernetes_plan", "with_checksums"]

PORT = 29500
"""Where the pods of a run meet; each pod has a network of its own."""

SPARE_RESTARTS = 100
"""Restarts beyond `retries.requeue` that the cluster grants: preemptions, which count nothing, use
them up, too. The entrypoint alone counts failures."""

CONTAINERS: dict[Workload, str] = {
    "PyTorchJob": "pytorch",
    "TrainJob": "node",
    "JobSet": "node",
    "Job": "node",
}
"""The operators of the first two find the container by its name."""


_RESTARTS = "jobset.sigs.k8s.io/restart-attempt"
"""The label of pods in which JobSet counts the starts of all of them."""

_START = "batch.kubernetes.io/controller-uid"
"""The label of pods that names the Job they belong to; a JobSet makes a new one for each start."""


def kubernetes_plan(
    job: JobSpec, profile: KubernetesProfile, run_name: str, folder: str
) -> KubernetesPlan:
    """Decide how a job runs on a Kubernetes cluster.

    Args:
        job: What to run.
        profile: Where.
        run_name: The name of the object; those of a sweep's points have their number after it.
        folder: The name of the run directory; those of a sweep's points lie in it.
    """
    if not job.points:
        return _plan(job, profile, run_name, folder)
    parts = tuple(
        _plan(
            job.at(point),
            profile,
            f"{run_name}-{point.index}",
            f"{folder}/{point.name}",
            {SWEEP_LABEL: run_name},
        )
        for point in job.points
    )
    first, limit = parts[0], job.sweep.max_running if job.sweep else None
    counts = f"sweep.max_running {limit} is left to the quota of the queue" if limit else None
    return replace(
        first,
        job=job,
        run_name=run_name,
        notes=(*first.notes, *([counts] if counts else ())),
        points=job.points,
        parts=parts,
    )


def with_checksums(plan: KubernetesPlan, checksums: str) -> KubernetesPlan:
    """Return a plan whose pods check the files that they are submitted with.

    Args:
        plan: The plan that is submitted.
        checksums: Lines as `sha256sum -c` reads them.
    """
    env = {**plan.env, "TRAIN_SUBMITTED_SHA256": checksums}
    return replace(plan, env=env, parts=tuple(with_checksums(p, checksums) for p in plan.parts))


def _plan(
    job: JobSpec,
    profile: KubernetesProfile,
    run_name: str,
    folder: str,
    more_labels: Mapping[str, str] | None = None,
) -> KubernetesPlan:
    """Decide how a plain job runs."""
    kind = workload_of(job, profile)
    labels = {
        "app.kubernetes.io/name": job.name,
        "app.kubernetes.io/managed-by": MANAGER,
        RUN_LABEL: run_name,
        **(more_labels or {}),
    }
    assert job.image is not None
    plan = KubernetesPlan(
        job=job,
        profile=profile,
        torchrun=(),
        env={"TRAIN_RUN_DIR": f"{profile.runs_dir.rstrip('/')}/{folder}"}
        | ({"TRAIN_SUBMITTED_DIR": submitted} if (submitted := payload_dir_of(job)) else {})
        | environment(job, profile),
        secrets={
            name: place or Secret(secret=profile.secret or "", key=name)
            for name, place in job.secrets.items()
        },
        notes=_notes(job, profile),
        workload=kind,
        run_name=run_name,
        pod=pod_of(
            job,
            profile,
            run_name=run_name,
            labels=labels,
            grace_s=job.stop.grace_s + POD_MARGIN_S,
        ),
        container=CONTAINERS[kind],
        image=job.image,
        labels=labels,
        workload_labels=labels | _queue_labels(job, profile),
        egress=tuple(map(block_of, profile.egress)),
    )
    return _of_pytorchjob(plan) if kind == "PyTorchJob" else _of_indexed_pods(plan)


def _of_pytorchjob(plan: KubernetesPlan) -> KubernetesPlan:
    """Add what the Training Operator needs; the operator itself sets the endpoint."""
    job, nodes = plan.job, plan.job.resources.max_nodes
    roles = {"Worker": nodes}
    if plan.profile.master:
        roles = {"Master": 1} | ({"Worker": nodes - 1} if nodes > 1 else {})
    policy, limit = "Never", None
    if job.retries.requeue and plan.profile.runs_claim:
        # Statuses from 128 on are tried again, others are final, and no limit counts: the
        # entrypoint does, in the run directory.
        policy = "ExitCode"
    elif job.retries.requeue:
        # The operator adds up the restarts of all pods, and one incident restarts each of them.
        policy, limit = "OnFailure", job.retries.requeue * nodes + 1
    return replace(
        plan,
        # The pods of successive PyTorchJobs of one name have the same labels.
        env={**plan.env, STARTED: plan.run_name},
        # An option would win over the operator's variables.
        torchrun=(
            f"--nproc-per-node={job.resources.nproc_per_node}",
            "--tee=3",
            *carried_options(job),
        ),
        replicas=roles,
        restart_policy=policy,
        backoff_limit=limit,
    )


def _of_indexed_pods(plan: KubernetesPlan) -> KubernetesPlan:
    """Add what Indexed Jobs need, alone, in a JobSet, or in the JobSet of a TrainJob."""
    job, name = plan.job, plan.run_name
    service = plan.profile.service or name
    first = first_pod(plan.workload, name, plan.profile.service)
    spare = SPARE_RESTARTS if job.retries.requeue and plan.profile.runs_claim else 0
    in_jobset = plan.workload != "Job"
    # Trainer refuses variables of torchrun in a TrainJob, whose names are its to use.
    kept_back = [n for n in plan.env if plan.workload == "TrainJob" and n.startswith("PET_")]
    return replace(
        plan,
        env={name: value for name, value in plan.env.items() if name not in kept_back},
        exports={name: plan.env[name] for name in kept_back},
        torchrun=(
            *torchrun_options(job),
            f"--rdzv-endpoint={first}:{PORT}",
            f"--rdzv-id={name}",
            "--tee=3",
        ),
        meeting=f"{first}:{PORT}",
        host_port=PORT if plan.profile.host_network else None,
        backoff_limit=job.retries.requeue + spare,
        subdomain=None if in_jobset else service,
        pod_restart_policy="Never",
        from_labels=({"TRAIN_ATTEMPT": _RESTARTS} if in_jobset else {}) | {STARTED: _START},
        gang=in_jobset,
    )


def _queue_labels(job: JobSpec, profile: KubernetesProfile) -> dict[str, str]:
    labels = {}
    if queue := job.kubernetes.queue or profile.queue:
        labels["kueue.x-k8s.io/queue-name"] = queue
    if profile.queue_priority:
        labels["kueue.x-k8s.io/priority-class"] = profile.queue_priority
    return labels


def _notes(job: JobSpec, profile: KubernetesProfile) -> tuple[str, ...]:
    """Return what the user should know: data that will be lost, and loosened security."""
    name, notes = profile.name, []
    if profile.runs_claim is None:
        notes.append(f"profile {name!r} names no runs_claim: checkpoints are lost with their pod")
        if job.retries.requeue:
            notes.append(
                "without runs_claim nobody can count failures or tell those that may pass: each "
                "is tried again, as often as the cluster counts"
            )
    if job.resources.shm_bytes and not job.resources.memory_bytes:
        notes.append(
            "resources.shm without memory: it counts against a limit that the namespace may set, "
            "and as memory of the node where it sets none"
        )
    for loose, what in (
        (profile.host_network, "host_network: pods see and use every port of their node"),
        (profile.capabilities, f"capabilities {', '.join(profile.capabilities)} are kept"),
        (profile.run_as_user == 0, "run_as_user 0: the container runs as root"),
        (not profile.read_only_root, "read_only_root is off: the image's files can be changed"),
    ):
        if loose:
            notes.append(f"profile {name!r} loosens the pods' security: {what}")
    return tuple(notes)
