"""The plan for any kind of site: torchrun's options, the environment, time margins."""

from __future__ import annotations  # an annotation must not import a profile

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from toolkit.errors import PlanError, Problem
from toolkit.job.kubernetes_options import Patch
from toolkit.job.spec import JobSpec, Notify, Secret
from toolkit.job.sweep import Point
from toolkit.job.types import ArgumentWord

if TYPE_CHECKING:
    from toolkit.profile import Profile

RENDEZVOUS_TIMEOUT_S = 600
"""How long nodes wait for each other; starting 512 containers takes minutes."""

RENDEZVOUS_PORTS = (61000, 4000)
"""First port and number of ports: above Linux's ephemeral range, which ends at 60999."""

REQUEUE_MARGIN_S = 30
"""Seconds that a script needs after the checkpoint: srun's end and the requeue call."""

OWN_FOLDERS = ("", "/dev", "/proc", "/sys")
"""Folders of every container that no mount may hide; the empty one is its root."""

SCRIPT_VARIABLES = "_[a-z].*"
"""Names reserved for variables of the rendered scripts; no job may use them."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The values that every launcher needs to start one torchrun per node."""

    job: JobSpec
    profile: Profile
    torchrun: tuple[str, ...]
    """torchrun's options that are known before the job runs. On Kubernetes they include the
    endpoint; on Slurm the script adds it."""

    env: Mapping[str, str]
    """The environment of every worker, by name."""

    secrets: Mapping[str, Secret | None]
    """Secret variables, and the sources of their values."""

    notes: tuple[str, ...] = ()
    """Notes for the user that stop nothing."""

    points: tuple[Point, ...] = ()
    """The points of a sweep: array tasks, objects, or runs on this machine."""

    # The job keys that templates can read.
    name = property(attrgetter("job.name"))
    digest = property(attrgetter("job.digest"))
    program = property(attrgetter("job.program"))
    carried = property(attrgetter("job.carried"))
    workdir = property(attrgetter("job.workdir"))
    min_nodes = property(attrgetter("job.resources.min_nodes"))
    max_nodes = property(attrgetter("job.resources.max_nodes"))
    elastic = property(attrgetter("job.resources.elastic"))
    nproc_per_node = property(attrgetter("job.resources.nproc_per_node"))
    gpus_per_node = property(attrgetter("job.resources.gpus_per_node"))
    time_limit_s = property(attrgetter("job.time_limit_s"))
    grace_s = property(attrgetter("job.stop.grace_s"))
    retries = property(attrgetter("job.retries"))
    failure_limit = property(attrgetter("job.retries.requeue"))

    @property
    def notify(self) -> Notify | None:
        """The recipients of notifications: the job's own, or those of the profile."""
        return notify_of(self.job, self.profile)

    def recorded(self, profile: Profile) -> dict[str, Any]:
        """Return a profile for the record of a run, with the job's own `notify`.

        Keys without a value are omitted: an older toolkit without these keys can read the rest.
        """
        profile = profile.model_copy(update={"notify": self.notify})
        stored = profile.model_dump(mode="json", by_alias=True)
        return {key: value for key, value in stored.items() if value is not None}

    @property
    def template(self) -> str:
        """The template of this plan, below `templates/`."""
        raise NotImplementedError

    @property
    def objects(self) -> Sequence[LaunchPlan]:
        """The plans to render: this one, or those of a sweep's points."""
        return (self,)

    @property
    def patches(self) -> Sequence[tuple[str, str, Patch]]:
        """Patches of rendered objects: the location of each, the object's kind and the patch."""
        return ()

    @property
    def entry(self) -> tuple[str, ...]:
        """The program that torchrun starts, and its arguments."""
        return self.job.entry

    @property
    def mounted_sources(self) -> tuple[str, ...]:
        """Folders that must exist on the node of the script."""
        return tuple(mount.source for mount in self.job.mounts)

    @property
    def secret_files(self) -> dict[str, str]:
        """Secrets that the script reads from a file, and the file of each."""
        return {name: place.file for name, place in self.secrets.items() if place and place.file}

    @property
    def exported_secrets(self) -> tuple[str, ...]:
        """Secrets from the environment in which the script is submitted."""
        return tuple(name for name in self.secrets if name not in self.secret_files)

    @property
    def static(self) -> bool:
        """Whether the rendezvous is static, by node rank, instead of c10d."""
        return "--rdzv-backend=static" in self.torchrun

    @property
    def names_attempt(self) -> bool:
        """Whether an argument of any point contains the attempt, known only at run time."""
        words = (word for point in self.points for word in point.args)
        return name_attempt(self.entry) or name_attempt(words)

    @property
    def points_have_variables(self) -> bool:
        """Whether the sweep sets environment variables."""
        return any(point.env for point in self.points)

    @property
    def takes_turns(self) -> bool:
        """Whether several jobs may continue one run in turn with this script: a chain."""
        return False

    @property
    def starts_once(self) -> bool:
        """Whether nothing restarts the ranks: neither torchrun, nor Slurm, nor another job."""
        return not (self.retries.in_job or self.retries.requeue or self.takes_turns)

    @property
    def watchdog(self) -> str:
        """The watchdog's timeout for silent ranks in seconds, or `learned`; empty without one.

        A script that starts its ranks once stays short: it has a watchdog only for `stall_timeout`,
        `log_pattern`, or a notification of stalls.
        """
        timeout_s = self.job.stall_timeout_s
        if timeout_s is None:
            is_used = self.log_pattern or is_told(self.notify, "stall")
            return "" if self.starts_once and not is_used else "learned"
        return str(timeout_s) if timeout_s else ""

    @property
    def protects_children(self) -> bool:
        """Whether a rank's child processes survive a stop until the rank has ended."""
        return self.job.stop.protect_children

    @property
    def warm(self) -> bool:
        """Whether ranks are forked from a process that has imported torch."""
        return self.job.start == "warm"

    @property
    def log_pattern(self) -> str | None:
        """The pattern that finds steps in the output of a rank; None if the job has none."""
        return self.job.log_pattern

    @property
    def stop_timeout_s(self) -> int:
        """Seconds that a cancelled run has to end by itself."""
        return self.job.stop.grace_s + REQUEUE_MARGIN_S

    def in_turns(self) -> LaunchPlan:
        """Return this plan for a chain: several jobs that continue one run in turn.

        Raises:
            PlanError: the site is not a Slurm cluster.
        """
        raise self.not_on_slurm("chain")

    def not_on_slurm(self, what: str) -> PlanError:
        """Return the error for an option that only Slurm has."""
        verb, name = "are" if " " in what else "is", self.profile.name
        return PlanError(
            f"{what} {verb} Slurm's, and profile {name!r} is of another kind; write "
            "`toolkit wait RUN && toolkit submit …`"
        )


def is_told(notify: Notify | None, event: str) -> bool:
    """Whether a recipient of notifications subscribes to an event."""
    return notify is not None and event in notify.events


def notify_of(job: JobSpec, profile: Profile) -> Notify | None:
    """Return the recipients of notifications: the job's own, or those of the profile."""
    return job.notify or profile.notify


def torchrun_options(job: JobSpec, *, numbered: bool = False) -> tuple[str, ...]:
    """Return the options of torchrun that are the same on every node of every site.

    If the site numbers the nodes, a job without restarts uses a static rendezvous: with c10d, the
    first node polls only once a second for the last node (torch, dynamic_rendezvous.py).
    """
    need = job.resources
    static = numbered and not need.elastic and not job.retries.in_job
    nnodes = f"{need.min_nodes}:{need.max_nodes}" if need.elastic else need.max_nodes
    return (
        f"--nnodes={nnodes}",
        f"--nproc-per-node={need.nproc_per_node}",
        f"--max-restarts={job.retries.in_job}",
        f"--rdzv-backend={'static' if static else 'c10d'}",
        *carried_options(job),
    )


def name_attempt(words: Iterable[str]) -> bool:
    """Whether any word of a command contains the attempt."""
    named = (word for word in words if isinstance(word, ArgumentWord))
    return any(name == "TRAIN_ATTEMPT" for word in named for _, name in word.pieces())


def carried_options(job: JobSpec) -> tuple[str, ...]:
    """Return torchrun's options for a script of the toolkit that is submitted with the run."""
    # torchrun has already imported torch, which would take each worker seconds.
    return ("--start-method=fork", "--run-path") if job.carried else ()


def environment(job: JobSpec, profile: Profile) -> dict[str, str]:
    """Return the environment of the workers; the job's values take precedence."""
    env = {
        # With one store for all restarts, restart 1 reads the keys of restart 0 and hangs.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # A worker's output is seen immediately; Python would buffer some kilobytes of it.
        "PYTHONUNBUFFERED": "1",
        # Variables instead of options: a torchrun without the option ignores them.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": str(job.stop.grace_s),
    }
    if in_container(profile):
        # The root file system may be read-only, and the user has no home folder there.
        env |= {"HOME": "/tmp", "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor"}
    # Each line begins with its rank.
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    need = job.resources
    if need.cpus_per_node or need.nproc_per_node > 1:
        env["OMP_NUM_THREADS"] = str(max(1, need.cpus // need.nproc_per_node))
    if profile.network_interface:
        env["NCCL_SOCKET_IFNAME"] = profile.network_interface
        env["GLOO_SOCKET_IFNAME"] = profile.network_interface
    if job.log_pattern:
        env["TRAIN_LOG_PATTERN"] = job.log_pattern
        env["TRAIN_LOG_RANK"] = job.log_rank or "first"
    env |= profile.env | job.env
    return {name: value for name, value in env.items() if name not in job.secrets}


def in_container(profile: Profile) -> bool:
    """Whether workers run in containers at this site."""
    if profile.kind == "slurm":
        return profile.runtime != "bare"
    return profile.kind == "kubernetes"


def refusal(rule: str, message: str, *key: str | int) -> Problem:
    """Return the problem of a job that cannot work at a site, with the path of the job's key."""
    return Problem(rule=rule, message=message, key=key)
