"""The programs of the watchdog, which are files in a run's folder and not part of a package."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.conftest import ROOT

FOLDER = ROOT / "toolkit/supervisor/watchdog"


def program(name: str) -> ModuleType:
    """Return a program as a module; no bytecode is left beside the templates."""
    module = ModuleType(name)
    exec(compile((FOLDER / f"{name}.py").read_text(), f"{name}.py", "exec"), module.__dict__)
    return module


def write_site(folder: Path) -> Path:
    """Write what the scripts write for ranks, and a sitecustomize of the user's beside it."""
    for name in ("site", "theirs", "exchange"):
        (folder / name).mkdir()
    for name in ("sitecustomize.py", "quick_imports.py", "rank_watch.py", "rank_children.py"):
        (folder / "site" / name).write_text((FOLDER / name).read_text())
    (folder / "theirs/sitecustomize.py").write_text("LOADED = 'theirs'\n")
    return folder


def start_rank(site: Path, text: str, *argv: str, **more: str) -> "subprocess.Popen[str]":
    """Start a script as torchrun starts a rank, in a session of its own.

    With arguments it is a file, `rank.py` in the folder, which multiprocessing can import.
    """
    env = {**os.environ, "PYTHONPATH": f"{site / 'site'}:{site / 'theirs'}"}
    env |= {"TRAIN_WATCHDOG": str(site / "exchange"), "TORCHELASTIC_RUN_ID": "r"}
    env |= {"TORCHELASTIC_ERROR_FILE": str(site / "error.json")}
    env |= {"LOCAL_RANK": "0", "RANK": "3", "WORLD_SIZE": "4", "TRAIN_RUN_DIR": str(site), **more}
    program = ["-c", text]
    if argv:
        (site / "rank.py").write_text(text)
        program = ["rank.py", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *program],
        env=env,
        cwd=site if argv else None,
        start_new_session=True,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
