"""Decisions for this machine: N torchruns simulate N nodes."""

from dataclasses import dataclass

from toolkit.job.spec import JobSpec
from toolkit.planning.plans import RENDEZVOUS_PORTS, LaunchPlan, environment, torchrun_options
from toolkit.profile import LocalProfile


@dataclass(frozen=True, kw_only=True)
class LocalPlan(LaunchPlan):
    """N torchrun agents on this machine simulate N nodes."""

    profile: LocalProfile
    template = "local/run.sh.j2"

    visible_devices: tuple[tuple[int, ...], ...]
    """The GPU indices of each node, among all GPUs here, or among those that the user may use."""

    ports: tuple[int, int] = RENDEZVOUS_PORTS
    """First port for the rendezvous, and the number of ports."""

    again_status: int | None = None
    """The exit status on which another package's scheduler requeues the script."""

    @property
    def at_once(self) -> tuple[str, ...]:
        """Options for the points of a sweep to share this machine."""
        need, sweep = self.job.resources, self.job.sweep
        limit = [f"--most={sweep.max_running}"] if sweep and sweep.max_running else []
        gpus = [f"--gpus={need.max_nodes * self.gpus_per_node}"] if self.gpus_per_node else []
        return (f"--cores={need.max_nodes * need.cpus}", *gpus, *limit)

    @property
    def watchdog(self) -> str:
        """The watchdog's limit; a local script has a watchdog even without restarts."""
        return super().watchdog or ("learned" if self.job.stall_timeout_s is None else "")

    @property
    def default_run_dir(self) -> str:
        """The path of new run directories, without the job id at its end."""
        return f"{self.profile.runs_dir}/{self.job.name}"


def local_plan(job: JobSpec, profile: LocalProfile) -> LocalPlan:
    """Decide how a job runs on this machine."""
    gpus = job.resources.gpus_per_node
    nodes = range(job.resources.max_nodes)
    return LocalPlan(
        job=job,
        profile=profile,
        torchrun=torchrun_options(job, numbered=True),
        env=environment(job, profile),
        secrets=job.secrets,
        points=job.points,
        visible_devices=tuple(tuple(range(node * gpus, (node + 1) * gpus)) for node in nodes),
    )
