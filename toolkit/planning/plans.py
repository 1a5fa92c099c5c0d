"""The decisions for a launch that every kind of site needs, as plain values."""

from __future__ import annotations  # naming a profile must not import it

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.errors import PlanError
from toolkit.job.kubernetes_options import Patch
from toolkit.job.spec import JobSpec, Retries, Secret
from toolkit.planning.stop_times import REQUEUE_MARGIN_S
from toolkit.planning.torchrun import carried

if TYPE_CHECKING:
    from toolkit.profile import Profile

__all__ = [
    "RENDEZVOUS_PORTS",
    "RENDEZVOUS_TIMEOUT_S",
    "LaunchPlan",
]

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
    """Notes for the user that stop nothing."""

    @property
    def template(self) -> str:
        """The template that is filled in with this plan, below `templates/`."""
        raise NotImplementedError

    @property
    def objects(self) -> Sequence[LaunchPlan]:
        """The plans to render: this one, or those of a sweep's points."""
        return (self,)

    @property
    def patches(self) -> Sequence[tuple[str, str, Patch]]:
        """Changes of rendered objects: the place of each, the object's kind and the change."""
        return ()

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
        """Fewest nodes with which the run continues."""
        return self.job.resources.min_nodes

    @property
    def max_nodes(self) -> int:
        """Number of nodes when none is missing."""
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
        """Whether there can be an earlier failure to compare with."""
        return bool(self.job.retries.in_job or self.job.retries.requeue)

    @property
    def takes_turns(self) -> bool:
        """Whether several jobs may continue one run in turn with this script: a chain."""
        return False

    @property
    def starts_once(self) -> bool:
        """Whether nothing starts the ranks again: neither torchrun, nor Slurm, nor another job."""
        return not (self.compares_failures or self.takes_turns)

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
        """Whether the rendezvous is static, by the nodes' numbers, rather than c10d."""
        return "--rdzv-backend=static" in self.torchrun

    @property
    def entry(self) -> tuple[str, ...]:
        """What torchrun starts, and its arguments."""
        return self.job.entry

    @property
    def carried(self) -> bool:
        """Whether the workers' script is submitted with the run, into the run directory."""
        return carried(self.job)

    @property
    def stop_timeout_s(self) -> int:
        """Seconds that a cancelled run may take to end by itself."""
        return self.job.stop.grace_s + REQUEUE_MARGIN_S
