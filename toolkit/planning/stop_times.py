"""The margins of stopping, and what all checks of compatibility share."""

from toolkit.errors import Problem
from toolkit.job.spec import JobSpec

__all__ = [
    "POD_MARGIN_S",
    "REQUEUE_MARGIN_S",
    "SIGNAL_MAX_S",
    "SIGNAL_SLACK_S",
    "cpus_of",
    "refusal",
    "warning_lead_s",
]

REQUEUE_MARGIN_S = 30
"""What the batch script needs after the checkpoint: srun's end and the requeue call."""

SIGNAL_SLACK_S = 60
"""Slurm may send the `--signal` warning up to this much early (sbatch manual, `--signal`)."""

SIGNAL_MAX_S = 65535
"""The earliest warning that sbatch takes (sbatch manual, `--signal`)."""

POD_MARGIN_S = 15
"""What torchrun needs after its workers are gone, before the kubelet kills the container."""


def refusal(rule: str, message: str, *key: str | int) -> list[Problem]:
    """Return one reason, to be added to others."""
    return [Problem(rule=rule, message=message, key=key)]


def warning_lead_s(job: JobSpec) -> int:
    """Return how long before the time limit Slurm warns: the checkpoint and the requeue."""
    return job.stop.grace_s + REQUEUE_MARGIN_S


def cpus_of(job: JobSpec) -> int:
    """Return the CPUs of a node: one per worker where the job does not say."""
    return job.resources.cpus_per_node or job.resources.nproc_per_node
