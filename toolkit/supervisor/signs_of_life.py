"""Detects nodes that have lost power: Slurm takes SlurmdTimeout, or misses that a node is back.

Each node writes its clock to `alive-N` in the attempt's folder while its torchrun runs. If the file
stops changing, the node's slurmd may have started after the last heartbeat, or the node may accept
no connection.
"""

import os
from typing import Callable, Collection, Dict, NamedTuple, Optional, Sequence, Tuple

from .evidence.files import read

SILENT_LOOKS = 6
"""Number of looks without a new heartbeat after which to query the node's slurmd, repeatedly."""

_SIGNS_PER_LOOK = 64
"""Maximum number of files to read per look; with more nodes, they take turns."""

_LOOKS_OF_1000_NODES = 36
"""With more nodes, each writes its heartbeat less often: with 1,000, once a minute."""


class Lost(NamedTuple):
    """A node whose torchrun is gone."""

    number: int
    silent_looks: int
    """Looks without a new heartbeat."""
    restarted: bool
    """Whether the node is back; otherwise it does not answer."""


class SignsOfLife:
    """The last heartbeats of an attempt's nodes."""

    def __init__(
        self,
        logs: str,
        nodes: Sequence[str],
        began_s: Callable[[str], Optional[float]],
        is_unreachable: Callable[[str], bool] = lambda node: False,
    ) -> None:
        self.logs, self.nodes, self.began_s = logs, nodes, began_s
        self._is_unreachable = is_unreachable
        self._every = max(1, -(-len(nodes) // _SIGNS_PER_LOOK))
        self._silent_looks = max(SILENT_LOOKS, len(nodes) * _LOOKS_OF_1000_NODES // 1000)
        self._looks = 0
        self._last: Dict[int, Tuple[str, int]] = {}

    def look(self, ended: Collection[str]) -> Optional[Lost]:
        """Return a lost node; skip those in `ended`."""
        self._looks += 1
        for number in range(self._looks % self._every, len(self.nodes), self._every):
            if str(number) in ended:
                continue
            sign = read(os.path.join(self.logs, f"alive-{number}"), 100).strip()
            if not sign.isdigit():
                continue
            before, silent = self._last.get(number, ("", 0))
            silent = silent + self._every if sign == before else self._every
            self._last[number] = (sign, silent)
            if silent % self._silent_looks >= self._every:
                continue
            restarted = self._has_restarted(number, sign)
            if restarted or self._is_unreachable(self.nodes[number]):
                return Lost(number, silent, restarted)
        return None

    def _has_restarted(self, number: int, sign: str) -> bool:
        began_s = self.began_s(self.nodes[number])
        return began_s is not None and began_s >= int(sign)
