"""Decisions for a Slurm cluster: sbatch's options, and containers with their limits.

The flags are those of pyxis' args.c, of `apptainer exec --help` and of podman-run(1).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import PurePosixPath

from toolkit.errors import PlanError, Problem
from toolkit.job.sbatch_options import merged
from toolkit.job.spec import JobSpec, Mount
from toolkit.job.sweep import Sweep
from toolkit.planning import plans
from toolkit.profile import SlurmProfile
from toolkit.text.quantities import format_duration, slurm_megabytes, slurm_time

SIGNAL_SLACK_S = 60
"""Slurm may send the `--signal` warning up to this much early (sbatch manual, `--signal`)."""

SIGNAL_MAX_S = 65535
"""The earliest warning that sbatch accepts (sbatch manual, `--signal`)."""

_NOT_ITS_FILE = {"pyxis": (".tar", ".sif"), "apptainer": (), "podman": (".sif", ".sqsh")}
"""Suffixes of image files for other runtimes."""

_FILE = {"pyxis": "enroot import -o FILE.sqsh", "podman": "podman save -o FILE.tar"}
"""The command that creates an image file for the runtime."""

_OPTIONS_OF_SCRIPT = {
    "pyxis": ("--container-image", "--container-workdir", "--container-mount-home"),
    "apptainer": ("--pwd", "--cwd"),
    "podman": (
        *("--cgroups", "--detach", "-d", "--name", "--network", "--net", "--tty", "-t"),
        *("--user", "-u", "--userns", "--workdir", "-w"),
    ),
}
"""Options that the script sets itself, since it needs their values to control the container."""

_STEP_VARIABLES = {
    "CPUS_PER_GPU": "cpus-per-gpu",
    "CPU_FREQ_REQ": "cpu-freq",
    "DISTRIBUTION": "distribution",
    "DIST_PLANESIZE": "distribution",
    "GPUS": "gpus",
    "GPUS_PER_NODE": "gpus-per-node",
    "GPUS_PER_SOCKET": "gpus-per-socket",
    "GPUS_PER_TASK": "gpus-per-task",
    "GPU_BIND": "gpu-bind",
    "GPU_FREQ": "gpu-freq",
    "HINT": "hint",
    "MEM_BIND": "mem-bind",
    "MEM_BIND_LIST": "mem-bind",
    "MEM_BIND_TYPE": "mem-bind",
    "MEM_BIND_VERBOSE": "mem-bind",
    "MEM_PER_CPU": "mem-per-cpu",
    "MEM_PER_GPU": "mem-per-gpu",
    "MEM_PER_NODE": "mem",
    "NTASKS_PER_CORE": "ntasks-per-core",
    "NTASKS_PER_GPU": "ntasks-per-gpu",
    "NTASKS_PER_SOCKET": "ntasks-per-socket",
    "NTASKS_PER_TRES": "ntasks-per-gpu",
    "OVERCOMMIT": "overcommit",
    "PROFILE": "profile",
    "THREADS_PER_CORE": "threads-per-core",
    "TRES_BIND": "tres-bind",
    "TRES_PER_TASK": "tres-per-task",
}
"""Options of sbatch that srun inherits, by the SLURM_… variable that sbatch sets for each."""


@dataclass(frozen=True, kw_only=True)
class SlurmPlan(plans.LaunchPlan):
    """A batch script with one srun task per node."""

    profile: SlurmProfile
    template = "slurm/train.sbatch.j2"

    sbatch: tuple[tuple[str, str | None], ...]
    """The sbatch options, in order."""

    chain: bool = False
    """Whether several jobs are submitted, each continuing the run after the previous one."""

    ports: tuple[int, int] = plans.RENDEZVOUS_PORTS
    """First port for the rendezvous, and the number of ports."""

    join_timeout_s: int = plans.RENDEZVOUS_TIMEOUT_S
    """How long nodes wait for each other."""

    image: str | None = None
    """The container image as the site's runtime names it; None without containers."""

    mounts: tuple[str, ...] = ()
    """Mounts in addition to the run directory: `SOURCE:TARGET` or `SOURCE:TARGET:ro`."""

    shm: str = "0"
    """Size of the container's /dev/shm for podman; 0 means no separate limit."""

    # The profile keys that the template can read.
    runtime = property(attrgetter("profile.runtime"))
    modules = property(attrgetter("profile.modules"))
    prolog = property(attrgetter("profile.prolog"))
    epilog = property(attrgetter("profile.epilog"))
    container_options = property(attrgetter("profile.container_options"))

    @property
    def takes_turns(self) -> bool:
        """Whether several jobs may continue one run in turn with this script: a chain."""
        follows = self.chain or self.job.retries.requeue > 0
        return self.supervised and not self.points and follows

    def in_turns(self) -> "SlurmPlan":
        """Return this plan for a chain: several jobs that continue one run in turn.

        Raises:
            PlanError: the script has no supervisor, which detects that the run has ended.
        """
        if not self.supervised:
            raise PlanError(f"a chain needs a supervisor; profile {self.profile.name!r} has none")
        return replace(self, chain=True)

    @property
    def unrequested(self) -> tuple[str, ...]:
        """The SLURM_… suffixes of options that srun inherits and this job does not set."""
        options = {name for name, _ in self.sbatch}
        return tuple(name for name, option in _STEP_VARIABLES.items() if option not in options)

    @property
    def image_file(self) -> str | None:
        """The path of the image, which must exist on the node of the script; None for a name."""
        return self.image if self.image is not None and self.image.startswith("/") else None

    @property
    def supervised(self) -> bool:
        """Whether a supervisor starts srun and torchrun."""
        return self.profile.supervisor != "none"

    @property
    def supervisor(self) -> str | None:
        """The supervisor's file; None if the script carries it, or if the toolkit is installed."""
        place = self.profile.supervisor
        return place if place.startswith("/") else None

    @property
    def carries_supervisor(self) -> bool:
        """Whether the script carries the supervisor."""
        return self.profile.supervisor == "carried"

    @property
    def venv(self) -> str | None:
        """The virtual environment with torch."""
        return None if self.profile.venv is None else self.profile.below(self.profile.venv)

    @property
    def environment(self) -> tuple[str, str, str] | None:
        """The manager of an environment, the environment's name or path, and its name in that."""
        if self.profile.environment is None:
            return None
        manager, _, place = self.profile.environment.partition(":")
        path, _, name = place.partition("#")
        return manager, self.profile.below(path) if manager == "pixi" else path, name

    @property
    def mounted_sources(self) -> tuple[str, ...]:
        """Folders that must exist on the node of the script."""
        return tuple(mount.source for mount in (*self.profile.mounts, *self.job.mounts))

    @property
    def default_run_dir(self) -> str:
        """The path of new run directories, without the job id at its end."""
        return self.profile.below(f"{self.profile.runs_dir}/{self.job.name}")


def slurm_plan(job: JobSpec, profile: SlurmProfile) -> SlurmPlan:
    """Decide how a job runs on a Slurm cluster."""
    need, points, near = job.resources, job.points, profile.switches
    wait = f"@{slurm_time(near.max_wait_s)}" if near and near.max_wait_s else ""
    of_profile = {
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "switches": f"{near.count}{wait}" if near else None,
        "exclusive": True if profile.exclusive else None,
        "licenses": ",".join(profile.licenses) or None,
    }
    chosen = merged([of_profile, profile.sbatch, job.sbatch])
    gpus = ":".join(filter(None, [profile.gpu_type, str(need.gpus_per_node)]))
    if need.gpus_per_node and profile.gpus_flag == "gres":
        other = chosen.pop("gres", None)
        gpu_option = ("gres", f"gpu:{gpus}" + (f",{other}" if other else ""))
    else:
        gpu_option = (profile.gpus_flag, gpus)
    shares = need.cpus if profile.memory_flag == "mem-per-cpu" else 1
    memory = slurm_megabytes(-(-need.memory_bytes // shares)) if need.memory_bytes else None
    sbatch: list[tuple[str, str | None]] = [
        ("job-name", job.name),
        # With --ntasks-per-node, Slurm allocates the minimum of a node range.
        ("nodes", f"{need.min_nodes}-{need.max_nodes}" if need.elastic else str(need.max_nodes)),
        ("no-kill", "") if need.elastic else ("ntasks-per-node", "1"),
        ("cpus-per-task", str(need.cpus)),
        (profile.memory_flag, memory),
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
            "scancel by hand, and preemption without GraceTime, leave "
            f"{format_duration(profile.kill_wait_s)} "
            f"(KillWait of profile {profile.name!r}), less than stop.grace "
            f"{format_duration(job.stop.grace_s)}; a checkpoint that takes longer is lost then"
        )
    supervised = profile.supervisor != "none"
    if not supervised:
        notes.append(
            f"profile {profile.name!r} has no supervisor: torchrun restarts ranks "
            f"{job.retries.in_job} times; no failed job starts again, and no hanging rank is found"
        )
    return SlurmPlan(
        job=job,
        profile=profile,
        torchrun=plans.torchrun_options(job, numbered=supervised),
        env=plans.environment(job, profile),
        secrets=job.secrets,
        notes=tuple(notes),
        sbatch=tuple((option, value or None) for option, value in sbatch if value is not None),
        image=image_for(profile.runtime, job.image or "") if plans.in_container(profile) else None,
        mounts=tuple(
            f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else "")
            for mount in (*profile.mounts, *job.mounts)
        ),
        shm=str(need.shm_bytes or 0),
        points=points,
    )


def warning_lead_s(job: JobSpec) -> int:
    """Return the lead time of Slurm's warning: time for the checkpoint and the requeue."""
    return job.stop.grace_s + plans.REQUEUE_MARGIN_S


def array_of(indices: Iterable[int], sweep: Sweep) -> str:
    """Return the value of `sbatch --array`: task ranges, and the limit of running tasks.

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


# ---- Containers


def image_for(runtime: str, image: str) -> str:
    """Return the name of an image for a runtime; a path names an image file.

    Enroot, which pyxis uses, separates a registry from the name with `#` and takes a digest instead
    of a tag (enroot, src/docker.sh). An image with an explicit transport is unchanged.

    >>> image_for("pyxis", "nvcr.io/nvidia/pytorch:25.01"), image_for("pyxis", "ubuntu:24.04")
    ('nvcr.io#nvidia/pytorch:25.01', 'ubuntu:24.04')
    >>> image_for("pyxis", "registry.example.com/train:v2@sha256:0f1e")
    'registry.example.com#train:sha256:0f1e'
    >>> image_for("apptainer", "ubuntu:24.04"), image_for("podman", "/images/train.tar")
    ('docker://ubuntu:24.04', 'docker-archive:/images/train.tar')
    """
    if "://" in image:
        return image
    if image.startswith("/"):
        return f"docker-archive:{image}" if image.endswith(".tar") else image
    if runtime == "apptainer":
        return f"docker://{image}"
    if runtime != "pyxis":
        return image
    if digest := re.fullmatch(r"(.+?)(?::[^:/@]+)?@(\w+:\w+)", image):
        image = f"{digest[1]}:{digest[2]}"
    registry, slash, rest = image.partition("/")
    if slash and re.search("[.:]|^localhost$", registry):
        return f"{registry}#{rest}"
    return image


def container_problems(job: JobSpec, profile: SlurmProfile) -> Iterator[Problem]:
    """Yield the reasons why the site's runtime cannot run this job's container."""
    runtime, image = profile.runtime, job.image or ""
    image_problem = ""
    if image.startswith("localhost/") and runtime != "podman":
        image_problem = (
            f"image {image!r} is in podman's store of the machine that built it, which {runtime} "
            f"does not read; push it to a registry, or make a file (podman save -o FILE.tar"
            f"{', enroot import' if runtime == 'pyxis' else ''}) and write its path"
        )
    elif image.startswith("/") and PurePosixPath(image).suffix in _NOT_ITS_FILE[runtime]:
        image_problem = (
            f"image {image!r} is not a file for {runtime}; create one with {_FILE[runtime]}"
        )
    elif image.startswith("/") and runtime == "podman" and not image.endswith(".tar"):
        image_problem = f"image {image!r} is not an archive; create one with {_FILE[runtime]}"
    if image_problem:
        yield plans.refusal("image-of-another-runtime", image_problem, "image")
    for index, mount in enumerate(profile.mounts):
        for rule, reason in _mount_problems(mount, runtime):
            yield plans.refusal(rule, f"profile {profile.name!r}: mounts[{index}]: {reason}")
    for index, mount in enumerate(job.mounts):
        for rule, reason in _mount_problems(mount, runtime):
            yield plans.refusal(rule, f"mounts[{index}]: {reason}", "mounts", index)
    for index, option in enumerate(profile.container_options):
        if (name := option.partition("=")[0]) in _OPTIONS_OF_SCRIPT[runtime]:
            yield plans.refusal(
                "container-option-taken",
                f"profile {profile.name!r}: container_options[{index}]: {name} is set by the "
                "script, which needs it as it is; leave it out",
            )


def _mount_problems(mount: Mount, runtime: str) -> Iterator[tuple[str, str]]:
    """Yield the rules that a mount breaks, each with a message."""
    if mount.kind != "path":
        yield "mount-elsewhere", f"{mount.source!r} exists only on Kubernetes; write a path"
        return
    # Pyxis writes these characters unescaped to an fstab (NVIDIA/pyxis, issue 133).
    for sign in ",: \t" if runtime == "pyxis" else ",:":
        if sign in mount.source + mount.target:
            reason = f"{runtime} takes no {sign!r} in a path; make a link without it"
            yield "mount-unwritable", reason
    if mount.target.rstrip("/") in plans.OWN_FOLDERS:
        yield (
            "mount-target-taken",
            f"{mount.target!r} belongs to the container; choose another target",
        )
