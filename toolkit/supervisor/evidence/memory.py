"""Processes that the kernel killed out of memory, and the memory peaks of ranks."""

import os
from typing import Dict, Iterable, Iterator, List, NamedTuple, Sequence

from .files import read

CGROUPS = "/sys/fs/cgroup"

_FILES = {"": ("", "memory.events"), "memory": ("/memory", "memory.oom_control")}
"""By the controllers of a line in /proc/PID/cgroup, none in version 2: the mount point of the
hierarchy, and the file with the kernel's counters (cgroups(7))."""


def oom_kills(membership: str = "/proc/self/cgroup", mount: str = CGROUPS) -> int:
    """Return how many processes of this process's cgroup were killed out of memory.

    Args:
        membership: The file that names the cgroups of a process.
        mount: Mount point of the hierarchies. A container may see its cgroup as their root.
    """
    kills = 0
    for line in read(membership).split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or controllers not in _FILES:
            continue
        place, name = _FILES[controllers]
        counts = read(f"{mount}{place}{path}/{name}") or read(f"{mount}{place}/{name}")
        kills += _kills_in(counts)
    return kills


def oom_kills_of_container(mount: str) -> int:
    """Return how many processes of a container were killed; its cgroup is the visible root."""
    return sum(_kills_in(read(f"{mount}{place}/{name}")) for place, name in _FILES.values())


def _kills_in(counts: str) -> int:
    return sum(_number(each[9:]) for each in counts.split("\n") if each[:9] == "oom_kill ")


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


# ---- Memory of ranks


class Rank(NamedTuple):
    """A process that torchrun has started, or one that a rank has started."""

    pid: int
    number: str
    """The rank's RANK."""
    restart: int
    """How often torchrun restarted the ranks before this one."""


def ranks_below(pids: Iterable[int]) -> Iterator[Rank]:
    """Yield the ranks among the descendants of processes, as far as /proc is readable."""
    below = [*_children(pids)]
    for pid in below:
        variables = variables_of(pid)
        if variables.get("RANK"):
            restart = _number(variables.get("TORCHELASTIC_RESTART_COUNT", ""))
            yield Rank(_rank_of_proxy(pid, below) or pid, variables["RANK"], restart)


def _rank_of_proxy(pid: int, below: Sequence[int]) -> int:
    """Return the pid of a proxy's rank (watchdog/rank_proxy.py); 0 for other processes.

    A proxy in a container is named after its rank's pid in the container.
    """
    word, _, number = read(f"/proc/{pid}/comm", 20).strip().partition("-")
    if word != "for" or not number.isdigit():
        return 0
    if len(pids_in_namespaces(pid)) < 2:
        return int(number)
    return next((each for each in below if pids_in_namespaces(each)[-1:] == [number]), 0)


def pids_in_namespaces(pid: int) -> List[str]:
    """Return the pids of a process in its PID namespaces, from this one's on (proc(5), NSpid)."""
    for line in read(f"/proc/{pid}/status").split("\n"):
        if line.startswith("NSpid:"):
            return line.split()[1:]
    return []


def peak_kb(pid: int) -> int:
    """Return the memory peak of a process in KiB (VmHWM of proc(5)); 0 if unknown."""
    for line in read(f"/proc/{pid}/status").split("\n"):
        if line.startswith("VmHWM:"):
            return _number(line[6:].rpartition("kB")[0])
    return 0


def _children(pids: Iterable[int]) -> Iterator[int]:
    """Yield all descendants of processes: those started by the first thread of each."""
    waiting: List[int] = list(pids)
    while waiting:
        pid = waiting.pop()
        below = [int(word) for word in read(f"/proc/{pid}/task/{pid}/children").split()]
        yield from below
        waiting += below


def variables_of(pid: int) -> Dict[str, str]:
    """Return the environment in which a process was started; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = os.fsdecode(file.read()).split("\0")
    except OSError:  # it has ended, or is another user's
        return {}
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
