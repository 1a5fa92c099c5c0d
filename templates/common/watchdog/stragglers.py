"""Which rank the others wait for again and again, by the times at which ranks begin collectives.

torch records these times (its flight recorder). The last rank to begin a collective lets the others
wait, as long as it came after the last but one. The record does not say whether they wait in this
collective or go on, and wait in a later one: they have waited where the rank is suddenly no longer
late. Where it is late all the time, they have waited once in each step, or more often. A step is as
many collectives as recur in the same order with the same sizes.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

MOST = 400
"""So many of the newest collectives are compared."""

FEWEST_STEPS = 20
FASTER = 0.10
"""A rank is named if the run would be faster by this share without it,"""

LAST_IN = 0.9
"""and if it comes last in this share of the steps."""

Arrivals = Mapping[int, tuple[int, int]]
"""By a collective's number: when a rank began it, in nanoseconds, and a sum of name and sizes."""


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    faster: float
    """By which share the run would be faster without it."""


def arrivals_of(entries: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return the newest collectives of all ranks that a rank has begun on the CPU (gloo).

    With NCCL, ranks only queue collectives, so that these times say nothing.
    """
    arrivals = {}
    for entry in list(entries)[-MOST:]:
        name, (group, _) = entry["profiling_name"], entry["process_group"]
        if group == "0" and not entry["is_p2p"] and name.startswith("gloo:"):
            kind = crc32(f"{name} {entry['input_sizes']} {entry['input_dtypes']}".encode())
            arrivals[int(entry["collective_seq_id"])] = (int(entry["time_created_ns"]), kind)
    return arrivals


def straggler_of(arrivals: Mapping[int, Arrivals], nodes: Mapping[int, str]) -> Straggler | None:
    """Return the rank that the others wait for; None if there is none.

    Args:
        arrivals: Of each rank.
        nodes: The node of each rank.
    """
    if len(arrivals) < 2:
        return None
    numbers = _newest_in_a_row(arrivals.values())
    first_rank = next(iter(arrivals.values()))
    period = _period([first_rank[number][1] for number in numbers])
    if period is None or len(numbers) < FEWEST_STEPS * period:
        return None
    numbers = numbers[-(len(numbers) - 1) // period * period - 1 :]
    times = {rank: [own[number][0] / 1e9 for number in numbers] for rank, own in arrivals.items()}
    if len({nodes[rank] for rank in times}) > 1 and not _set_clocks(times, nodes, period):
        return None
    found = max((_lateness(times, rank, period) for rank in times), key=lambda each: each.faster)
    return found if found.faster >= FASTER else None


def _newest_in_a_row(arrivals: Iterable[Arrivals]) -> list[int]:
    """Return the numbers of the newest collectives that all ranks have begun, without a gap."""
    common = sorted(set.intersection(*(set(each) for each in arrivals)))
    first = len(common) - 1
    while first > 0 and common[first] - common[first - 1] == 1:
        first -= 1
    return common[max(first, 0) :]


def _period(kinds: Sequence[int]) -> int | None:
    """Return how many collectives a step has; None if they do not recur."""
    for period in range(1, len(kinds) // FEWEST_STEPS + 1):
        same = sum(a == b for a, b in zip(kinds, kinds[period:], strict=False))
        if same >= 0.95 * (len(kinds) - period):
            return period
    return None


def _set_clocks(times: dict[int, list[float]], nodes: Mapping[int, str], period: int) -> bool:
    """Set the clocks of all nodes alike, in place; say whether that was possible.

    In each step, some collective follows at once another one that all ranks have waited for: that
    where the time since the one before is the shortest, for the rank that comes last. All ranks
    begin it together, so that there their times differ only as the clocks do.
    """
    if period == 1:
        return False
    count = len(next(iter(times.values())))

    def since(place: int) -> float:
        places = range(place, count, period)
        return _middle(min(own[at] - own[at - 1] for own in times.values()) for at in places)

    together = range(min(range(1, period + 1), key=since), count, period)

    def earliest(node: str) -> list[float]:
        ranks = [own for rank, own in times.items() if nodes[rank] == node]
        return [min(own[at] for own in ranks) for at in together]

    by_node = {node: earliest(node) for node in {nodes[rank] for rank in times}}
    first = by_node[nodes[min(times)]]
    for rank, own in times.items():
        ahead = _middle(a - b for a, b in zip(by_node[nodes[rank]], first, strict=True))
        times[rank] = [when - ahead for when in own]
    return True


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _lateness(times: Mapping[int, list[float]], rank: int, period: int) -> Straggler:
    """Return how late a rank comes, in the steps of `period` collectives each."""
    columns = zip(*(own for other, own in times.items() if other != rank), strict=True)
    late = [max(own - max(column), 0.0) for own, column in zip(times[rank], columns, strict=True)]
    steps = (len(late) - 1) // period
    longest = [max(late[step * period : (step + 1) * period]) for step in range(steps)]
    waits = [before - after for before, after in pairwise(late) if after <= before / 2 > 0]
    lost = sum(waits) if len(waits) >= LAST_IN * steps else sum(longest)
    took = max(own[-1] for own in times.values()) - max(own[0] for own in times.values())
    is_last = sum(each > 0 for each in longest) / steps
    faster = lost / (took - lost) if is_last >= LAST_IN and took > lost else 0.0
    return Straggler(rank, faster)
