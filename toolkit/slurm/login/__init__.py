"""Where Slurm's commands run: on this machine, or on a login node by ssh, and the files there."""
