"""How often torchrun restarted the ranks of a run, and the reason for the last restart."""

import glob
import os
import re
from typing import Dict, Iterable, List, Tuple

from .files import TAIL_BYTES, open_regular, read
from .rank_end import exited

_NODES_BEGIN_WITHIN_S = 5
"""All nodes start their ranks within this many seconds; each torchrun counts separately."""

_FAILED = re.compile(rb"failed \(exitcode: (-?\d{1,9})\) local_rank: (\d{1,9}) ")


def restarts_by_torchrun(run_dir: str) -> int:
    """Count the starts of ranks beyond the first of each attempt, over all nodes."""
    found: List[Tuple[int, str]] = []
    pattern = os.path.join(glob.escape(run_dir), "logs/attempt-*/*/*/attempt_*")
    for path in glob.iglob(pattern):
        try:
            found.append((int(os.stat(path).st_mtime), path))
        except OSError:
            continue
    starts: Dict[str, int] = {}
    began_s: Dict[str, int] = {}
    newest: Dict[str, int] = {}
    for time_s, path in sorted(found):
        attempt, node = path.split(os.sep)[-4:-2]
        place = f"{attempt}/{node}"
        another = newest.get(place, 0) == starts.get(attempt, 0)
        if time_s - began_s.get(attempt, 0) > _NODES_BEGIN_WITHIN_S or another:
            starts[attempt] = starts.get(attempt, 0) + 1
            began_s[attempt] = time_s
        newest[place] = starts[attempt]
    return sum(count - 1 for count in starts.values())


def last_cause(logs: Iterable[str], begin: int = 0) -> str:
    """Return the failure of the rank that caused the last restart by torchrun.

    `begin`: the first relevant byte of a log.
    """
    newest = b""
    for path in logs:
        try:
            with open_regular(path) as file:
                file.seek(begin)
                for line in iter(lambda: file.readline(TAIL_BYTES), b""):
                    if _FAILED.search(line):
                        newest = max(newest, line)
        except OSError:
            continue
    found = _FAILED.search(newest)
    if found is None:
        return ""
    return f"local rank {found.group(2).decode()}: {exited(int(found.group(1)))}"


def after_restarts(run_dir: str, attempt: int, logs: Iterable[str], begin: int = 0) -> str:
    """Return how often the ranks of a successful run were restarted, and why."""
    count = restarts_by_torchrun(run_dir) + attempt
    if not count:
        return ""
    cause = last_cause(logs, begin)
    if not cause and attempt:
        reason = read(os.path.join(run_dir, "logs", f"attempt-{attempt - 1}", "reason"), 4096)
        reason = reason.rstrip("\n")
        cause = reason.rpartition("; ")[0] or reason
    times = "1 restart" if count == 1 else f"{count} restarts" + (", the last" if cause else "")
    return f", after {times}" + (f": {cause}" if cause else "")
