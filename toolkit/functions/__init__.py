"""Python functions on every rank, with submitit."""

try:
    import submitit as submitit
except ImportError as error:
    raise ImportError("functions are submitted with submitit: pip install submitit") from error

from toolkit.functions.executors import (
    DebugExecutor,
    KubernetesExecutor,
    LocalExecutor,
    SlurmExecutor,
)
from toolkit.functions.job import FunctionJob, attach

__all__ = [
    "DebugExecutor",
    "FunctionJob",
    "KubernetesExecutor",
    "LocalExecutor",
    "SlurmExecutor",
    "attach",
]
