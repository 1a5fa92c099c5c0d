"""One collective shown and measured.

Numbers before and after on every rank, checked against plain Python; then latency and bandwidth,
size by size.
"""

import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..errors import TrainError
from ..rundir.console import Console
from ..runtime.rank import RankInfo
from .operations import Collective

Value = TypeVar("Value")

MOST_NUMBERS = 8
MOST_RANKS = 8
WARM_UP = 3


class WrongResult(TrainError):
    """A collective's result differs from the one computed in plain Python."""


@dataclass(kw_only=True)
class Ranks:
    """This rank, and a notice board that all ranks can read."""

    rank_info: RankInfo
    """Number of this rank, and of all ranks."""
    device: torch.device
    """The device of this rank's tensors."""
    store: Store
    """The notice board: a key-value store that rank 0 or the launcher serves."""
    timeout: timedelta
    """How long to wait for a rank."""
    rounds: int = field(default=0, init=False)
    """Number of exchanges so far; it makes the keys of each exchange unique."""

    def exchange(self, value: Value) -> list[Value]:
        """Give every rank the values of all ranks, by rank.

        The exchange uses the store, which is TCP and needs no collective, so that a broken
        collective can neither block nor falsify the report.
        """
        self.rounds += 1
        keys = [f"{self.rounds}/{rank}" for rank in range(self.rank_info.world_size)]
        self.store.set(keys[self.rank_info.rank], json.dumps(value))
        self.store.wait(keys, self.timeout)
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def synchronize(self) -> None:
        """Wait for the GPU's queued work: calls return before it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def demonstrate(collective: Collective, ranks: Ranks, console: Console) -> None:
    """Run a collective once on a few numbers, check it on every rank, and draw it.

    Raises:
        WrongResult: on all ranks; names each rank with a wrong result, and both results.
    """
    rank, world_size = ranks.rank_info.rank, ranks.rank_info.world_size
    start = [collective.before(other, world_size) for other in range(world_size)]
    mine = torch.tensor(start[rank], dtype=torch.float32, device=ranks.device)
    result = collective.prepare(mine, rank, world_size)()
    show(
        collective.name,
        collective.sentence,
        before=start[rank],
        expected=collective.after(start, rank),
        got=result.tolist(),
        ranks=ranks,
        console=console,
    )


def demonstrate_barrier(
    ranks: Ranks,
    console: Console,
    *,
    repeats: int,
    barrier: Callable[[], object] = dist.barrier,
) -> None:
    """Let the ranks arrive one after the other, and count the arrivals before and after.

    Raises:
        WrongResult: on all ranks, when the barrier let a rank through before all had arrived.
    """
    rank, world_size = ranks.rank_info.rank, ranks.rank_info.world_size
    if rank > 0:
        ranks.store.wait([f"arrived/{rank - 1}"], ranks.timeout)
    before = ranks.store.add("arrivals", 1)
    ranks.store.set(f"arrived/{rank}", "")
    barrier()
    # NCCL's barrier blocks the GPU; the process waits only when it reads a result.
    ranks.synchronize()
    show(
        "barrier",
        "nobody leaves before everybody has come (drawn: how many had come, as each saw it)",
        before=[before],
        expected=[world_size],
        got=[ranks.store.add("arrivals", 0)],
        ranks=ranks,
        console=console,
    )
    if repeats:
        console.say(f"  latency {format_time(latency(dist.barrier, repeats, ranks))}")


def demonstrate_monitored_barrier(ranks: Ranks, console: Console) -> None:
    """Keep the last rank away, and check that rank 0's error names it.

    Raises:
        WrongResult: on all ranks, when rank 0 gets no number, or another rank's.
    """
    rank, away = ranks.rank_info.rank, ranks.rank_info.world_size - 1
    # Only gloo supports it, so NCCL needs a second group; and a group is unusable after a failed
    # barrier.
    group = dist.new_group(backend="gloo", timeout=ranks.timeout)
    missing: list[int] = []
    console.say(f"\n(1 s without rank {away}; torch itself now complains on standard error)")
    if rank != away:
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=1), wait_all_ranks=True)
        except RuntimeError as error:
            missing = missing_ranks(str(error))
    show(
        "monitored_barrier",
        f"rank 0 names who did not come in time: rank {away} stays away here (drawn: its names)",
        before=[],
        expected=[away] if rank == 0 else None,
        got=missing,
        ranks=ranks,
        console=console,
    )


def missing_ranks(message: str) -> list[int]:
    """Extract the ranks from the error message of a monitored barrier on rank 0.

    >>> missing_ranks("Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms")
    [1, 3]
    """
    match = re.search(r"Ranks? ([0-9, ]+) failed to pass monitoredBarrier", message)
    return [int(rank) for rank in match[1].split(",")] if match else []


def show(
    name: str,
    sentence: str,
    *,
    before: Sequence[float],
    expected: Sequence[float] | None,
    got: Sequence[float],
    ranks: Ranks,
    console: Console,
) -> None:
    """Compare results on every rank, see `demonstrate()`; draw the numbers before and after."""
    rows = ranks.exchange((list(before), None if expected is None else list(expected), list(got)))
    wrong = [
        f"{name}: rank {rank} expected {_numbers(right)}, got {_numbers(result)}"
        for rank, (_, right, result) in enumerate(rows)
        if right is not None and right != result
    ]
    if wrong:
        raise WrongResult("\n".join(wrong))
    width = max(len(_numbers(start)) for start, _, _ in rows[:MOST_RANKS])
    console.say(f"\n{name}: {sentence}")
    for rank, (start, right, result) in enumerate(rows[:MOST_RANKS]):
        end = "not promised" if right is None else _numbers(result)
        console.say(f"  {f'rank {rank}':<7}  {_numbers(start):<{width}}  →  {end}")
    if len(rows) > MOST_RANKS:
        console.say(f"  … and {len(rows) - MOST_RANKS} more")
    console.say(f"  right on all {len(rows)} ranks")


def _numbers(values: Sequence[float]) -> str:
    """Write the first few numbers; nothing is a dash.

    >>> _numbers([1.0, 2.5])
    '1 2.5'
    """
    shown = " ".join(f"{value:g}" for value in values[:MOST_NUMBERS])
    return (shown + (" …" if len(values) > MOST_NUMBERS else "")) or "-"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One line of the table."""

    size_bytes: int
    """The largest buffer of a rank: the requested size, rounded to whole numbers for every rank."""
    latency_s: float
    """The slowest rank's time, median over the calls."""
    bus_factor: float
    """Bus bandwidth / algorithm bandwidth."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Buffer size / time, in bytes per second."""
        return self.size_bytes / self.latency_s

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second, comparable with the speed of the hardware; see `operations`."""
        return self.algorithm_bandwidth * self.bus_factor


def print_table(
    collective: Collective, sizes: Sequence[int], repeats: int, ranks: Ranks, console: Console
) -> None:
    """Measure a collective for each size, and print each line at once."""
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
    # Each number (4 bytes) of the largest buffer in the small case becomes a block, so the same
    # expected result holds for all sizes.
    small_bytes = 4 * collective.numbers(world_size)
    block = max(1, size_bytes // small_bytes)
    start = [collective.before(other, world_size) for other in range(world_size)]

    def enlarged(values: list[int]) -> torch.Tensor:
        small = torch.tensor(values, dtype=torch.float32, device=ranks.device)
        return small.repeat_interleave(block)

    call = collective.prepare(enlarged(start[rank]), rank, world_size)
    expected = collective.after(start, rank)
    # Only the first call has the known result: later ones add to its sums.
    result = call()
    verdicts = ranks.exchange(expected is None or torch.equal(result, enlarged(expected)))
    if wrong := [other for other, right in enumerate(verdicts) if not right]:
        what = f"{collective.name} of {format_size(size_bytes)}"
        raise WrongResult("\n".join(f"{what}: wrong result on rank {other}" for other in wrong))
    return Measured(
        size_bytes=block * small_bytes,
        latency_s=latency(call, repeats, ranks),
        bus_factor=collective.bus_factor(world_size),
    )


def latency(call: Callable[[], object], repeats: int, ranks: Ranks) -> float:
    """Return the median of a call's seconds, from all ranks being ready to the last being done.

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
    # A rank that only sends is done early: a call ends when it has ended on all ranks.
    by_call = zip(*ranks.exchange(mine[WARM_UP:]), strict=True)
    slowest: list[float] = [max(times) for times in by_call]
    return statistics.median(slowest)


def format_size(size_bytes: int) -> str:
    """Write a number of bytes.

    >>> format_size(4096), format_size(67_108_860), format_size(1020)
    ('4 KiB', '64 MiB', '1 KiB')
    """
    for unit, bytes_each in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        # A size a few bytes short of a whole unit, to divide by the ranks, is shown as that unit.
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
