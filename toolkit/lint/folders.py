"""The selection of files for `toolkit check DIR`."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import InputError
from toolkit.text.manifests import is_manifest
from toolkit.text.yaml_reader import read_text

_BATCH = (".sbatch", ".slurm", ".job")
_YAML = (".yaml", ".yml")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
_DIRECTIVE = re.compile(r"^#SBATCH\s", re.MULTILINE)
_TORCH = re.compile(r"^[ \t]*(?:import|from)[ \t]+torch\b", re.MULTILINE)
_NAME = re.compile(r"^name\s*:", re.MULTILINE)
_STARTS = re.compile(r"^(?:module|script|command)\s*:", re.MULTILINE)


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; False if the system rejects the path."""
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def files_to_check(folder: Path) -> list[Path]:
    """Return the files below a folder for `toolkit check`, in order.

    - `.sbatch`, `.slurm` and `.job` files
    - `.sh` files and files without a suffix, if they contain `#SBATCH` lines
    - `.py` files that import torch
    - `.yaml` and `.yml` files that are manifests or job files

    Hidden folders, virtual environments and links to folders are skipped.

    Raises:
        InputError: the folder contains no such file.
    """
    files = [path for path in _files(folder) if _is_meant(path)]
    if not files:
        raise InputError("no file here is a script, a job or a manifest", place=str(folder))
    return files


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not (Path(place) / name / "pyvenv.cfg").exists()
        )
        yield from (Path(place) / name for name in sorted(names))


def _is_meant(path: Path) -> bool:
    suffix = path.suffix
    if suffix not in (*_BATCH, ".sh", "", ".py", *_YAML) or not path.is_file():
        return False  # also pipes and devices: a read may never end
    if suffix in _BATCH:
        return True
    try:
        text = read_text(path)
    except InputError:
        return False
    if suffix == ".py":
        return _TORCH.search(text) is not None
    if suffix in _YAML:
        return is_manifest(text) or bool(_NAME.search(text) and _STARTS.search(text))
    return _DIRECTIVE.search(text) is not None
