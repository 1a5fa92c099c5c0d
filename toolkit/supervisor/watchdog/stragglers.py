"""Which rank the others wait for again and again, by the times at which ranks begin collectives.

torch records these times (its flight recorder). The last rank to begin a collective lets the others
wait, as long as it came after the last but one. The record does not say whether they wait in this
collective or go on, and wait in a later one: they have waited where the rank is suddenly no longer
late. Where it is late all the time, they have waited once in each step, or more often. A step is as
many collectives as recur in the same order with the same sizes.

On GPUs (NCCL), a rank queues collectives ahead, and the time of queueing says nothing. There torch
measures how long each collective takes on the GPU. All ranks end it together, so the last rank to
begin it takes the shortest; clocks do not matter. But the other ranks may compute while the
collective waits. So a slow rank costs, about, at least the longest wait of each step, and at most
the sum of all waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

MOST, MOST_ON_GPU = 400, 2000
"""So many of the newest collectives are compared; a GPU has many in a step, which look alike."""

MOST_OF_ALL = 400_000
"""So many are compared of all GPUs together, but `MOST` of each: one process does it."""

FEWEST_STEPS = 20
FASTER = 0.10
"""A rank is named if the run would be faster by this share without it,"""

LAST_IN = 0.9
"""and if it comes last in this share of the steps."""


class Arrivals(NamedTuple):
    """When a rank has begun its newest collectives."""

    first: int
    """The number of the first of them."""

    times: Sequence[float]
    """In seconds since 1970, by the clock of the rank's node; without a gap. On GPUs, only those of
    the first rank are read."""

    kinds: Sequence[int]
    """A sum of name and sizes for each; only that of the first rank is read."""

    took: Sequence[float] = ()
    """How many seconds each has taken on the rank's GPU; nothing on the CPU."""


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    faster: float
    """By which share the run would be faster without it; on GPUs, at least."""

    at_most: float | None
    """By which share it would be faster at most: on the CPU, the same; None if that is unknown."""


class Comparison(NamedTuple):
    """How the ranks differ in their newest steps."""

    waits: Mapping[int, float]
    """By rank: in which share of the time it has waited for other ranks."""

    straggler: Straggler | None
    """The rank that the others wait for, if it costs much."""


def arrivals_of(entries: Sequence[Mapping[str, Any]], world: int = 1) -> Arrivals:
    """Return the newest collectives of the default group that a rank has begun, or its GPU ended.

    torch knows those of the GPU where TORCH_NCCL_ENABLE_TIMING is set. Of how many ranks one is,
    `world` says.
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
    """Return how the ranks differ; None where that cannot be told.

    Args:
        arrivals: Of each rank.
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
    """Return how many collectives a step has; None if they do not recur often enough."""
    for period in range(1, (len(kinds) - 1) // FEWEST_STEPS + 1):
        same = sum(a == b for a, b in zip(kinds, kinds[period:]))
        if same >= 0.95 * (len(kinds) - period):
            return period
    return None


def _set_clocks(times: dict[int, Sequence[float]], nodes: Mapping[int, str], period: int) -> bool:
    """Set the clocks of all nodes alike, in place; say whether that was possible.

    In each step, some collective follows at once another one that all ranks have waited for: that
    where the time since the one before is the shortest, for the rank that comes last. All ranks
    begin it together, so that there their times differ only as the clocks do.
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
    """Return the rank that comes last by the longest times, in steps of `period` collectives."""
    rank, late, _ = _last_by_most(times)
    lost, longest = _waited(late, period)
    took = _took(times)
    is_last = sum(each > 0 for each in longest) >= LAST_IN * len(longest)
    faster = lost / (took - lost) if is_last and took > lost else 0.0
    return Straggler(rank, faster, faster)


def _latest_on_gpu(times: Mapping[int, Sequence[float]], period: int) -> Straggler:
    """Return the rank whose GPU comes last by the longest times.

    A step may have many collectives of the same size, of which only one shows that the rank is
    late. So the time is divided into as many parts as `FEWEST_STEPS`, and the rank must be the last
    one in most parts.
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
    """Return the rank that comes last by the longest times.

    Returns:
        The rank; for each collective, by how much this rank came after the last but one; and by how
        much any rank did.
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
    """Return for how long a rank has waited that begins collectives so much before the last one.

    Returns:
        The time in all, and by how much it was ahead at most in each step.
    """
    steps = (len(ahead) - 1) // period
    longest = [max(ahead[step * period : (step + 1) * period]) for step in range(steps)]
    waits = [before - after for before, after in zip(ahead, ahead[1:]) if after <= before / 2 > 0]
    return sum(waits) if len(waits) >= LAST_IN * steps else sum(longest), longest


def _waits(times: Mapping[int, Sequence[float]], period: int) -> dict[int, float]:
    """Return by rank in which share of the time it has waited for others."""
    ends = [max(column) for column in zip(*times.values())]
    took = _took(times)
    shares = {}
    for rank, own in times.items():
        ahead = [end - begin for end, begin in zip(ends, own)]
        waited, _ = _waited(ahead, period)
        shares[rank] = min(waited / took, 1.0) if took > 0 else 0.0
    return shares
