"""The program `toolkit`, also as `python -m toolkit`."""

import gc
import sys
import types

_GARBAGE_AFTER = 100_000
"""Number of new objects that starts a garbage collection; a short command creates fewer."""


def main() -> None:
    """Run the command line; on Ctrl-C during the imports, exit quietly."""
    gc.set_threshold(_GARBAGE_AFTER)
    # Skip pydantic's search for plugins in all installed packages, which takes 20 ms per command.
    loader = types.ModuleType("pydantic.plugin._loader")
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(loader.__name__, loader)
    try:
        from toolkit.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        run()
    finally:
        gc.freeze()  # the process ends: a last garbage collection would take 25 ms


if __name__ == "__main__":
    main()
