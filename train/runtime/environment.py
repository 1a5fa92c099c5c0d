"""The environment of a start: versions of Python and torch, installed packages, nodes and GPUs."""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from .process_group import RankGroup

_DRIVER = Path("/proc/driver/nvidia/version")


def environment(group: RankGroup) -> dict[str, Any]:
    """Describe the environment of this start; all ranks call this at once.

    Returns:
        `python`, `torch`, `cuda`, `nccl` and `driver` (None without GPUs), `packages` (a digest of
        the names and versions of the installed distributions), each of rank 0, `packages_differ`
        (ranks with other packages than rank 0's), and `nodes`: for each host its name, its ranks
        and the name of its GPUs.
    """
    on_gpus = group.device.type == "cuda"
    gpu = torch.cuda.get_device_name(group.device) if on_gpus else None
    packages = packages_digest(sys.path)
    nodes: dict[str, dict[str, Any]] = {}
    differing = []
    for rank, (host, its_gpu, its_packages) in enumerate(
        group.gather((socket.gethostname(), gpu, packages))
    ):
        node = nodes.setdefault(host, {"host": host, "ranks": 0, "gpu": its_gpu})
        node["ranks"] += 1
        if its_packages != packages:
            differing.append(rank)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpus else None,
        "nccl": ".".join(map(str, nccl.version())) if on_gpus else None,  # type: ignore[no-untyped-call]
        "driver": _driver() if on_gpus else None,
        "packages": packages,
        "packages_differ": differing,
        "nodes": list(nodes.values()),
    }


def packages_digest(folders: Iterable[str]) -> str:
    """Return a digest of the installed distributions, by the names of their metadata folders.

    Those are NAME-VERSION.dist-info (PyPA, "Recording installed projects"): so none is opened.
    """
    names: set[str] = set()
    for folder in folders:
        try:
            names.update(path.name for path in Path(folder or ".").glob("*.dist-info"))
        except OSError:
            continue
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def _driver() -> str | None:
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # NVRM version: NVIDIA UNIX … Kernel Module  550.54.15  …
    numbers = [word for word in text.split() if word.count(".") >= 1 and word[0].isdigit()]
    return numbers[0] if numbers else None
