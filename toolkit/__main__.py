"""The program `toolkit`, also as `python -m toolkit`."""

import gc
import sys
import types

_GARBAGE_AFTER = 100_000
"""How many new objects start a collection of garbage; a command that ends soon makes fewer."""


def main() -> None:
    """Run the command line, and end quietly when Ctrl-C comes while it is still imported."""
    gc.set_threshold(_GARBAGE_AFTER)
    # Without pydantic's search for plugins in all installed packages: 20 ms of each command.
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
        gc.freeze()  # the process ends: a last search for garbage in everything would take 25 ms


if __name__ == "__main__":
    main()
