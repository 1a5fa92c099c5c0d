"""The programs of the watchdog, which are files in a run's folder and not part of a package."""

from types import ModuleType

from tests.conftest import ROOT

FOLDER = ROOT / "templates/common/watchdog"


def program(name: str) -> ModuleType:
    """Return a program as a module; no bytecode is left beside the templates."""
    module = ModuleType(name)
    exec(compile((FOLDER / f"{name}.py").read_text(), f"{name}.py", "exec"), module.__dict__)
    return module
