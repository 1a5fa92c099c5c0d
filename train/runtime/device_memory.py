"""How much memory a rank's device has: a GPU's own, or a share of the host's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from train.runtime.process_group import RankGroup

_CGROUPS = Path("/sys/fs/cgroup")


def of_a_rank(group: RankGroup) -> int:
    """Give the bytes of a rank's device; ranks on the CPU share the host's memory evenly."""
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    return of_the_host() // group.rank_info.local_world_size


def of_the_host(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Give the bytes that processes like this one may use: the machine's, or a job's if fewer.

    Args:
        cgroups: where version 2 of control groups is mounted, which Slurm, Kubernetes and
            containers limit memory by.
        membership: names the group of this process.
    """
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return size
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return size
    # A group may use no more than those around it.
    for folder in (cgroups / own, *(cgroups / own).parents):
        if folder == cgroups.parent:
            break
        try:
            size = min(size, int((folder / "memory.max").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # The outermost has no such file; "max" is no limit.
    return size
