"""Which files of a folder `toolkit check DIR` takes."""

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
    """Whether a path is a folder; one that the system refuses is none."""
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def files_to_check(folder: Path) -> list[Path]:
    """Return the files below a folder that are for `toolkit check`, in order.

    They are: `.sbatch`, `.slurm` and `.job`; `.sh`, and files without a suffix, that hold `#SBATCH`
    lines; `.py` that import torch; `.yaml` and `.yml` that are manifests or job files. Folders that
    begin with a dot, virtual environments and links to folders are left out.

    Raises:
        InputError: there is none.
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
        return False  # a pipe or a device, which may never end, too
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
