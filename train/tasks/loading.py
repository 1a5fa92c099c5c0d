"""Loading the task of `--task`: a built-in one, or a class in your own file."""

import difflib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from ..errors import TrainError, UsageError

if TYPE_CHECKING:
    from .base import Task

TASKS = {
    "digits": (".digits", "Digits"),
    "fashion-mnist": (".fashion_mnist", "FashionMnist"),
    "shuttle": (".shuttle", "Shuttle"),
    "chars": (".chars", "Chars"),
}
"""Module and class by name; imported only when used, so that `--help` stays fast."""


def problem_of(name: str) -> str | None:
    """Return the problem with a task's name, as far as it can be detected without imports."""
    if name in TASKS:
        return None
    file, colon, attribute = name.rpartition(":")
    if not colon and name.endswith(".py"):
        return f"task {name!r} lacks the name of its class: FILE.py:CLASS"
    if not file.endswith(".py"):
        return (
            f"unknown task {name!r}{_nearest(name, TASKS)}; known are {', '.join(TASKS)}, and "
            "FILE.py:CLASS for your own"
        )
    if not Path(file).is_file():
        return f"task {name!r}: file {Path(file).absolute()} does not exist"
    if not attribute.isidentifier():
        return f"task {name!r}: {attribute!r} is not a class name: write FILE.py:CLASS"
    return None


def load(name: str) -> "Task":
    """Make the task of that name.

    Raises:
        UsageError: the task does not exist, lacks a method, or its constructor failed.
    """
    if problem := problem_of(name):
        raise UsageError(problem)
    if name in TASKS:
        module, attribute = TASKS[name]
        return cast("Task", getattr(import_module(module, __package__), attribute)())
    file, _, attribute = name.rpartition(":")
    path = Path(file).resolve()
    cls = _class(path, attribute)
    try:
        task = cls()
    except TrainError:
        raise
    except Exception as error:
        raise UsageError(f"task {name!r}: {attribute}() failed: {_where(error, path)}") from error
    task.name = task.name or name
    return task


def _class(path: Path, attribute: str) -> "type[Task]":
    """Find a class in a file, and check that the class is a complete task."""
    from .base import Task

    try:
        module = _module(path)
    except Exception as error:
        raise UsageError(f"cannot import {path}: {_where(error, path)}") from error
    tasks = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
    ]
    cls = getattr(module, attribute, None)
    if cls is None:
        there = f"; there are {', '.join(tasks)}" if tasks else "; it contains no task"
        raise UsageError(f"{path} has no class {attribute!r}{_nearest(attribute, tasks) or there}")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise UsageError(
            f"{path}: {attribute} is not a task: write `class {attribute}(Task):` with "
            f"`from {__package__} import Task`"
        )
    if missing := sorted(cls.__abstractmethods__):
        methods = ", ".join(f"{method}()" for method in missing)
        raise UsageError(f"{path}: class {attribute} lacks {methods}")
    return cls


def _module(path: Path) -> ModuleType:
    """Import a file under a name that no other module has."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Register the module before running it: dataclasses and pickle look it up by name.
    sys.modules[name] = module
    # Append the folder last: files beside the task can be imported, but hide no other module.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _where(error: Exception, path: Path) -> str:
    """Return the last line of an error's traceback, and the last place of it within a file."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    return f"{own[-1].filename}:{own[-1].lineno}: {text}" if own else text


def _nearest(word: str, words: Iterable[str]) -> str:
    """Suggest the word that was probably meant: `; did you mean 'x'?`, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
