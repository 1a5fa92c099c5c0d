"""Ports of this machine for servers that are started a while after their port was chosen."""

from __future__ import annotations

import socket
from itertools import chain
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_HOW_MANY = 10_000
# By their names other tests' processes know which ports are taken; all end with this process.
_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port that is free, and stays free as long as this process lives.

    A port of `bind(0)` that is closed again may belong to another process a moment later. So this
    function chooses outside of the kernel's range, from which `bind(0)` and `connect` take theirs,
    and locks the port against other tests.
    """
    low, high = map(int, _RANGE.read_text().split())
    for port in chain(range(max(1024, low - _HOW_MANY), low), range(high + 1, 65536)):
        if _take(port):
            return port
    raise RuntimeError(f"no port is left beside those from {low} to {high}, which {_RANGE} names")


def _take(port: int) -> bool:
    """Reserve a port against other tests, if it is free and no process listens there."""
    name = socket.socket(socket.AF_UNIX)
    try:
        # An abstract one, which is gone with its process: no file is left behind.
        name.bind(f"\0torch-deploy-toolkit tests port {port}")
        _probe(port)
    except OSError:
        name.close()
        return False
    _held.append(name)
    return True


def _probe(port: int) -> None:
    """Bind a port on all addresses, as torch's store does.

    Raises:
        OSError: the port is taken.
    """
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
        if both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("", port))
