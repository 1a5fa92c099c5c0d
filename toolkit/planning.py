"""From a job and a profile to a launch plan: every decision, as plain values.

Pure: no clock, environment, network or scheduler. What cannot work is refused here, with the
arithmetic in the message; templates only place what is decided here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import overload

from toolkit.containers import image_for, mounts_for
from toolkit.errors import PlanError
from toolkit.feasibility import POD_MARGIN_S, REQUEUE_MARGIN_S, cpus_of, refusals, warning_lead_s
from toolkit.fields import IN_RUN_DIR
from toolkit.profile import KubernetesProfile, LocalProfile, Profile, SlurmProfile
from toolkit.quantities import (
    format_duration,
    kubernetes_size,
    slurm_megabytes,
    slurm_time,
)
from toolkit.sbatch_options import SbatchValue, merged
from toolkit.spec import JobSpec, Secret
from toolkit.sweeps import Point, Sweep

__all__ = ["KubernetesPlan", "LaunchPlan", "LocalPlan", "SlurmPlan", "plan"]

RENDEZVOUS_TIMEOUT_S = 600
"""How long nodes wait for each other; starting 512 containers takes minutes."""

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
    def secret_files(self) -> dict[str, str]:
        """Secrets that the script reads from a file, and which."""
        places = self.secrets.items()
        return {name: place.file for name, place in places if place and place.file}

    @property
    def exported_secrets(self) -> tuple[str, ...]:
        """Secrets that come from the environment of whoever starts the script."""
        return tuple(name for name in self.secrets if name not in self.secret_files)

    @property
    def entry(self) -> tuple[str, ...]:
        """What torchrun starts, and its arguments."""
        return self.job.entry

    @property
    def carried(self) -> bool:
        """Whether what the workers run lies in the run directory, where the toolkit has put it."""
        return _carried(self.job)

    @property
    def stop_timeout_s(self) -> int:
        """Seconds that a cancelled run may take to end by itself."""
        return self.job.stop.grace_s + REQUEUE_MARGIN_S


@dataclass(frozen=True, kw_only=True)
class LocalPlan(LaunchPlan):
    """N torchrun agents on this machine stand for N nodes."""

    profile: LocalProfile
    """The site."""

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
    """A PyTorchJob of workers that meet by c10d."""

    profile: KubernetesProfile
    """The site."""

    run_name: str
    """The object's name."""

    requests: Mapping[str, str]
    """Resources of each pod; requests and limits are the same."""

    shm: str | None
    """Size of /dev/shm; half of the memory limit where it is left out."""

    grace_s: int
    """`terminationGracePeriodSeconds`."""

    restart_policy: str
    """What the kubelet does when torchrun fails."""

    backoff_limit: int | None
    """Container restarts over all pods before the job has failed."""

    image: str
    """The container image."""


@overload
def plan(job: JobSpec, profile: LocalProfile, *, run_name: str | None = ...) -> LocalPlan: ...
@overload
def plan(job: JobSpec, profile: SlurmProfile, *, run_name: str | None = ...) -> SlurmPlan: ...
@overload
def plan(
    job: JobSpec, profile: KubernetesProfile, *, run_name: str | None = ...
) -> KubernetesPlan: ...
@overload
def plan(job: JobSpec, profile: Profile, *, run_name: str | None = ...) -> LaunchPlan: ...


def plan(job: JobSpec, profile: Profile, *, run_name: str | None = None) -> LaunchPlan:
    """Decide how `job` runs on the site of `profile`.

    Args:
        job: What to run.
        profile: Where.
        run_name: The name of this run where the scheduler must know it (Kubernetes); the job's
            own name where it is left out.

    Raises:
        PlanError: Every reason why this job cannot work there.
    """
    name = run_name or job.name
    if problems := refusals(job, profile, run_name=name):
        raise PlanError(problems)
    match profile:
        case LocalProfile():
            return _local(job, profile)
        case SlurmProfile():
            return _slurm(job, profile)
        case KubernetesProfile():
            # Rendered without a name, the same job is the same run, and another job is another.
            return _kubernetes(job, profile, name, run_name or f"{job.name}-{job.digest}")


def _carried(job: JobSpec) -> bool:
    return job.script is not None and job.script.startswith(IN_RUN_DIR)


def _torchrun(job: JobSpec) -> tuple[str, ...]:
    """Return the options of torchrun that are the same on every node of every site."""
    need = job.resources
    nnodes = f"{need.min_nodes}:{need.max_nodes}" if need.elastic else need.max_nodes
    return (
        f"--nnodes={nnodes}",
        f"--nproc-per-node={job.resources.nproc_per_node}",
        f"--max-restarts={job.retries.in_job}",
        "--rdzv-backend=c10d",
        # torchrun has imported torch already, which takes each worker seconds.
        *(("--start-method=fork", "--run-path") if _carried(job) else ()),
    )


def _env(job: JobSpec, profile: Profile) -> dict[str, str]:
    """Return the environment of the workers; what the job itself says wins."""
    env = {
        # One store for all attempts makes attempt 1 read the keys of attempt 0 and hang.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # What a worker prints is seen at once; Python would keep back some kilobytes of it.
        "PYTHONUNBUFFERED": "1",
        # As variables, since a torchrun that lacks an option ignores them.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": str(job.stop.grace_s),
    }
    if _in_container(profile):
        # The root file system may be read-only, and the user has no home of its own there.
        env |= {"HOME": "/tmp", "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor"}
    if not isinstance(profile, KubernetesProfile):  # there, each pod has a log of its own
        env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    if job.resources.cpus_per_node or job.resources.nproc_per_node > 1:
        threads = max(1, cpus_of(job) // job.resources.nproc_per_node)
        env["OMP_NUM_THREADS"] = str(threads)
    if profile.network_interface:
        env["NCCL_SOCKET_IFNAME"] = profile.network_interface
        env["GLOO_SOCKET_IFNAME"] = profile.network_interface
    env |= profile.env | job.env
    return {name: value for name, value in env.items() if name not in job.secrets}


def _local(job: JobSpec, profile: LocalProfile) -> LocalPlan:
    gpus = job.resources.gpus_per_node
    devices = tuple(
        tuple(range(node * gpus, (node + 1) * gpus)) for node in range(job.resources.max_nodes)
    )
    return LocalPlan(
        job=job,
        profile=profile,
        torchrun=_torchrun(job),
        env=_env(job, profile),
        secrets=job.secrets,
        visible_devices=devices,
    )


def _slurm(job: JobSpec, profile: SlurmProfile) -> SlurmPlan:
    need, points = job.resources, job.points
    chosen = merged([_site_options(profile), profile.sbatch, job.sbatch])
    gpus = ":".join(filter(None, [profile.gpu_type, str(need.gpus_per_node)]))
    if need.gpus_per_node and profile.gpus_flag == "gres":
        other = chosen.pop("gres", None)
        gpu_option = ("gres", f"gpu:{gpus}" + (f",{other}" if other else ""))
    else:
        gpu_option = (profile.gpus_flag, gpus)
    sbatch: list[tuple[str, str | None]] = [
        ("job-name", job.name),
        # Slurm gives the fewest nodes of a range where --ntasks-per-node is given.
        ("nodes", f"{need.min_nodes}-{need.max_nodes}" if need.elastic else str(need.max_nodes)),
        ("no-kill", "") if need.elastic else ("ntasks-per-node", "1"),
        ("cpus-per-task", str(cpus_of(job))),
        ("mem", slurm_megabytes(need.memory_bytes) if need.memory_bytes else None),
        *([gpu_option] if need.gpus_per_node else []),
        ("time", slurm_time(job.time_limit_s) if job.time_limit_s else None),
        *((name, value or "") for name, value in chosen.items()),
        ("signal", f"B:USR1@{warning_lead_s(job)}"),
        ("requeue" if job.retries.requeue else "no-requeue", ""),
        ("open-mode", "append"),
        ("output", f"{job.name}-%A_%a.out" if points else f"{job.name}-%j.out"),
        *([("array", array_of(range(len(points)), job.sweep))] if points and job.sweep else []),
    ]
    notes = []
    if job.stop.grace_s > profile.kill_wait_s:
        notes.append(
            f"scancel by hand and preemption leave {format_duration(profile.kill_wait_s)} "
            f"(KillWait of profile {profile.name!r}), less than stop.grace "
            f"{format_duration(job.stop.grace_s)}; a checkpoint that takes longer is lost then"
        )
    return SlurmPlan(
        job=job,
        profile=profile,
        torchrun=_torchrun(job),
        env=_env(job, profile),
        secrets=job.secrets,
        notes=tuple(notes),
        sbatch=tuple((option, value or None) for option, value in sbatch if value is not None),
        image=image_for(profile.runtime, job.image or "") if _in_container(profile) else None,
        mounts=mounts_for(job, profile),
        shm=str(need.shm_bytes or 0),
        points=points,
    )


def array_of(indices: Iterable[int], sweep: Sweep) -> str:
    """Return the tasks of a job array as sbatch takes them, in ranges, and how many run at a time.

    >>> array_of([0, 1, 2, 7, 9, 10], Sweep.model_construct(max_running=8))
    '0-2,7,9-10%8'
    """
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    text = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)
    return text + (f"%{sweep.max_running}" if sweep.max_running else "")


def _in_container(profile: Profile) -> bool:
    if isinstance(profile, SlurmProfile):
        return profile.runtime != "bare"
    return isinstance(profile, KubernetesProfile)


def _site_options(profile: SlurmProfile) -> dict[str, SbatchValue]:
    """Return the options that the profile's own keys stand for."""
    switches = None
    if near := profile.switches:
        wait = f"@{slurm_time(near.max_wait_s)}" if near.max_wait_s else ""
        switches = f"{near.count}{wait}"
    return {
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "switches": switches,
        "exclusive": True if profile.exclusive else None,
        "licenses": ",".join(profile.licenses) or None,
    }


def _kubernetes(
    job: JobSpec, profile: KubernetesProfile, run_name: str, folder: str
) -> KubernetesPlan:
    need = job.resources
    requests = {"cpu": str(cpus_of(job))}
    if need.memory_bytes:
        requests["memory"] = kubernetes_size(need.memory_bytes)
    if need.gpus_per_node:
        requests[profile.gpu_resource] = str(need.gpus_per_node)
    notes = []
    if profile.runs_claim is None:
        notes.append(
            f"profile {profile.name!r} names no runs_claim: checkpoints are lost with their pod"
        )
    assert job.image is not None
    return KubernetesPlan(
        job=job,
        profile=profile,
        # The operator itself sets how many nodes there are and where they meet; an option would
        # win over its variables.
        torchrun=(f"--nproc-per-node={need.nproc_per_node}",),
        env={"TRAIN_RUN_DIR": f"{profile.runs_dir}/{folder}"} | _env(job, profile),
        secrets={
            name: place or Secret(secret=profile.secret or "", key=name)
            for name, place in job.secrets.items()
        },
        notes=tuple(notes),
        run_name=run_name,
        requests=requests,
        shm=kubernetes_size(need.shm_bytes) if need.shm_bytes else None,
        grace_s=job.stop.grace_s + POD_MARGIN_S,
        restart_policy="OnFailure" if job.retries.requeue else "Never",
        # The operator adds up the restarts of all pods, and one incident restarts each of them.
        backoff_limit=job.retries.requeue * need.max_nodes + 1 if job.retries.requeue else None,
        image=job.image,
    )
