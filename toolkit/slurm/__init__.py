"""Runs on a Slurm cluster: submitted, asked about, followed and cancelled, here or by ssh."""

from toolkit.slurm.launcher import SlurmLauncher
from toolkit.slurm.run import SlurmRun

__all__ = ["SlurmLauncher", "SlurmRun"]
