"""The parts of `sandbox`: a real Slurm cluster on one machine, in namespaces."""
