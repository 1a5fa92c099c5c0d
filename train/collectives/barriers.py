"""The two barriers: one that waits, and one that names the missing rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from train.collectives.demo import show
from train.collectives.ranks import Ranks
from train.collectives.timing import format_time, latency
from train.rundir.console import Console

PATIENCE = timedelta(seconds=1)


def demonstrate_barrier(
    ranks: Ranks,
    console: Console,
    *,
    repeats: int,
    barrier: Callable[[], object] = dist.barrier,
) -> None:
    """Let the ranks arrive one after the other, and count the arrivals before and after.

    Raises:
        WrongResult: on all ranks, when one was let through before all had arrived.
    """
    rank, world_size = ranks.rank_info.rank, ranks.rank_info.world_size
    if rank > 0:
        ranks.store.wait([f"arrived/{rank - 1}"], ranks.timeout)
    before = ranks.store.add("arrivals", 1)
    ranks.store.set(f"arrived/{rank}", "")
    barrier()
    # NCCL's barrier lets the GPU wait, and the program only when it asks for a result.
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
    """Keep the last rank away, and check that rank 0 is given its number.

    Raises:
        WrongResult: on all ranks, when rank 0 was not told, or told another rank.
    """
    rank, away = ranks.rank_info.rank, ranks.rank_info.world_size - 1
    # gloo only, so beside NCCL it needs a group of its own; and a barrier that failed leaves a
    # group that is no longer good for anything.
    group = dist.new_group(backend="gloo", timeout=ranks.timeout)
    named: list[int] = []
    console.say(f"\n(1 s without rank {away}; torch itself now complains on standard error)")
    if rank != away:
        try:
            dist.monitored_barrier(group, timeout=PATIENCE, wait_all_ranks=True)
        except RuntimeError as error:
            named = missing_ranks(str(error))
    show(
        "monitored_barrier",
        f"rank 0 names who did not come in time: rank {away} stays away here (drawn: its names)",
        before=[],
        expected=[away] if rank == 0 else None,
        got=named,
        ranks=ranks,
        console=console,
    )


def missing_ranks(message: str) -> list[int]:
    """Read the ranks out of what a monitored barrier raises on rank 0.

    >>> missing_ranks("Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms")
    [1, 3]
    """
    match = re.search(r"Ranks? ([0-9, ]+) failed to pass monitoredBarrier", message)
    return [int(rank) for rank in match[1].split(",")] if match else []
