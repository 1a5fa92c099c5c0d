"""Tasks: a model, data and a loss. One module per task."""

from importlib import import_module
from typing import TYPE_CHECKING

from .loading import TASKS, load, problem_of

if TYPE_CHECKING:
    from .base import Classifier, Task

__all__ = ["TASKS", "Classifier", "Task", "load", "problem_of"]


def __getattr__(name: str) -> object:
    """Import `Task` and `Classifier`, which need torch, only when they are used."""
    if name in ("Classifier", "Task"):
        return getattr(import_module(".base", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
