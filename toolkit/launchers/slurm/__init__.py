"""Runs on a Slurm cluster: submitted, asked about, followed and cancelled, here or by ssh."""

from toolkit.launchers.slurm.launcher import SlurmLauncher
from toolkit.launchers.slurm.run import SlurmRun

__all__ = ["SlurmLauncher", "SlurmRun"]
