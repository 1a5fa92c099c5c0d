"""Large packages are imported without Python's garbage collector.

An import creates many objects and hardly any garbage, yet the collector visits all objects again
and again: for a seventh of the CPU time until a rank has torch and its DDP. The collector is on
again as soon as the import ends; the script's own modules are imported as always.
"""

from __future__ import annotations

import gc
import importlib.machinery
import sys

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

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return the spec of a module; None for others, and within such an import."""
        if fullname.partition(".")[0] not in PACKAGES or not gc.isenabled():
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def start() -> None:
    """Install the finder before `PathFinder`; finders before that keep their precedence."""
    path_finder = importlib.machinery.PathFinder
    if path_finder in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(path_finder), Finder)
