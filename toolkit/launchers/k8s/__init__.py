"""Runs on a Kubernetes cluster: as PyTorchJob, TrainJob, JobSet or Job."""

from toolkit.launchers.k8s.launcher import KubernetesLauncher, dry_run, watch_states
from toolkit.launchers.k8s.run import KubernetesRun

__all__ = ["KubernetesLauncher", "KubernetesRun", "dry_run", "watch_states"]
