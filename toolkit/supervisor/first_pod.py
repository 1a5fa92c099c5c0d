"""The first pod of a run, which hosts the rendezvous, as the other pods see it.

After the loss of its node, its name resolves to both the lost pod and its replacement, so torchrun
gets an address instead. torchrun waits only a minute for a store that does not exist yet, but hangs
for 20 minutes on a lost store, whatever the timeouts.
"""

import contextlib
import os
import re
import socket
import time
from typing import List, Optional, Sequence, Set, Tuple

from .evidence.files import open_regular, read
from .process import Signals

OPTION = "--rdzv-endpoint="
CONNECT_S = 5.0
QUIET_S = 30
"""How long torchrun may have no ranks before it is assumed to hang on a lost store."""

_FAILED = re.compile(rb"failed \(exitcode:")


class FirstPod:
    """The first pod, by the endpoint in torchrun's arguments."""

    def __init__(self, command: Sequence[str]) -> None:
        given = [word[len(OPTION) :] for word in command if word.startswith(OPTION)]
        self.endpoint = given[-1] if given else ""

    def address(self) -> str:
        """Return the address that answers; empty if none does."""
        host, _, port = self.endpoint.rpartition(":")
        try:
            with contextlib.closing(
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
            ) as connection:
                return str(connection.getpeername()[0])
        except (OSError, ValueError):
            return ""

    def wait(self, limit_s: float, signals: Signals) -> str:
        """Return the address once the pod answers; empty after the limit or on a signal."""
        end = time.monotonic() + limit_s
        while self.endpoint and not signals.seen and time.monotonic() <= end:
            address = self.address()
            if address:
                return address
            signals.wait(1)
        return ""


def own_address() -> str:
    """Return this pod's address; empty if its name has none."""
    try:
        return socket.gethostbyname(os.environ.get("HOSTNAME") or socket.gethostname())
    except OSError:
        return ""


def at_address(command: List[str], address: str) -> List[str]:
    """Return torchrun's arguments with the first pod's name replaced by the address.

    >>> at_address(["--rdzv-endpoint=a-0.a:29500", "-m"], "10.0.0.7")
    ['--rdzv-endpoint=10.0.0.7:29500', '-m']
    """
    host = f"[{address}]" if ":" in address else address
    return [
        f"{OPTION}{host}:{word.rpartition(':')[2]}" if address and word.startswith(OPTION) else word
        for word in command
    ]


class Deserted:
    """Detects a torchrun that hangs without ranks because the first pod is lost."""

    def __init__(self, first: FirstPod, pid: int, log: str, most_s: float) -> None:
        """Watch the torchrun of a process id.

        `most_s`: after this many seconds without ranks, torchrun is deserted even if the first pod
        answers: that pod may be a replacement.
        """
        self._first, self._pid, self._log, self._most_s = first, pid, log, most_s
        self._ranks: Set[str] = set()
        self._noticed = self._failures()
        self._quiet_since: Optional[float] = None

    def look(self) -> bool:
        """Return whether torchrun is deserted. While the same ranks run, it reads only /proc."""
        children = _children(self._pid)
        if children is None:
            return False
        running, unnoticed = children
        if running:
            if running - self._ranks:  # a new start
                self._noticed = self._failures()
            self._ranks, self._quiet_since = running, None
            return False
        now = time.monotonic()
        if not unnoticed and self._failures() == self._noticed:
            self._quiet_since = None  # torchrun waits for the other nodes
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        quiet_s = now - self._quiet_since
        return quiet_s >= self._most_s or (quiet_s >= QUIET_S and not self._first.address())

    def _failures(self) -> int:
        """Return how many rank failures torchrun has logged; it polls ten times a second."""
        try:
            with open_regular(self._log) as file:
                return sum(1 for line in file if _FAILED.search(line))
        except OSError:
            return 0


def _children(pid: int) -> Optional[Tuple[Set[str], bool]]:
    """Return torchrun's running children, and whether any ended without being noticed."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = file.read().split()
    except OSError:
        return None
    running, ended = set(), False
    for child in children:
        state = re.search(r"^State:\s*(\w)", read(f"/proc/{child}/status"), re.MULTILINE)
        if state is not None and state.group(1) == "Z":
            ended = True
        elif state is not None:
            running.add(child)
    return running, ended
