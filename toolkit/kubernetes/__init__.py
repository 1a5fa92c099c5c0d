"""Runs on a Kubernetes cluster: as PyTorchJob, TrainJob, JobSet or Job."""

from toolkit.kubernetes.launcher import KubernetesLauncher, dry_run, watch_states
from toolkit.kubernetes.run import KubernetesRun

__all__ = ["KubernetesLauncher", "KubernetesRun", "dry_run", "watch_states"]
