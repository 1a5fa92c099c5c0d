"""`__main__.py` of the archive in scripts and manifests: imports the package from a table.

The table of sources is compressed as a whole. A zip archive compresses files one by one and would
be half as large again.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Dict, Optional

try:
    import bz2
except ImportError:
    sys.exit("supervisor: this host's python3 was built without the module bz2: use another one")

TABLE = "sources.bz2"
"""The source files: for each, its path, a line break and its text; then a zero byte."""


class Sources:
    """Imports modules from a table of sources, by path below a folder.

    It does not use the base classes in `importlib.abc`: their import takes longer than all else.
    """

    def __init__(self, folder: str, table: Dict[str, str]) -> None:
        self._folder, self._table = folder, table

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        """Return the spec of a module in the table; None if it is not there."""
        stem = name.replace(".", "/")
        for file in (stem + "/__init__.py", stem + ".py"):
            if file in self._table:
                origin = os.path.join(self._folder, file)
                is_package = file.endswith("/__init__.py")
                spec = ModuleSpec(name, self, origin=origin, is_package=is_package)  # type: ignore[arg-type]  # no base class
                spec.has_location = True  # sets `__file__`, which tracebacks show
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the source of a module."""
        assert module.__file__ is not None
        exec(compile(self.get_source(module.__name__), module.__file__, "exec"), vars(module))

    def get_source(self, name: str) -> str:
        """Return the source of a module, for lines in tracebacks."""
        spec = self.find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(name)
        return self.get_data(spec.origin).decode()

    def get_data(self, path: str) -> bytes:
        """Return a source file, including files that are not modules."""
        try:
            return self._table[os.path.relpath(path, self._folder)].encode()
        except KeyError:
            raise OSError(path + " is not in the archive") from None


if __name__ == "__main__":
    content = __loader__.get_data(os.path.join(sys.path[0], TABLE))  # type: ignore[name-defined]
    files = bz2.decompress(content).decode().split("\0")
    table = dict(file.split("\n", 1) for file in files)
    sys.meta_path.insert(0, Sources(sys.path[0], table))
    from supervisor.__main__ import main  # type: ignore[import-not-found]

    sys.exit(main())
