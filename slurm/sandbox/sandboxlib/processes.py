"""Which processes live where, seen from outside the namespaces."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .state import CONTROLLER, Process, Record, SandboxError

DAEMONS = {"munged", "slurmd", "slurmctld", "slurmdbd", "mariadbd"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One process of a node."""

    node: str
    pid: int
    """As this machine sees it: `kill` takes it."""
    node_pid: int
    """As the node itself sees it."""
    command: str


@dataclass(frozen=True, kw_only=True)
class _Row:
    pid: int
    parent: int
    name: str
    inner_pid: int
    namespace: str
    command: str


def _row(pid: int) -> _Row | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
        namespace = str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    name = fields["Name"].strip()
    return _Row(
        pid=pid,
        parent=int(fields["PPid"]),
        name=name,
        # Ours, the node's, and in a container the container's.
        inner_pid=int(fields["NSpid"].split()[:2][-1]),
        namespace=namespace,
        command=command.decode(errors="replace") or f"[{name}]",
    )


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def living(record: Record, nodes: list[str], *, daemons: bool = False) -> list[Entry]:
    """List the processes of nodes; without `daemons` only what jobs have started."""
    rows = {row.pid: row for row in map(_row, _pids()) if row is not None}
    entries = []
    for node in nodes:
        if not record.alive(node):
            continue
        init = record.machines[node].pid
        if init not in rows:
            continue
        for row in rows.values():
            # By namespace, for what entered from outside; by descent, for namespaces of containers.
            if row.namespace != rows[init].namespace and not _descends(row, init, rows):
                continue
            own = row.pid == init or (row.parent == init and row.name in DAEMONS)
            if daemons or not own:
                entries.append(
                    Entry(node=node, pid=row.pid, node_pid=row.inner_pid, command=row.command)
                )
    return entries


def _descends(row: _Row, ancestor: int, rows: dict[int, _Row]) -> bool:
    while row.parent in rows:
        if row.parent == ancestor:
            return True
        row = rows[row.parent]
    return False


def visitors(record: Record) -> list[Process]:
    """Processes outside the machines that entered the controller's network, like a waiting srun.

    Not this process and those above it: `down` may be called from `sandbox exec`.
    """
    if not record.alive(CONTROLLER):
        return []
    spared, pid = set(), os.getpid()
    while pid:
        spared.add(pid)
        row = _row(pid)
        pid = row.parent if row else 0
    network = _network(record.machines[CONTROLLER].pid)
    found = []
    for pid in _pids():
        if pid not in spared and network is not None and _network(pid) == network:
            try:
                found.append(Process.of(pid))
            except SandboxError:
                continue
    return found


def _network(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None
