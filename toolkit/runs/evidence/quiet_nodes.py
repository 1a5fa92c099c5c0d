"""Nodes of a running attempt on Slurm that have stopped sending heartbeats.

While its torchrun runs, each node writes its clock into `alive-N` in the attempt's folder, and then
torchrun's exit into `ended-N` (docs/reference/run-directory.md).
"""

from itertools import islice
from pathlib import Path

from toolkit.runs.records.log_reader import attempt_folders, modified_at, nodes_of
from toolkit.text import control, untrusted
from toolkit.text.quantities import rounded_duration, whole_number

_QUIET_S = 60.0
_QUIET_OF_NODE_S = 0.3
"""A node is quiet after five missing heartbeats; with many nodes, each sends fewer."""

_MOST_NODES, _MOST_NAMED = 10_000, 4


def quiet_nodes(run_dir: Path) -> str | None:
    """Return the nodes without a recent heartbeat; None if all have one, or for a single node.

    The newest heartbeat of any node is the current time: the clock of the file system counts.
    """
    attempts = attempt_folders(run_dir)
    if not attempts:
        return None
    names = {one.name for one in untrusted.entries(attempts[-1], below=run_dir) if one.is_file}
    alive = (name for name in names if name.startswith("alive-"))
    signs = {
        name[len("alive-") :]: modified_at(attempts[-1] / name)
        for name in islice(alive, _MOST_NODES)
    }
    newest, limit_s = max(signs.values(), default=0.0), max(_QUIET_S, _QUIET_OF_NODE_S * len(signs))
    quiet = {
        key: newest - time
        for key, time in signs.items()
        if newest - time > limit_s and f"ended-{key}" not in names
    }
    if not quiet:
        return None
    hosts = nodes_of(attempts[-1])

    def name_of(key: str) -> str:
        number = whole_number(key)
        known = number is not None and number < len(hosts)
        return control.printable(hosts[number] if known and number is not None else f"node {key}")

    keys = sorted(quiet, key=lambda key: -quiet[key])
    more = ", …" if len(keys) > _MOST_NAMED else ""
    named = ", ".join(map(name_of, keys[:_MOST_NAMED])) + more
    longest = rounded_duration(max(quiet.values()))
    return f"no sign of life from {named} for {longest}; Slurm waits SlurmdTimeout for a lost node"
