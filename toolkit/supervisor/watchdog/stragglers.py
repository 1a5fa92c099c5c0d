"""Finds the rank that others repeatedly wait for, from the times at which collectives begin.

torch records these times (flight recorder). The last rank to begin a collective makes the others
wait for the time since the last but one began. The record does not show whether they wait in this
collective or continue and wait in a later one: they have waited if the rank is suddenly no longer
late. If the rank is always late, they have waited at least once in each step. A step is the
sequence of collectives that recurs in the same order with the same sizes.

On GPUs (NCCL), a rank queues collectives ahead, and the time of queueing is not informative. There
torch measures the duration of each collective on the GPU. All ranks end it together, so the last
rank to begin it has the shortest duration; clocks do not matter. But the other ranks may compute
while the collective waits. So a slow rank costs roughly between the longest wait of each step and
the sum of all waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

MOST, MOST_ON_GPU = 400, 2000
"""How many of the newest collectives to compare; a GPU has many similar ones in a step."""

MOST_OF_ALL = 400_000
"""How many to compare over all GPUs, but at least `MOST` of each: one process does it."""

FEWEST_STEPS = 20
FASTER = 0.10
"""A rank is reported if the run would be faster by this share without it,"""

LAST_IN = 0.9
"""and if it comes last in this share of the steps."""


class Arrivals(NamedTuple):
    """When a rank began its newest collectives."""

    first: int
    """The number of the first one."""

    times: Sequence[float]
    """In seconds since 1970, by the clock of the rank's node, without gaps. On GPUs, only the times
    of the first rank are read."""

    kinds: Sequence[int]
    """A checksum of each one's name and sizes; only those of the first rank are read."""

    took: Sequence[float] = ()
    """The seconds that each one took on the rank's GPU; empty on the CPU."""


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    faster: float
    """The speed-up of the run without this rank, as a share; on GPUs, the lower bound."""

    at_most: float | None
    """The upper bound of this share: on the CPU, the same; None if unknown."""


class Comparison(NamedTuple):
    """How the ranks differ in their newest steps."""

    waits: Mapping[int, float]
    """By rank: the share of time spent waiting for other ranks."""

    straggler: Straggler | None
    """The rank that the others wait for, if it costs much."""


def arrivals_of(entries: Sequence[Mapping[str, Any]], world: int = 1) -> Arrivals:
    """Return a rank's newest collectives in the default group: begun, or on a GPU, ended.

    torch knows the times of the GPU if TORCH_NCCL_ENABLE_TIMING is set. `world` is the number of
    ranks.
    """
    most = max(MOST, min(MOST_ON_GPU, MOST_OF_ALL // world))
    of_all = [e for e in entries if e["process_group"][0] == "0" and not e["is_p2p"]]
    timed = [e for e in of_all if e.get("duration_ms") is not None]
    on_gpu = [entry for entry in timed if entry["profiling_name"].startswith("nccl:")]
    on_cpu = [entry for entry in of_all if entry["profiling_name"].startswith("gloo:")]
    newest = on_gpu[-most:] or on_cpu[-MOST:]
    begun = {entry["collective_seq_id"]: entry for entry in newest}
    first = last = max(begun, default=0)
    while first - 1 in begun:
        first -= 1
    newest = [begun[number] for number in range(first, last + 1) if begun]
    words = (f"{e['profiling_name']} {e['input_sizes']} {e['input_dtypes']}" for e in newest)
    times = array("d", [entry["time_created_ns"] / 1e9 for entry in newest])
    took = array("d", [entry["duration_ms"] / 1e3 for entry in newest] if on_gpu else [])
    return Arrivals(first, times, [crc32(text.encode()) for text in words], took)


def compare(arrivals: Mapping[int, Arrivals], nodes: Mapping[int, str]) -> Comparison | None:
    """Return how the ranks differ; None if that cannot be determined.

    Args:
        arrivals: The arrivals of each rank.
        nodes: The node of each rank.
    """
    on_gpu = all(each.took for each in arrivals.values())
    if len(arrivals) < 2 or on_gpu < any(each.took for each in arrivals.values()):
        return None
    begin = max(each.first for each in arrivals.values())
    end = min(each.first + len(each.took or each.times) for each in arrivals.values())
    if end - begin <= FEWEST_STEPS:
        return None
    reference = arrivals[min(arrivals)]
    period = _period(reference.kinds[begin - reference.first : end - reference.first])
    if period is None:
        return None
    begin = end - 1 - (end - 1 - begin) // period * period  # whole steps
    times = {
        rank: each.times[begin - each.first : end - each.first] for rank, each in arrivals.items()
    }
    if on_gpu:
        ends = times[min(times)]  # as good as any: all ranks end a collective together
        for rank, each in arrivals.items():
            took = each.took[begin - each.first : end - each.first]
            times[rank] = array("d", [end - own for end, own in zip(ends, took)])
    elif len({nodes[rank] for rank in times}) > 1 and not _set_clocks(times, nodes, period):
        return None
    found = (_latest_on_gpu if on_gpu else _latest)(times, period)
    costs = found.at_most is None or found.at_most >= FASTER
    return Comparison(_waits(times, period), found if costs else None)


def _period(kinds: Sequence[int]) -> int | None:
    """Return the number of collectives in a step; None if they do not recur often enough."""
    for period in range(1, (len(kinds) - 1) // FEWEST_STEPS + 1):
        same = sum(a == b for a, b in zip(kinds, kinds[period:]))
        if same >= 0.95 * (len(kinds) - period):
            return period
    return None


def _set_clocks(times: dict[int, Sequence[float]], nodes: Mapping[int, str], period: int) -> bool:
    """Align the clocks of all nodes, in place; return whether that was possible.

    In each step, some collective immediately follows another one that all ranks have waited for: it
    has the shortest time since the previous one, for the rank with the smallest such time. All
    ranks begin it together, so their times there differ only by their clocks.
    """
    if period == 1:
        return False
    count = len(times[min(times)])

    def since(place: int) -> float:
        places = range(place, count, period)
        return _middle(min(own[at] - own[at - 1] for own in times.values()) for at in places)

    together = range(min(range(1, period + 1), key=since), count, period)
    by_node: dict[str, list[Sequence[float]]] = {}
    for rank, own in times.items():
        by_node.setdefault(nodes[rank], []).append(own)
    earliest = {
        node: [min(own[at] for own in each) for at in together] for node, each in by_node.items()
    }
    first = earliest[nodes[min(times)]]
    ahead = {node: _middle(a - b for a, b in zip(each, first)) for node, each in earliest.items()}
    for rank, own in times.items():
        times[rank] = array("d", [when - ahead[nodes[rank]] for when in own])
    return True


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _latest(times: Mapping[int, Sequence[float]], period: int) -> Straggler:
    """Return the rank with the largest total delay, in steps of `period` collectives."""
    rank, late, _ = _last_by_most(times)
    lost, longest = _waited(late, period)
    took = _took(times)
    is_last = sum(each > 0 for each in longest) >= LAST_IN * len(longest)
    faster = lost / (took - lost) if is_last and took > lost else 0.0
    return Straggler(rank, faster, faster)


def _latest_on_gpu(times: Mapping[int, Sequence[float]], period: int) -> Straggler:
    """Return the rank with the largest total delay of its GPU.

    A step may have many collectives of the same size, and only one of them shows that the rank is
    late. So the time is divided into `FEWEST_STEPS` parts, and the rank must be the last one in
    most parts.
    """
    rank, late, margins = _last_by_most(times)
    late, margins = late[1:], margins[1:]  # between the first collective and the last one
    size = -(-len(late) // FEWEST_STEPS // period) * period
    parts = [range(begin, min(begin + size, len(late))) for begin in range(0, len(late), size)]
    lasts = sum(
        2 * sum(late[at] for at in part) > sum(margins[at] for at in part) for part in parts
    )
    if lasts < LAST_IN * len(parts) or sum(late) < LAST_IN * sum(margins):
        return Straggler(rank, 0.0, 0.0)
    caught_up = sum(before - after for before, after in zip(late, late[1:]) if after <= before / 2)
    size = period if period > 1 else size
    longest = (max(late[begin : begin + size]) for begin in range(0, len(late), size))
    least = max(caught_up, sum(longest))
    most, took = sum(late), _took(times)
    at_most = most / (took - most) if most < took else None
    return Straggler(rank, least / (took - least) if least < took else 0.0, at_most)


def _last_by_most(
    times: Mapping[int, Sequence[float]],
) -> tuple[int, Sequence[float], Sequence[float]]:
    """Return the rank with the largest total delay.

    Returns:
        The rank; for each collective, the delay of this rank after the last but one, and the delay
        of the last rank.
    """
    ranks = list(times)
    lasts, margins = [], []
    for column in zip(*times.values()):
        end = max(column)
        at = column.index(end)
        lasts.append(ranks[at])
        margins.append(end - max(column[:at] + column[at + 1 :]))
    late_s = dict.fromkeys(ranks, 0.0)
    for rank, margin in zip(lasts, margins):
        late_s[rank] += margin
    rank = max(ranks, key=late_s.__getitem__)
    late = [own if each == rank else 0.0 for each, own in zip(lasts, margins)]
    return rank, late, margins


def _took(times: Mapping[int, Sequence[float]]) -> float:
    """Return the seconds from the first collective to the last one, each begun by all ranks."""
    return max(own[-1] for own in times.values()) - max(own[0] for own in times.values())


def _waited(ahead: Sequence[float], period: int) -> tuple[float, Sequence[float]]:
    """Return how long a rank has waited, by its lead over the last rank in each collective.

    Returns:
        The total time, and the largest lead in each step.
    """
    steps = (len(ahead) - 1) // period
    longest = [max(ahead[step * period : (step + 1) * period]) for step in range(steps)]
    waits = [before - after for before, after in zip(ahead, ahead[1:]) if after <= before / 2 > 0]
    return sum(waits) if len(waits) >= LAST_IN * steps else sum(longest), longest


def _waits(times: Mapping[int, Sequence[float]], period: int) -> dict[int, float]:
    """Return, by rank, the share of time spent waiting for others."""
    ends = [max(column) for column in zip(*times.values())]
    took = _took(times)
    shares = {}
    for rank, own in times.items():
        ahead = [end - begin for end, begin in zip(ends, own)]
        waited, _ = _waited(ahead, period)
        shares[rank] = min(waited / took, 1.0) if took > 0 else 0.0
    return shares
