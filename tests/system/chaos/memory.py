"""A limit of memory for a node of the sandbox, by the machine's own cgroups of either version."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import Cluster

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def limited(cluster: Cluster, node: str, limit_bytes: int) -> Iterator[None]:
    """Limit what the jobs of a node use: their processes are children of its slurmd."""
    (slurmd,) = (
        process["pid"]
        for process in json.loads(cluster("ps", node, "--all", "--json"))
        if process["command"].split()[0].endswith("slurmd")
    )
    before = _group_of(slurmd)
    name = "memory.max" if before.is_relative_to(ROOT) and _version_2() else "memory.limit_in_bytes"
    # In version 2 a group with processes cannot have limited children, but the root can.
    group = (ROOT if _version_2() else before) / f"chaos-{slurmd}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit_bytes))
    except OSError as error:
        _cannot(str(error))
    try:
        (group / "cgroup.procs").write_text(str(slurmd))
        yield
    finally:
        # Until it is empty: one that has been listed may have ended, or have started another.
        while processes := (group / "cgroup.procs").read_text().split():
            for process in processes:
                with suppress(ProcessLookupError):
                    (before / "cgroup.procs").write_text(process)
        group.rmdir()


def _version_2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _group_of(pid: int) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if _version_2() and not kinds:
            return ROOT / path.lstrip("/")
        if kinds == "memory":
            return ROOT / "memory" / path.lstrip("/")
    _cannot("no cgroups")


def _cannot(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"CI must run out of memory for real: {reason}")
    pytest.skip(f"memory cannot be limited here: {reason}")
