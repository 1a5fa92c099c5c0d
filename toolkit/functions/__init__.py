"""Python functions on every rank, with submitit."""

try:
    import submitit as submitit
except ImportError as error:
    raise ImportError(
        "functions are submitted with submitit: pip install 'torch-deploy-toolkit[submitit]'"
    ) from error

from toolkit.functions.executors import DebugExecutor, LocalExecutor, SlurmExecutor
from toolkit.functions.job import FunctionJob, attach
from toolkit.functions.pod_executor import KubernetesExecutor

__all__ = [
    "DebugExecutor",
    "FunctionJob",
    "KubernetesExecutor",
    "LocalExecutor",
    "SlurmExecutor",
    "attach",
]
