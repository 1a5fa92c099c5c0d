"""How long the ranks of a run wait for each other, as recorded by the watchdog of rank 0.

The records are untrusted (docs/reference/run-directory.md): values that are not numbers are left
out.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.runs.records.log_reader import Span, attempt_folders, last_objects
from toolkit.text import control, untrusted

_MOST_RANKS = 1 << 20
_MOST_ATTEMPTS = 50
_MOST_SHARES = 1 << 18
"""Limit of shares in memory, over all records; the newest ones are kept."""

_FILE_BYTES = 256 << 20
_LINE_BYTES = 4 << 20
"""Byte limit of a record: enough for a hundred thousand ranks."""

_RECORDS = "watchdog/ranks.jsonl"
"""The records in an attempt's log folder."""


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """The share of time that ranks have waited for others, in their newest steps."""

    time: float
    """When the record was written, in seconds since 1970."""

    waits: Mapping[int, float]
    """The share by rank, from 0 to 1; a slow rank waits least."""

    nodes: Mapping[int, str]
    """The node of each rank."""

    def __str__(self) -> str:
        """Describe it in a line: `wait for others 2% (rank 3 on node2) to 25% (rank 0 on …) …`."""
        least, most = (extreme(self.waits, key=self.waits.__getitem__) for extreme in (min, max))
        first, last = (
            f"{self.waits[rank]:.0%} (rank {rank} on {self.nodes[rank]})" for rank in (least, most)
        )
        return f"wait for others {first} to {last} of the time"


def newest_waits(run_dir: Path) -> RankWaits | None:
    """Return the newest record of the newest attempt; None without one."""
    for folder in attempt_folders(run_dir)[-1:]:
        records = last_objects(Span(path=folder / _RECORDS), _LINE_BYTES)
        return next(filter(None, map(_waits_in, records)), None)
    return None


def waits_in(run_dir: Path) -> list[RankWaits]:
    """Return the records of the newest attempts, oldest first."""
    newest, shares = deque[RankWaits](), 0
    for folder in attempt_folders(run_dir)[-_MOST_ATTEMPTS:]:
        path = folder / _RECORDS
        for value in untrusted.stream_json(path, limit=_FILE_BYTES, line_limit=_LINE_BYTES):
            if (waits := _waits_in(untrusted.mapping(value))) is not None:
                newest.append(waits)
                shares += len(waits.waits)
            while shares > _MOST_SHARES and len(newest) > 1:
                shares -= len(newest.popleft().waits)
    return list(newest)


def mean_waits(records: Sequence[RankWaits]) -> dict[int, float]:
    """Return each rank's mean share of waiting time, the lowest first."""
    shares: dict[int, list[float]] = {}
    for record in records:
        for rank, share in record.waits.items():
            shares.setdefault(rank, []).append(share)
    means = {rank: statistics.fmean(own) for rank, own in shares.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def _waits_in(row: Mapping[str, Any]) -> RankWaits | None:
    """Return the content of a record; None if it has none."""
    waits, nodes = dict[int, float](), dict[int, str]()
    for each in map(untrusted.sequence, untrusted.sequence(row.get("waits"))):
        if len(each) != 3 or not isinstance(each[2], str):
            continue
        rank, share = untrusted.whole(each[0], most=_MOST_RANKS), untrusted.finite(each[1])
        if rank is not None and share is not None and 0 <= share <= 1:
            waits[rank], nodes[rank] = share, control.printable(each[2])[:80]
    when = untrusted.moment(row.get("time"))
    return RankWaits(time=when, waits=waits, nodes=nodes) if waits and when is not None else None
