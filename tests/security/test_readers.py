"""There is one way to read what others may have written: no other reader is in these rooms."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = ("runs", "local", "slurm", "kubernetes", "functions", "cli", "api.py")
READERS = {"read_text", "read_bytes"}
MODULES = {"json", "pickle", "yaml", "marshal", "cloudpickle", "shelve", "tarfile", "zipfile"}
ALLOWED = {
    # What runs in pods and in run directories alone, without this package.
    "functions/worker.py": None,
    "kubernetes/volume_agent.py": None,
    # The user's own call, and results that no other user can have written.
    "functions/payload.py": {"pickle.loads", "read_bytes"},  # and programs of this package
    "functions/job.py": {"pickle.load"},
    # Files of this package.
    "kubernetes/volume.py": {"read_text", "open(wb)"},
    # The kernel's.
    "local/run.py": {"read_bytes"},
    # Files that are written, in folders that no other user may enter.
    "runs/records/submission_journal.py": {"open(w)"},
    "runs/records/registry.py": {"open(a)"},
    "runs/records/state_dir.py": {"open(ab+)"},
    "slurm/login/mirror.py": {"open(w)"},
    "slurm/snapshot.py": {"open(w)"},
    "cli/output.py": {"os.open"},
}
"""Calls that read nothing that others have written, by module; all of them where it is None."""


def files() -> list[Path]:
    found = [path for room in ROOMS for path in _python(ROOT / "toolkit" / room)]
    assert len(found) > 50
    return found


def _python(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def readers(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of what reads or parses a file, or a text that comes from elsewhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        call = node.func
        if isinstance(call, ast.Name) and call.id == "open":
            yield node.lineno, "open"
        elif isinstance(call, ast.Attribute):
            owner = call.value.id if isinstance(call.value, ast.Name) else ""
            if isinstance(call.value, ast.Attribute):
                owner = call.value.attr
            if owner == "untrusted":
                continue
            if owner in MODULES and call.attr.startswith(("load", "safe_load", "open", "unpack")):
                yield node.lineno, f"{owner}.{call.attr}"
            elif owner == "os" and call.attr in ("open", "fdopen"):
                yield node.lineno, f"os.{call.attr}"
            elif call.attr in READERS:
                yield node.lineno, call.attr
            elif call.attr == "open" and (mode := _mode(node)) is not None:
                yield node.lineno, f"open({mode})"


def _mode(call: ast.Call) -> str | None:
    """Return how a file is opened; None if it is not a file."""
    if not call.args:
        return "r"
    first = call.args[0]
    text = first.value if isinstance(first, ast.Constant) else None
    return text if isinstance(text, str) and set(text) <= set("rwaxbt+") else None


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_read_but_by_the_one_reader(path: Path) -> None:
    name = str(path.relative_to(ROOT / "toolkit"))
    allowed = ALLOWED.get(name, set())
    if allowed is None:
        return
    found = [f"{path}:{line}: {what}" for line, what in readers(path) if what not in allowed]
    assert found == []


def test_every_exception_is_needed() -> None:
    for name, allowed in ALLOWED.items():
        path = ROOT / "toolkit" / name
        assert path.is_file(), name
        if allowed is not None:
            assert allowed <= {what for _, what in readers(path)}, name
