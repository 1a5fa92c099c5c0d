"""Latency and bandwidth of a collective, size by size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train.collectives.demo import WrongResult
from train.collectives.operations import Collective
from train.collectives.ranks import Ranks
from train.rundir.console import Console

WARM_UP = 3
_ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One line of the table."""

    size_bytes: int
    """The largest buffer of a rank: the requested sizes, in whole numbers for every rank."""
    latency_s: float
    """Median over the calls of the time of the slowest rank."""
    bus_factor: float
    """Bus bandwidth / algorithm bandwidth."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, as the caller sees it."""
        return self.size_bytes / self.latency_s

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second, comparable with the speed of the hardware; see `operations`."""
        return self.algorithm_bandwidth * self.bus_factor


def table(
    collective: Collective, sizes: Sequence[int], repeats: int, ranks: Ranks, console: Console
) -> None:
    """Measure a collective for each size, and print as it goes."""
    if sizes:
        console.say(f"  {'size':>9} {'latency':>10} {'algbw':>11} {'busbw':>11}")
    for size in sizes:
        line = measure(collective, size, repeats, ranks)
        console.say(
            f"  {format_size(line.size_bytes):>9} {format_time(line.latency_s):>10} "
            f"{format_bandwidth(line.algorithm_bandwidth):>11} "
            f"{format_bandwidth(line.bus_bandwidth):>11}"
        )


def measure(collective: Collective, size_bytes: int, repeats: int, ranks: Ranks) -> Measured:
    """Measure one size, and check its result as well.

    Raises:
        WrongResult: on all ranks; names the ranks.
    """
    rank, world_size = ranks.rank_info.rank, ranks.rank_info.world_size
    numbers = collective.numbers(world_size)
    # Each number of the small case becomes a block: the same expectation holds for all sizes.
    block = max(1, size_bytes // (_ITEM_BYTES * numbers))
    start = [collective.before(other, world_size) for other in range(world_size)]

    def blown_up(values: list[int]) -> torch.Tensor:
        small = torch.tensor(values, dtype=torch.float32, device=ranks.device)
        return small.repeat_interleave(block)

    call = collective.prepare(blown_up(start[rank]), rank, world_size)
    expected = collective.after(start, rank)
    # A call adds to what the one before left, so only the first has the known result.
    right = torch.equal(call(), blown_up(expected)) if expected is not None else bool(call().size())
    if not all(verdicts := ranks.exchange(right)):
        raise WrongResult(
            "\n".join(
                f"{collective.name} of {format_size(size_bytes)}: wrong result on rank {other}"
                for other, verdict in enumerate(verdicts)
                if not verdict
            )
        )
    return Measured(
        size_bytes=block * numbers * _ITEM_BYTES,
        latency_s=latency(call, repeats, ranks),
        bus_factor=collective.bus_factor(world_size),
    )


def latency(call: Callable[[], object], repeats: int, ranks: Ranks) -> float:
    """Median of the seconds a call takes, from when all ranks are ready to when the last is done.

    The first calls, which open connections and touch memory, do not count.
    """
    mine: list[float] = []
    for _ in range(WARM_UP + repeats):
        ranks.synchronize()
        dist.barrier()
        ranks.synchronize()
        started = time.perf_counter()
        call()
        ranks.synchronize()
        mine.append(time.perf_counter() - started)
    # A rank that only sends is done early: a call is over when it is over for all.
    all_times = zip(*ranks.exchange(mine[WARM_UP:]), strict=True)
    slowest: list[float] = [max(times) for times in all_times]
    return statistics.median(slowest)


def format_size(size_bytes: int) -> str:
    """Write a number of bytes.

    >>> format_size(4096), format_size(67_108_860), format_size(1020)
    ('4 KiB', '64 MiB', '1 KiB')
    """
    for unit, bytes_each in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        # A few bytes less than a whole one, so that they divide by the ranks, still read as one.
        if size_bytes >= 0.98 * bytes_each:
            return f"{round(size_bytes / bytes_each, 1):g} {unit}"
    return f"{size_bytes} B"


def format_time(seconds: float) -> str:
    """Write a short time.

    >>> format_time(0.0000123), format_time(0.0123)
    ('12.3 µs', '12.3 ms')
    """
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def format_bandwidth(bytes_per_s: float) -> str:
    """Write bytes per second, in the decimal units of data sheets.

    >>> format_bandwidth(1.5e9), format_bandwidth(2.5e6)
    ('1.50 GB/s', '2.50 MB/s')
    """
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.2f} MB/s"
    )
