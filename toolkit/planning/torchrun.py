"""Decisions that are the same for every kind of site: torchrun's options and the environment."""

from __future__ import annotations  # naming a profile must not import it

from typing import TYPE_CHECKING

from toolkit.job.spec import JobSpec
from toolkit.job.types import IN_RUN_DIR
from toolkit.planning.stop_times import cpus_of

if TYPE_CHECKING:
    from toolkit.profile import Profile

__all__ = ["carried", "carried_options", "environment", "in_container", "torchrun_options"]


def carried(job: JobSpec) -> bool:
    """Whether the workers' script is submitted with the run, like the files of a call."""
    return job.script is not None and job.script.startswith(IN_RUN_DIR)


def torchrun_options(job: JobSpec, *, numbered: bool = False) -> tuple[str, ...]:
    """Return the options of torchrun that are the same on every node of every site.

    Args:
        job: What to run.
        numbered: Whether the site numbers the nodes. Then a job without restarts of its ranks
            has a static rendezvous: with c10d, the first node polls only once a second for the last
            one (torch, dynamic_rendezvous.py).
    """
    need = job.resources
    static = numbered and not need.elastic and not job.retries.in_job
    nnodes = f"{need.min_nodes}:{need.max_nodes}" if need.elastic else need.max_nodes
    return (
        f"--nnodes={nnodes}",
        f"--nproc-per-node={job.resources.nproc_per_node}",
        f"--max-restarts={job.retries.in_job}",
        f"--rdzv-backend={'static' if static else 'c10d'}",
        *carried_options(job),
    )


def carried_options(job: JobSpec) -> tuple[str, ...]:
    """Return the options for a script of the toolkit's own that is submitted with its run."""
    # torchrun has imported torch already, which takes each worker seconds.
    return ("--start-method=fork", "--run-path") if carried(job) else ()


def environment(job: JobSpec, profile: Profile) -> dict[str, str]:
    """Return the environment of the workers; the job's own values win."""
    env = {
        # With one store for all attempts, attempt 1 reads the keys of attempt 0 and hangs.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # A worker's output is seen immediately; Python would buffer some kilobytes of it.
        "PYTHONUNBUFFERED": "1",
        # As variables, since a torchrun that lacks an option ignores them.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": str(job.stop.grace_s),
    }
    if in_container(profile):
        # The root file system may be read-only, and the user has no home of its own there.
        env |= {"HOME": "/tmp", "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor"}
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = (
        "[rank ${rank}] "  # each line begins with its rank
    )
    if job.resources.cpus_per_node or job.resources.nproc_per_node > 1:
        threads = max(1, cpus_of(job) // job.resources.nproc_per_node)
        env["OMP_NUM_THREADS"] = str(threads)
    if profile.network_interface:
        env["NCCL_SOCKET_IFNAME"] = profile.network_interface
        env["GLOO_SOCKET_IFNAME"] = profile.network_interface
    env |= profile.env | job.env
    return {name: value for name, value in env.items() if name not in job.secrets}


def in_container(profile: Profile) -> bool:
    """Whether workers run in containers at this site."""
    if profile.kind == "slurm":
        return profile.runtime != "bare"
    return profile.kind == "kubernetes"
