"""Decisions for a Slurm cluster: sbatch's options, images and mounts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from toolkit.job.sbatch_options import SbatchValue, merged
from toolkit.job.spec import JobSpec
from toolkit.job.sweep import Point, Sweep
from toolkit.planning.containers import image_for, mounts_for
from toolkit.planning.plans import RENDEZVOUS_PORTS, RENDEZVOUS_TIMEOUT_S, LaunchPlan
from toolkit.planning.stop_times import cpus_of, warning_lead_s
from toolkit.planning.torchrun import environment, in_container, torchrun_options
from toolkit.profile import SlurmProfile
from toolkit.text.quantities import format_duration, slurm_megabytes, slurm_time

__all__ = ["SlurmPlan", "array_of", "slurm_plan"]


@dataclass(frozen=True, kw_only=True)
class SlurmPlan(LaunchPlan):
    """A batch script with one srun task per node."""

    profile: SlurmProfile
    """The site."""

    template = "slurm/train.sbatch.j2"

    sbatch: tuple[tuple[str, str | None], ...]
    """Options of sbatch, in order."""

    chain: bool = False
    """Whether several jobs are submitted that continue the run in turn."""

    @property
    def takes_turns(self) -> bool:
        """Whether several jobs may continue one run in turn with this script: a chain."""
        return not self.points and (self.chain or self.failure_limit > 0)

    def in_turns(self) -> "SlurmPlan":
        """Return this plan for a chain: several jobs that continue one run in turn."""
        return replace(self, chain=True)

    @property
    def runtime(self) -> str:
        """The container runtime; `bare` without containers."""
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
        """The site's lines of bash before the environment is set up."""
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
        """Options of a job of one more node that joins an elastic run; it is never requeued."""
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


def slurm_plan(job: JobSpec, profile: SlurmProfile) -> SlurmPlan:
    """Decide how a job runs on a Slurm cluster."""
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
        torchrun=torchrun_options(job, numbered=True),
        env=environment(job, profile),
        secrets=job.secrets,
        notes=tuple(notes),
        sbatch=tuple((option, value or None) for option, value in sbatch if value is not None),
        image=image_for(profile.runtime, job.image or "") if in_container(profile) else None,
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
