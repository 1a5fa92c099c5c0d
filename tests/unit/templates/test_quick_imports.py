"""Large packages are imported without garbage collection, and all else with it.

torchrun imports what only ranks need at its first use.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

HOOK = ROOT / "toolkit/supervisor/watchdog"

TELLS = "import gc\ncollects = gc.isenabled()\n"

PACKAGES = {
    "torch/__init__.py": TELLS + "import own\nfrom . import part\nown_collects = own.collects",
    "torch/part.py": TELLS,
    "torch/late.py": TELLS,
    "torch/broken.py": TELLS + "raise RuntimeError(collects)",
    "own.py": TELLS,
    "torches.py": TELLS,
}


def printed(folder: Path, script: str) -> str:
    """Return what a script prints in a rank beside the packages."""
    for name, text in PACKAGES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    rank = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": f"{HOOK}:{folder}"}
    command = [sys.executable, "-c", "import gc\n" + script]
    return subprocess.run(command, env=rank, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import torch; print(torch.collects, torch.part.collects)", "False False"),
        ("import torch; print(torch.own_collects, gc.isenabled())", "False True"),
        (
            "import torch; import torch.late; print(torch.late.collects, gc.isenabled())",
            "False True",
        ),
        ("import own, torches; print(own.collects, torches.collects)", "True True"),
        ("gc.disable(); import torch; print(gc.isenabled())", "False"),
        ("import torch, runpy; print(runpy.run_module('torch.late')['collects'])", "True"),
        (
            """try:
    import torch.broken
except RuntimeError as error:
    print(error, gc.isenabled())""",
            "False True",
        ),
    ],
)
def test_the_collector_rests_during_the_import_of_a_large_package(
    tmp_path: Path, script: str, expected: str
) -> None:
    assert printed(tmp_path, script).strip() == expected


def test_a_finder_of_the_scripts_own_keeps_its_precedence(tmp_path: Path) -> None:
    script = """
import importlib.abc, importlib.util, own, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, own.__file__)
sys.meta_path.insert(0, Finder())
import torch
print(torch.collects)
"""
    assert printed(tmp_path, script).strip() == "True"


SHAPES = """
from torch import _meta_registrations
print("torch", _meta_registrations.__name__, end=" ")
print(_meta_registrations.shape, *_meta_registrations.shapes())
"""
FIRST = "imported torch torch._meta_registrations 1 2"
LATER = "torch torch._meta_registrations imported 1 2"
IN_RANK = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("argv", "variables", "expected"),
    [
        (["torchrun"], {}, LATER),
        (["-u", "torchrun", "--nnodes=2", "train.py"], {}, LATER),
        (["-m", "torch.distributed.run", "train.py"], {}, LATER),
        (["torchrun", "--start-method=fork", "--run-path", "train.py"], {}, FIRST),
        (["torchrun", "--start_method", "spawn"], {}, FIRST),
        (["torchrun"], {"PET_START_METHOD": "fork"}, FIRST),
        (["torchrun"], IN_RANK, FIRST),  # a script of this name
        (["train.py", "torchrun"], {}, FIRST),
        (["-m", "train", "torch.distributed.run"], {}, FIRST),
    ],
)
def test_torchrun_imports_the_shapes_of_operators_at_their_first_use(
    tmp_path: Path, argv: list[str], variables: dict[str, str], expected: str
) -> None:
    shapes = "print('imported', end=' ')\nshape = 1\ndef shapes(): return [2]"
    for name in ("torchrun", "train.py", "torch/distributed/run.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SHAPES)
    (tmp_path / "torch/_meta_registrations.py").write_text(shapes)
    for folder in ("torch", "torch/distributed"):
        (tmp_path / folder / "__init__.py").touch()
    environ = {"PYTHONPATH": f"{HOOK}:{tmp_path}", **variables}
    command = [sys.executable, *argv]
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == (expected, "")
