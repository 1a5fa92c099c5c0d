"""The host of Slurm's commands and files: this machine, or a login node reached by ssh."""
