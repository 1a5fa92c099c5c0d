"""Large packages are imported without Python's garbage collector.

An import creates many objects and hardly any garbage, yet the collector visits all objects again
and again: for a seventh of the CPU time until a rank has torch and its DDP. The collector is on
again as soon as the import ends; the script's own modules are imported as always.

torchrun itself computes nothing. It imports the shapes of torch's operators (torch.fx, FSDP and
meta tensors need them) only at their first use: a fifth of its CPU time until it starts the ranks.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import os
import sys
import types

PACKAGES = frozenset(
    (
        "accelerate",
        "datasets",
        "lightning",
        "pytorch_lightning",
        "sympy",
        "torch",
        "torchvision",
        "transformers",
    )
)

SHAPES = "torch._meta_registrations"
"""torch imports it for its effect only. Where it is missing, torch has no such module."""


class Loader(importlib.machinery.SourceFileLoader):
    """Executes a module without garbage collection."""

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        """Execute the module; all that it imports has no garbage collection either."""
        collects = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            if collects:
                gc.enable()


class Finder(importlib.machinery.PathFinder):
    """Finds what `PathFinder` finds, in `PACKAGES` only."""

    find_distributions = None  # type: ignore[assignment]  # importlib.metadata would find each distribution twice

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return the spec of a module; None for others, and within such an import."""
        if fullname.partition(".")[0] not in PACKAGES or not gc.isenabled():
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class AtFirstUse(types.ModuleType):
    """Stands for a module until a name in it is used."""

    def __getattr__(self, name: str) -> object:
        """Import the module, and return what it has under the name."""
        if name.startswith("__"):  # of Python's import system
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def start() -> None:
    """Install the finder before `PathFinder`; finders before that keep their precedence."""
    path_finder = importlib.machinery.PathFinder
    if path_finder in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(path_finder), Finder)


def in_torchrun() -> None:
    """Import what torchrun does not need at its first use, if this is torchrun.

    A torchrun that may fork its ranks needs all that they need.
    """
    with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
        words = file.read().split("\0")
    forks = {"PET_START_METHOD", "PET_RUN_PATH"} & set(os.environ)
    options = ("--start-method", "--run-path")
    if any(word.replace("_", "-").startswith(options) for word in words) or forks:
        return
    if is_torchrun(words):
        sys.modules[SHAPES] = AtFirstUse(SHAPES)


def is_torchrun(words: list[str]) -> bool:
    """Whether a command line of Python starts torchrun."""
    for number, word in enumerate(words[1:], 2):
        if word == "-m":
            return words[number : number + 1] == ["torch.distributed.run"]
        if not word.startswith("-"):
            return os.path.basename(word) == "torchrun"
    return False
