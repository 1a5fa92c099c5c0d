"""Python functions on every rank, with submitit."""

try:
    import submitit as submitit
except ImportError as error:
    raise ImportError(
        "functions are submitted with submitit: pip install 'torch-deploy-toolkit[submitit]'"
    ) from error

from toolkit.executors.debugging import DebugExecutor
from toolkit.executors.in_pods import KubernetesExecutor
from toolkit.executors.jobs import FunctionJob, attach
from toolkit.executors.submitting import LocalExecutor, SlurmExecutor

__all__ = [
    "DebugExecutor",
    "FunctionJob",
    "KubernetesExecutor",
    "LocalExecutor",
    "SlurmExecutor",
    "attach",
]
