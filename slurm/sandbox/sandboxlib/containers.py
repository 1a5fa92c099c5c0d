"""What podman needs on a node: storage and runtime state of its own, the machine's images to read.

All nodes see the machine's file system, but each has its own processes: containers that one node
has written down would be taken for its own by another.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from pathlib import Path

from .packages import PATH
from .state import StateDir

SITE = Path("/etc/containers")
"""Where podman reads a site's settings; each node has a copy with its own over it."""

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}


def write_all(state: StateDir, nodes: list[str]) -> None:
    """Write every node's settings, where podman is installed."""
    if not SITE.is_dir() or (store := _store()) is None:
        return
    for node in nodes:
        folder = state.etc / "containers" / node
        shutil.copytree(SITE, folder)
        (folder / "storage.conf").write_text(storage_conf(state, node, *store))
        # podman reads this file after the site's own and replaces the keys that both have.
        (folder / "containers.conf.d").mkdir(exist_ok=True)
        settings = containers_conf(*(resource.getrlimit(kind)[1] for kind in LIMITS.values()))
        (folder / "containers.conf.d" / "99-sandbox.conf").write_text(settings)


def _store() -> tuple[str, str] | None:
    """Return the driver and the folder of podman's images on the machine; None without podman."""
    podman = shutil.which("podman", path=PATH)
    if podman is None:
        return None
    done = subprocess.run([podman, "info", "--format=json"], capture_output=True, text=True)
    if done.returncode:
        return None
    store = json.loads(done.stdout)["store"]
    return store["graphDriverName"], store["graphRoot"]


def storage_conf(state: StateDir, node: str, driver: str, images: str) -> str:
    """Text of storage.conf: like a disk of the node's own, which a power cut does not erase."""
    lines = [
        "[storage]",
        f'driver = "{driver}"',
        f'graphroot = "{state.containers / node}"',
        # A file system that a reboot empties; init.sh mounts it.
        'runroot = "/run/containers/storage"',
        "[storage.options]",
        f'additionalimagestores = ["{images}"]',
    ]
    return "\n".join(lines) + "\n"


def containers_conf(*limits: int) -> str:
    """Text of containers.conf: no systemd, no journal, and no limits above the machine's own.

    Raising those takes CAP_SYS_RESOURCE, which a sandbox within a container may lack.
    """
    pairs = zip(LIMITS, limits, strict=True)
    known = [f"{name}={most}:{most}" for name, most in pairs if most != resource.RLIM_INFINITY]
    lines = [
        "[containers]",
        f"default_ulimits = {json.dumps(known)}",
        "[engine]",
        'cgroup_manager = "cgroupfs"',
        'events_logger = "file"',
    ]
    return "\n".join(lines) + "\n"
