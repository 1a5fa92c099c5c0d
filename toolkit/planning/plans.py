"""The decisions for a launch, as plain values: one class per kind of site."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.errors import PlanError
from toolkit.job.kubernetes_options import Patch, Workload
from toolkit.job.spec import JobSpec, Retries, Secret
from toolkit.job.sweeps import Point
from toolkit.planning.compatibility_kubernetes import name_problems
from toolkit.planning.pods import POD_GROUP_APIS, Pod, carried, first_pod, labelled, payload_dir_of
from toolkit.planning.stop_times import REQUEUE_MARGIN_S
from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile

__all__ = [
    "RENDEZVOUS_TIMEOUT_S",
    "STARTED",
    "KubernetesPlan",
    "LaunchPlan",
    "LocalPlan",
    "SlurmPlan",
]

RENDEZVOUS_TIMEOUT_S = 600
"""How long nodes wait for each other; starting 512 containers takes minutes."""

STARTED = "TRAIN_START"
"""The variable by which the entrypoint of pods distinguishes the starts of all of them."""

RENDEZVOUS_PORTS = (61000, 4000)
"""First port and how many: above Linux's ephemeral range, which ends at 60999."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What every launcher needs to know to start one torchrun per node."""

    job: JobSpec
    """The job."""

    profile: Profile
    """The site."""

    torchrun: tuple[str, ...]
    """torchrun's options that are the same on every node and that the site does not set itself."""

    env: Mapping[str, str]
    """The environment of every worker, by name."""

    secrets: Mapping[str, Secret | None]
    """Secret variables, and where their values are found."""

    notes: tuple[str, ...] = ()
    """What the user should know, though it stops nothing."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def digest(self) -> str:
        """A short hash of the job, which differs between two versions of it."""
        return self.job.digest

    @property
    def min_nodes(self) -> int:
        """Number of nodes without which the run cannot go on."""
        return self.job.resources.min_nodes

    @property
    def max_nodes(self) -> int:
        """Number of nodes that the run has when none is missing."""
        return self.job.resources.max_nodes

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change while the run lives."""
        return self.job.resources.elastic

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs of each node."""
        return self.job.resources.gpus_per_node

    @property
    def nproc_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.job.resources.nproc_per_node

    @property
    def grace_s(self) -> int:
        """Seconds that a checkpoint may take when the run is stopped."""
        return self.job.stop.grace_s

    @property
    def time_limit_s(self) -> int | None:
        """Seconds that the run may take; None without a limit."""
        return self.job.time_limit_s

    @property
    def workdir(self) -> str | None:
        """The folder in which torchrun starts; None for that of the script."""
        return self.job.workdir

    @property
    def program(self) -> tuple[str, ...]:
        """What torchrun starts, without the arguments that differ between points of a sweep."""
        return self.job.program

    @property
    def mounted_sources(self) -> tuple[str, ...]:
        """Folders that must exist where the script runs."""
        return tuple(mount.source for mount in self.job.mounts)

    @property
    def retries(self) -> Retries:
        """The limits of the retry policy."""
        return self.job.retries

    @property
    def failure_limit(self) -> int:
        """Number of failed attempts after which another one may follow."""
        return self.job.retries.requeue

    @property
    def restarts_in_job(self) -> bool:
        """Whether torchrun would start the workers more than once more, also if they fail alike."""
        return self.job.retries.in_job > 1

    @property
    def compares_failures(self) -> bool:
        """Whether a failure may be the second of its kind."""
        return bool(self.job.retries.in_job or self.job.retries.requeue)

    @property
    def takes_turns(self) -> bool:
        """Whether the script can be one of several jobs that go on with one run in turn."""
        return False

    @property
    def starts_once(self) -> bool:
        """Whether nothing starts the ranks again: neither torchrun, nor Slurm, nor another job."""
        return not (self.compares_failures or self.takes_turns)

    def in_turns(self) -> "LaunchPlan":
        """Return this plan for several jobs that go on with one run in turn.

        Raises:
            PlanError: the site is no Slurm cluster.
        """
        raise self.not_on_slurm("chain")

    def not_on_slurm(self, what: str) -> PlanError:
        """Return the error about a wish that only Slurm can grant."""
        verb, name = "are" if " " in what else "is", self.profile.name
        return PlanError(
            f"{what} {verb} Slurm's, and profile {name!r} is of another kind; write "
            "`toolkit wait RUN && toolkit submit …`"
        )

    @property
    def has_limits(self) -> bool:
        """Whether the script counts the attempts before it."""
        return self.failure_limit > 0 or self.takes_turns

    @property
    def counts_attempts(self) -> bool:
        """Whether each start is an attempt with a folder of its own."""
        return True

    @property
    def secret_files(self) -> dict[str, str]:
        """Secrets that the script reads from a file, and which."""
        places = self.secrets.items()
        return {name: place.file for name, place in places if place and place.file}

    @property
    def exported_secrets(self) -> tuple[str, ...]:
        """Secrets that come from the environment in which the script is submitted."""
        return tuple(name for name in self.secrets if name not in self.secret_files)

    @property
    def static(self) -> bool:
        """Whether the nodes meet by the numbers that the site gives them, rather than by c10d."""
        return "--rdzv-backend=static" in self.torchrun

    @property
    def entry(self) -> tuple[str, ...]:
        """What torchrun starts, and its arguments."""
        return self.job.entry

    @property
    def carried(self) -> bool:
        """Whether what the workers run lies in the run directory, where the toolkit has put it."""
        return carried(self.job)

    @property
    def stop_timeout_s(self) -> int:
        """Seconds that a cancelled run may take to end by itself."""
        return self.job.stop.grace_s + REQUEUE_MARGIN_S


@dataclass(frozen=True, kw_only=True)
class LocalPlan(LaunchPlan):
    """N torchrun agents on this machine stand for N nodes."""

    profile: LocalProfile
    """The site."""

    @property
    def default_run_dir(self) -> str:
        """The path of new run directories, without the id of the job at its end."""
        return f"{self.profile.runs_dir}/{self.job.name}"

    visible_devices: tuple[tuple[int, ...], ...]
    """The GPUs of each node, counted over those of this machine, or those that the user may use."""

    ports: tuple[int, int] = RENDEZVOUS_PORTS
    """First port that the rendezvous may use, and how many."""


@dataclass(frozen=True, kw_only=True)
class SlurmPlan(LaunchPlan):
    """A batch script with one srun task per node."""

    profile: SlurmProfile
    """The site."""

    sbatch: tuple[tuple[str, str | None], ...]
    """Options of sbatch, in order."""

    chain: bool = False
    """Whether several jobs are submitted, each of which goes on where the last one ended."""

    @property
    def takes_turns(self) -> bool:
        """Whether the script can be one of several jobs that go on with one run in turn."""
        return not self.points and (self.chain or self.failure_limit > 0)

    def in_turns(self) -> "SlurmPlan":
        """Return this plan for several jobs that go on with one run in turn."""
        return replace(self, chain=True)

    @property
    def runtime(self) -> str:
        """What starts containers; `bare` without them."""
        return self.profile.runtime

    @property
    def image_file(self) -> str | None:
        """The path of the image, which must exist where the script runs; None for a name."""
        return self.image if self.image is not None and self.image.startswith("/") else None

    @property
    def image_is_local(self) -> bool:
        """Whether the image is only in podman's own store, so that nothing can be pulled."""
        return self.image is not None and self.image.startswith("localhost/")

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules to load."""
        return tuple(self.profile.modules)

    @property
    def venv(self) -> str | None:
        """The virtual environment that has torch."""
        return None if self.profile.venv is None else self.profile.below(self.profile.venv)

    @property
    def prolog(self) -> tuple[str, ...]:
        """The site's lines of bash before the environment is made."""
        return tuple(self.profile.prolog)

    @property
    def epilog(self) -> tuple[str, ...]:
        """The site's lines of bash after the end."""
        return tuple(self.profile.epilog)

    @property
    def container_options(self) -> tuple[str, ...]:
        """The site's options of the container runtime."""
        return tuple(self.profile.container_options)

    @property
    def mounted_sources(self) -> tuple[str, ...]:
        """Folders that must exist where the script runs."""
        return tuple(mount.source for mount in (*self.profile.mounts, *self.job.mounts))

    @property
    def default_run_dir(self) -> str:
        """The path of new run directories, without the id of the job at its end."""
        return self.profile.below(f"{self.profile.runs_dir}/{self.job.name}")

    @property
    def join_sbatch(self) -> tuple[tuple[str, str | None], ...]:
        """Options of a job of one more node for an elastic run, which nothing queues again."""
        own = {"job-name": f"{self.job.name}-join", "nodes": "1"}
        left_out = ("no-kill", "requeue", "signal", "output", "dependency", "array")
        kept = ((name, value) for name, value in self.sbatch if name not in left_out)
        return (*((name, own.get(name, value)) for name, value in kept), ("no-requeue", None))

    ports: tuple[int, int] = RENDEZVOUS_PORTS
    """First port that the rendezvous may use, and how many."""

    join_timeout_s: int = RENDEZVOUS_TIMEOUT_S
    """How long nodes wait for each other."""

    points: tuple[Point, ...] = ()
    """The points of a sweep, each a task of the job array; none without one."""

    image: str | None = None
    """The container image as the site's runtime names it; None without containers."""

    mounts: tuple[str, ...] = ()
    """What the container sees beside the run directory: `SOURCE:TARGET` or `SOURCE:TARGET:ro`."""

    shm: str = "0"
    """Size of the container's /dev/shm for podman; 0 is no limit of its own."""


@dataclass(frozen=True, kw_only=True)
class KubernetesPlan(LaunchPlan):
    """An object that creates one pod per node, and its companions."""

    profile: KubernetesProfile
    """The site."""

    workload: Workload
    """The object's kind."""

    run_name: str
    """The object's name."""

    pod: Pod
    """What the pods are."""

    container: str
    """The name of the pods' container, which the operators find it by."""

    image: str
    """The container image."""

    labels: Mapping[str, str]
    """Labels of everything that belongs to the run."""

    workload_labels: Mapping[str, str]
    """Labels of the object, with those of a queue."""

    @property
    def has_limits(self) -> bool:
        """Whether the entrypoint counts its earlier starts; Kubernetes may start any pod again."""
        return True

    @property
    def counts_attempts(self) -> bool:
        """Whether each start is an attempt with a folder of its own."""
        return self.gang

    restart_policy: str = "Never"
    """PyTorchJob: what follows when a pod has failed."""

    replicas: Mapping[str, int] | None = None
    """PyTorchJob: pods by role."""

    backoff_limit: int | None = None
    """PyTorchJob: container restarts over all pods before it has failed; Job: failures of one pod;
    JobSet: restarts of all pods together."""

    meeting: str | None = None
    """`HOST:PORT` where the pods meet; None if the operator sets it."""

    join_timeout_s: int = RENDEZVOUS_TIMEOUT_S
    """How long pods wait for each other."""

    host_port: int | None = None
    """The port that each pod takes of its node, so that no two runs meet on one; None without
    `host_network`, and where the operator declares it."""

    egress: Sequence[Mapping[str, Any]] = ()
    """Networks that the pods may reach, as a NetworkPolicy has them: `ipBlock`."""

    subdomain: str | None = None
    """The Service that gives the pods of a Job their names."""

    pod_restart_policy: str | None = None
    """What the kubelet does; None where the operator decides."""

    exports: Mapping[str, str] = field(default_factory=dict)
    """Variables that the entrypoint sets, since the operator takes them for its own."""

    from_labels: Mapping[str, str] = field(default_factory=dict)
    """Variables that hold a label of their pod, and which."""

    gang: bool = False
    """Whether all pods start again when one has failed."""

    points: tuple[Point, ...] = ()
    """The points of a sweep, each an object of its own; none without one."""

    parts: tuple["KubernetesPlan", ...] = ()
    """Their plans, in their order; none without a sweep."""

    def named(self, name: str) -> "KubernetesPlan":
        """Return this plan for a run of another name, with a run directory of that name.

        All else stays as it is, also what the caller has changed. The points of a sweep are named
        after it.

        Raises:
            PlanError: the names of the pods would be too long.
        """
        longest = f"{name}-{self.points[-1].index}" if self.points else name
        if problems := list(name_problems(self.job, self.workload, longest)):
            raise PlanError(problems)
        if not self.parts:
            return self._named(self.run_name, name, name)
        pairs = zip(self.parts, self.points, strict=True)
        parts = tuple(
            part._named(part.run_name, f"{name}-{point.index}", f"{name}/{point.name}", name)
            for part, point in pairs
        )
        first = self.parts[
            0
        ].run_name  # all but the name of a sweep's own plan is its first point's
        folder = f"{name}/{self.points[0].name}"
        whole = self._named(first, parts[0].run_name, folder, name)
        return replace(whole, run_name=name, parts=parts)

    def _named(
        self, before: str, name: str, folder: str, sweep_name: str | None = None
    ) -> "KubernetesPlan":
        """Put another name wherever the name `before` has decided something."""
        service = self.profile.service
        old, new = (first_pod(self.workload, one, service) for one in (before, name))
        changed = {f"--rdzv-id={before}": f"--rdzv-id={name}"}
        meeting = self.meeting
        if meeting is not None and meeting.startswith(f"{old}:"):
            meeting = new + meeting.removeprefix(old)
            changed[f"--rdzv-endpoint={self.meeting}"] = f"--rdzv-endpoint={meeting}"
        own = {"TRAIN_RUN_DIR": f"{self.profile.runs_dir.rstrip('/')}/{folder}", STARTED: name}
        labels = labelled(self.labels, name, sweep_name)
        return replace(
            self,
            run_name=name,
            env={key: own.get(key, value) for key, value in self.env.items()},
            labels=labels,
            workload_labels=labelled(self.workload_labels, name, sweep_name),
            pod=self.pod.named(before, name, sweep_name),
            torchrun=tuple(changed.get(option, option) for option in self.torchrun),
            meeting=meeting,
            subdomain=name if self.subdomain == before else self.subdomain,
        )

    @property
    def namespace(self) -> str:
        """The namespace of everything that belongs to the run."""
        return self.profile.namespace

    @property
    def keeps_runs(self) -> bool:
        """Whether the run directory outlives the pods."""
        return self.profile.runs_claim is not None

    @property
    def ttl_s(self) -> int | None:
        """Seconds after the end until the cluster deletes the object; None for never."""
        return self.profile.ttl_s

    @property
    def image_pull_policy(self) -> str:
        """When nodes pull the image."""
        return self.profile.image_pull_policy

    @property
    def network_policy(self) -> bool:
        """Whether the run brings its own NetworkPolicy."""
        return self.profile.network_policy

    @property
    def own_service(self) -> bool:
        """Whether the run brings the Service that names the pods of a Job."""
        return self.workload == "Job" and self.profile.service is None

    @property
    def pod_group_api(self) -> str | None:
        """The API version of the run's PodGroup; None without a gang scheduler."""
        return POD_GROUP_APIS.get(self.profile.gang_scheduler or "")

    @property
    def training_runtime(self) -> str:
        """TrainJob: the runtime of the namespace that it refers to."""
        return self.profile.training_runtime

    @property
    def has_master(self) -> bool:
        """PyTorchJob: whether the first pod is a Master of its own."""
        return self.profile.master

    @property
    def payload_dir(self) -> str | None:
        """The folder in which pods find the run's submitted files; None without such files."""
        return payload_dir_of(self.job)

    @property
    def entry(self) -> tuple[str, ...]:
        """What torchrun starts, and its arguments."""
        if (folder := self.payload_dir) is None or self.job.script is None:
            return self.job.entry
        return (f"{folder}/{self.job.script.rpartition('/')[2]}", *self.job.args)

    @property
    def patches(self) -> tuple[tuple[str, Patch], ...]:
        """What to change in the rendered objects, and where it is wished: profile, then job."""
        site, job = f"profile {self.profile.name!r}", f"job {self.job.name!r}: kubernetes"
        return tuple(
            (f"{whose}.patches[{at}]", patch)
            for whose, patches in (
                (site, self.profile.patches),
                (job, self.job.kubernetes.patches),
            )
            for at, patch in enumerate(patches)
        )
