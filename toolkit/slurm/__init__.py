"""Runs on a Slurm cluster: submit, query, follow and cancel, on this machine or by ssh."""

from toolkit.slurm.launcher import SlurmLauncher
from toolkit.slurm.run import SlurmRun

__all__ = ["SlurmLauncher", "SlurmRun"]
