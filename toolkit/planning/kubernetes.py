"""Decisions for a Kubernetes cluster: the kind of object, its restarts, the rendezvous."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from toolkit.errors import PlanError
from toolkit.job.kubernetes_options import Patch, Workload
from toolkit.job.spec import JobSpec, Secret
from toolkit.planning import plans, pods
from toolkit.planning.compatibility_kubernetes import name_problems
from toolkit.profile.kubernetes import KubernetesProfile, block_of

STARTED = "TRAIN_START"
"""The variable by which the supervisor distinguishes the starts of all pods."""

PORT = 29500
"""The port of the rendezvous; each pod has a separate network namespace."""

_OPERATORS_PORT = 23456
"""The port that the Training Operator declares in the pods of a PyTorchJob and its Services."""

_INDEX_LABEL = "training.kubeflow.org/replica-index"
"""The label with the index of a PyTorchJob's pod."""

LOST_PODS = 4
"""Default of `retries.preemptions` for a Job or JobSet: how often a pod may be lost (node failure,
eviction, preemption). The supervisor counts failures. Each replacement waits twice as long as the
previous one, 10 s at first (Kubernetes, pod backoff failure policy), also if it only ends a
permanently failed run."""

_INDEX = "JOB_COMPLETION_INDEX"
"""The variable with the index of a pod, set by Kubernetes in Indexed Jobs."""

_START = "batch.kubernetes.io/controller-uid"
"""The pod label with the uid of the Job."""


@dataclass(frozen=True, kw_only=True)
class KubernetesPlan(plans.LaunchPlan):
    """An object that creates one pod per node, and its companions."""

    profile: KubernetesProfile
    workload: Workload
    run_name: str
    """The object's name."""

    pod: pods.Pod
    container: str
    """The name of the pods' container; the operators find it by this name."""

    image: str
    labels: Mapping[str, str]
    """Labels of all objects of the run."""

    workload_labels: Mapping[str, str]
    """Labels of the workload, including those of a queue."""

    restart_policy: str = "Never"
    """PyTorchJob: the restart policy for failed pods."""

    replicas: Mapping[str, int] | None = None
    """PyTorchJob: pods by role."""

    backoff_limit: int | None = None
    """PyTorchJob: container restarts over all pods before it fails; Job and JobSet: how often a
    pod is replaced."""

    rdzv_endpoint: str | None = None
    """`HOST:PORT` of the rendezvous; None if the operator sets the address of its Master."""

    join_timeout_s: int = plans.RENDEZVOUS_TIMEOUT_S
    """How long pods wait for each other."""

    host_port: int | None = None
    """The host port of each pod, so that two runs cannot collide on a node; None without
    `host_network`, or if the operator declares the port."""

    egress: Sequence[Mapping[str, Any]] = ()
    """Networks that the pods may reach, as `ipBlock` entries of a NetworkPolicy."""

    subdomain: str | None = None
    """The Service that provides the host names of a Job's pods."""

    pod_restart_policy: str | None = None
    """The pods' `restartPolicy`; None if the operator sets it."""

    exports: Mapping[str, str] = field(default_factory=dict)
    """Variables that the supervisor sets, since the operator reserves their names."""

    from_labels: Mapping[str, str] = field(default_factory=dict)
    """Variables with the value of a pod label, and that label."""

    parts: tuple["KubernetesPlan", ...] = ()
    """The plans of the points, in order; empty without a sweep."""

    # The profile keys that templates can read.
    namespace = property(attrgetter("profile.namespace"))
    ttl_s = property(attrgetter("profile.ttl_s"))
    image_pull_policy = property(attrgetter("profile.image_pull_policy"))
    network_policy = property(attrgetter("profile.network_policy"))
    training_runtime = property(attrgetter("profile.training_runtime"))
    has_master = property(attrgetter("profile.master"))
    host_network = property(attrgetter("profile.host_network"))

    @property
    def template(self) -> str:
        """The template of this plan, below `templates/`."""
        return f"kubernetes/{self.workload.lower()}.yaml.j2"

    @property
    def pods_selected(self) -> dict[str, str]:
        """The labels that select the run's pods in its NetworkPolicy and Service."""
        return pods.pods_selected(self.workload, self.run_name)

    @property
    def objects(self) -> "Sequence[KubernetesPlan]":
        """The plans to render: this one, or those of a sweep's points."""
        return self.parts or (self,)

    def named(self, name: str) -> "KubernetesPlan":
        """Return this plan for a run with another name, and a run directory of that name.

        Everything else is unchanged, including the caller's changes. The points of a sweep are
        named after it.

        Raises:
            PlanError: the names of the pods would be too long.
        """
        longest = f"{name}-{self.points[-1].index}" if self.points else name
        if problems := list(name_problems(self.job, self.workload, longest)):
            raise PlanError(problems)
        if not self.parts:
            return self._named(self.run_name, name, name)
        parts = tuple(
            part._named(part.run_name, f"{name}-{point.index}", f"{name}/{point.name}", name)
            for part, point in zip(self.parts, self.points, strict=True)
        )
        # The plan of a sweep equals that of its first point, except for the name.
        first = self.parts[0].run_name
        whole = self._named(first, parts[0].run_name, f"{name}/{self.points[0].name}", name)
        return replace(whole, run_name=name, parts=parts)

    def _named(
        self, before: str, name: str, folder: str, sweep_name: str | None = None
    ) -> "KubernetesPlan":
        """Replace the name `before` in every value derived from it."""
        old, new = (
            pods.first_pod(self.workload, one, self.profile.service) for one in (before, name)
        )
        changed = {f"--rdzv-id={before}": f"--rdzv-id={name}"}
        endpoint = self.rdzv_endpoint
        if endpoint is not None and endpoint.startswith(f"{old}:"):
            endpoint = new + endpoint.removeprefix(old)
            changed[f"--rdzv-endpoint={self.rdzv_endpoint}"] = f"--rdzv-endpoint={endpoint}"
        own = {"TRAIN_RUN_DIR": f"{self.profile.runs_dir.rstrip('/')}/{folder}", STARTED: name}
        return replace(
            self,
            run_name=name,
            env={key: own.get(key, value) for key, value in self.env.items()},
            labels=pods.labelled(self.labels, name, sweep_name),
            workload_labels=pods.labelled(self.workload_labels, name, sweep_name),
            pod=self.pod.named(before, name, sweep_name),
            torchrun=tuple(changed.get(option, option) for option in self.torchrun),
            rdzv_endpoint=endpoint,
            subdomain=name if self.subdomain == before else self.subdomain,
        )

    @property
    def keeps_runs(self) -> bool:
        """Whether the run directory outlives the pods."""
        return self.profile.runs_claim is not None

    @property
    def replaces_pods(self) -> bool:
        """Whether pods are replaced regardless of their exit code, like those of a lost node.

        The operator of a PyTorchJob decides by exit codes alone.
        """
        return self.workload != "PyTorchJob" and self.keeps_runs

    @property
    def ends_by_mark(self) -> bool:
        """Whether a permanently failed pod ends the others by a mark in the run directory.

        Without the mark, the operator of a PyTorchJob would delete them, with their logs.
        """
        return self.replaces_pods or (self.max_nodes > 1 and self.keeps_runs)

    @property
    def companion_name(self) -> str:
        """The name of the run's NetworkPolicy, and of the ConfigMap with the supervisor."""
        return pods.companion_name(self.run_name, self.workload)

    @property
    def supervisor(self) -> str | None:
        """The supervisor's file in the pods; None if the toolkit is installed in the image."""
        place = self.profile.supervisor
        if place == "carried":
            return f"{pods.SUPERVISOR}/supervisor.pyz"
        return None if place == "installed" else place

    @property
    def carries_supervisor(self) -> bool:
        """Whether a ConfigMap of the run contains the supervisor."""
        return self.profile.supervisor == "carried"

    @property
    def own_service(self) -> bool:
        """Whether the run creates the Service for the host names of a Job's pods."""
        return self.workload == "Job" and self.profile.service is None

    @property
    def pod_group_api(self) -> str | None:
        """The API version of the run's PodGroup; None without a gang scheduler."""
        return pods.POD_GROUP_APIS.get(self.profile.gang_scheduler or "")

    @property
    def payload_dir(self) -> str | None:
        """The folder of the submitted files in the pods; None without such files."""
        return pods.payload_dir_of(self.job)

    @property
    def entry(self) -> tuple[str, ...]:
        """The program that torchrun starts, and its arguments."""
        if (folder := self.payload_dir) is None or self.job.script is None:
            return self.job.entry
        program = f"{folder}/{self.job.script.rpartition('/')[2]}"
        return (program, *self.job.entry[1:])

    @property
    def patches(self) -> tuple[tuple[str, str, Patch], ...]:
        """Patches of rendered objects: the location of each, the object's kind and the patch."""
        site, job = f"profile {self.profile.name!r}", f"job {self.job.name!r}: kubernetes"
        return tuple(
            (f"{whose}.patches[{at}]", patch.kind or self.workload, patch)
            for whose, patches in ((site, self.profile.patches), (job, self.job.kubernetes.patches))
            for at, patch in enumerate(patches)
        )


def kubernetes_plan(
    job: JobSpec, profile: KubernetesProfile, run_name: str, folder: str
) -> KubernetesPlan:
    """Decide how a job runs on a Kubernetes cluster.

    `run_name` names the object, `folder` the run directory. For the points of a sweep, the object
    names end with the point's number, and the run directories are in the folder.
    """
    if not job.points:
        return _plan(job, profile, run_name, folder)
    parts = tuple(
        _plan(
            job.at(point),
            profile,
            f"{run_name}-{point.index}",
            f"{folder}/{point.name}",
            sweep_name=run_name,
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
    """Return a plan with `sha256sum -c` checksums, by which the pods verify submitted files."""
    env = {**plan.env, "TRAIN_SUBMITTED_SHA256": checksums}
    return replace(plan, env=env, parts=tuple(with_checksums(p, checksums) for p in plan.parts))


def _plan(
    job: JobSpec,
    profile: KubernetesProfile,
    run_name: str,
    folder: str,
    *,
    sweep_name: str | None = None,
) -> KubernetesPlan:
    kind = pods.workload_of(job, profile)
    labels = {
        "app.kubernetes.io/name": job.name,
        "app.kubernetes.io/managed-by": pods.MANAGER,
        pods.RUN_LABEL: run_name,
        **({pods.SWEEP_LABEL: sweep_name} if sweep_name else {}),
    }
    queue_labels = {
        "kueue.x-k8s.io/queue-name": job.kubernetes.queue or profile.queue,
        "kueue.x-k8s.io/priority-class": profile.queue_priority,
    }
    assert job.image is not None
    plan = KubernetesPlan(
        job=job,
        profile=profile,
        torchrun=(),
        env={"TRAIN_RUN_DIR": f"{profile.runs_dir.rstrip('/')}/{folder}"}
        | ({"TRAIN_SUBMITTED_DIR": submitted} if (submitted := pods.payload_dir_of(job)) else {})
        | plans.environment(job, profile),
        secrets={
            name: place or Secret(secret=profile.secret or "", key=name)
            for name, place in job.secrets.items()
        },
        notes=_notes(job, profile),
        workload=kind,
        run_name=run_name,
        pod=pods.pod_of(
            job,
            profile,
            run_name=run_name,
            labels=labels,
            grace_s=job.stop.grace_s + pods.POD_MARGIN_S,
        ),
        # The operators of PyTorchJobs and TrainJobs find the container by its name.
        container="pytorch" if kind == "PyTorchJob" else "node",
        image=job.image,
        labels=labels,
        workload_labels=labels | {key: value for key, value in queue_labels.items() if value},
        egress=tuple(map(block_of, profile.egress)),
    )
    return _of_pytorchjob(plan) if kind == "PyTorchJob" else _of_indexed_pods(plan)


def _of_pytorchjob(plan: KubernetesPlan) -> KubernetesPlan:
    """Add the values for the Training Operator.

    With an `elasticPolicy`, the operator would end the job when the first worker has succeeded, and
    delete the other pods with their logs. Without one, all Workers must succeed (Training Operator
    1.9), so torchrun gets the rendezvous as options.
    """
    job, nodes = plan.job, plan.job.resources.max_nodes
    roles = {"Worker": nodes}
    if plan.profile.master:
        roles = {"Master": 1} | ({"Worker": nodes - 1} if nodes > 1 else {})
    policy, limit = "Never", None
    if job.retries.requeue and plan.profile.runs_claim:
        # The operator retries exit codes from 128 on, without a limit, and others are final: the
        # supervisor counts, in the run directory.
        policy = "ExitCode"
    elif job.retries.requeue:
        # The operator sums the restarts of all pods, and one incident restarts every pod.
        policy, limit = "OnFailure", job.retries.requeue * nodes + 1
    endpoint = f"{pods.first_pod('PyTorchJob', plan.run_name, None)}:{_OPERATORS_PORT}"
    if plan.profile.master:
        # An option would override the operator's variables.
        nproc = f"--nproc-per-node={job.resources.nproc_per_node}"
        # The operator gives the number of restarts to elastic jobs only.
        restarts = [f"--max-restarts={job.retries.in_job}"] if job.retries.in_job else []
        torchrun = (nproc, *restarts, "--tee=3", *plans.carried_options(job))
    else:
        torchrun = _meeting_at(endpoint, plan)
    return replace(
        plan,
        # The pods of successive PyTorchJobs with the same name have the same labels.
        env={**plan.env, STARTED: plan.run_name},
        torchrun=torchrun,
        rdzv_endpoint=None if plan.profile.master else endpoint,
        from_labels={} if plan.profile.master else {_INDEX: _INDEX_LABEL},
        replicas=roles,
        restart_policy=policy,
        backoff_limit=limit,
    )


def _of_indexed_pods(plan: KubernetesPlan) -> KubernetesPlan:
    """Add the values for Indexed Jobs: alone, in a JobSet, or in the JobSet of a TrainJob."""
    job, name = plan.job, plan.run_name
    service = plan.profile.service or name
    first = pods.first_pod(plan.workload, name, plan.profile.service)
    spare = job.retries.preemptions if job.retries.preemptions is not None else LOST_PODS
    in_jobset = plan.workload != "Job"
    # Trainer reserves torchrun's variables, and refuses them in a TrainJob.
    kept_back = [n for n in plan.env if plan.workload == "TrainJob" and n.startswith("PET_")]
    return replace(
        plan,
        env={name: value for name, value in plan.env.items() if name not in kept_back},
        exports={name: plan.env[name] for name in kept_back},
        torchrun=_meeting_at(f"{first}:{PORT}", plan),
        rdzv_endpoint=f"{first}:{PORT}",
        host_port=PORT if plan.profile.host_network else None,
        backoff_limit=job.retries.requeue + (spare if plan.keeps_runs else 0),
        subdomain=None if in_jobset else service,
        pod_restart_policy="Never",
        from_labels={STARTED: _START},
    )


def _meeting_at(endpoint: str, plan: KubernetesPlan) -> tuple[str, ...]:
    """Return torchrun's options for a c10d rendezvous on the first pod."""
    return (
        *plans.torchrun_options(plan.job),
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={plan.run_name}",
        "--tee=3",
    )


def _notes(job: JobSpec, profile: KubernetesProfile) -> tuple[str, ...]:
    """Return notes for the user: data that will be lost, and relaxed security."""
    name, notes = profile.name, []
    if profile.runs_claim is None:
        notes.append(f"profile {name!r} names no runs_claim: checkpoints are lost with their pod")
        if pods.workload_of(job, profile) == "TrainJob":
            notes.append(
                "without runs_claim, the pods of a TrainJob restart after every failure, "
                "up to the limit of its TrainingRuntime"
            )
        elif job.retries.requeue:
            notes.append(
                "without runs_claim, pods do not count failures: the cluster retries each of them, "
                "up to its own limit, unless the pod itself finds that no restart can help"
            )
    if plans.notify_of(job, profile) and profile.network_policy and not profile.egress:
        notes.append(
            f"notify: the NetworkPolicy of profile {name!r} keeps pods from a webhook outside; "
            "name its network under egress"
        )
    if job.resources.shm_bytes and not job.resources.memory_bytes:
        notes.append(
            "resources.shm without memory: it counts against a limit that the namespace may set, "
            "and as memory of the node where it sets none"
        )
    for loose, what in (
        (profile.host_network, "host_network: pods see and use every port of their node"),
        (profile.capabilities, f"capabilities {', '.join(profile.capabilities)} are added"),
        (profile.run_as_user == 0, "run_as_user 0: the container runs as root"),
        (not profile.read_only_root, "read_only_root is off: the image's files can be changed"),
    ):
        if loose:
            notes.append(f"profile {name!r} loosens the pods' security: {what}")
    return tuple(notes)
