"""Each collective explained in words, in plain Python, and in torch.

`size` in a table is the largest buffer of a rank. Bus bandwidth is size / time times a factor that
makes it comparable with the speed of the hardware, for any number n of ranks: 2 (n-1) / n for
all_reduce; (n-1) / n for all_gather, reduce_scatter, all_to_all, gather and scatter; 1 for the
others. Source: nccl-tests, doc/PERFORMANCE.md, and its src/{gather,scatter,sendrecv}.cu.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = 0
Numbers = list[int]
Call = Callable[[], Tensor]
Prepare = Callable[[Tensor, int, int], Call]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, as data that a run explains, checks and measures.

    Every collective here moves whole numbers, or adds them elementwise. Its large case is therefore
    its small case with each number repeated, and one expected result serves all sizes.
    """

    name: str
    """Name without `dist.` and without the suffix of a variant."""
    sentence: str
    """A sentence that explains the collective."""
    before: Callable[[int, int], Numbers]
    """The numbers of (rank, world size) before."""
    after: Callable[[list[Numbers], int], Numbers | None]
    """The numbers of (rank) after, from those of all ranks before; None: undefined."""
    prepare: Prepare
    """From (tensor, rank, world size), the call to measure; it returns the rank's result."""
    bus_factor: Callable[[int], float] = lambda world_size: 1.0
    """Bus bandwidth / algorithm bandwidth, for a world size."""

    def numbers(self, world_size: int) -> int:
        """Return how many numbers the largest buffer has in the small case."""
        start = [self.before(rank, world_size) for rank in range(world_size)]
        ends = [self.after(start, rank) for rank in (ROOT, world_size - 1)]
        return max(len(numbers) for numbers in [*start, *ends] if numbers is not None)


def _two_each(rank: int, world_size: int) -> Numbers:
    return [2 * rank + 1, 2 * rank + 2]


def _one_for_each(rank: int, world_size: int) -> Numbers:
    return [10 * (rank + 1) + other for other in range(world_size)]


def _sums(before: list[Numbers]) -> Numbers:
    return [sum(column) for column in zip(*before, strict=True)]


def _in_place(operation: Callable[[Tensor], object]) -> Prepare:
    """Prepare a call that writes its result into the input tensor."""

    def prepare(mine: Tensor, rank: int, world_size: int) -> Call:
        def call() -> Tensor:
            operation(mine)
            return mine

        return call

    return prepare


def _into(
    operation: Callable[[Tensor, Tensor], object], numbers: Callable[[int, int], int]
) -> Prepare:
    """Prepare a call with a separate result tensor; `numbers(own numbers, ranks)` is its size."""

    def prepare(mine: Tensor, rank: int, world_size: int) -> Call:
        result = mine.new_empty(numbers(mine.numel(), world_size))

        def call() -> Tensor:
            operation(result, mine)
            return result

        return call

    return prepare


def _scatter(mine: Tensor, rank: int, world_size: int) -> Call:
    parts = list(mine.chunk(world_size)) if rank == ROOT else None
    received = mine if parts is None else torch.empty_like(parts[ROOT])

    def call() -> Tensor:
        dist.scatter(received, parts, src=ROOT)
        return received

    return call


def _gather(mine: Tensor, rank: int, world_size: int) -> Call:
    all_of_them = mine.new_empty(mine.numel() * world_size if rank == ROOT else 0)
    parts = list(all_of_them.chunk(world_size)) if rank == ROOT else None

    def call() -> Tensor:
        dist.gather(mine, parts, dst=ROOT)
        return all_of_them

    return call


def _send_recv(mine: Tensor, rank: int, world_size: int) -> Call:
    received = mine.new_empty(mine.shape)

    def call() -> Tensor:
        # Post both together: if every rank first sent and waited, none would ever receive.
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
            ]
        )
        for request in requests:
            request.wait()
        return received

    return call


def _all_but_own(world_size: int) -> float:
    return (world_size - 1) / world_size


COLLECTIVES = (
    Collective(
        name="all_reduce",
        sentence="every rank ends with the sum over all ranks, place by place",
        before=_two_each,
        after=lambda before, rank: _sums(before),
        prepare=_in_place(dist.all_reduce),
        bus_factor=lambda world_size: 2 * _all_but_own(world_size),
    ),
    Collective(
        name="broadcast",
        sentence="every rank gets what rank 0 has",
        # The zeros are where the other ranks receive.
        before=lambda rank, world_size: [1, 2] if rank == ROOT else [0, 0],
        after=lambda before, rank: before[ROOT],
        prepare=_in_place(partial(dist.broadcast, src=ROOT)),
    ),
    Collective(
        name="reduce",
        sentence="rank 0 alone ends with the sum; what the others hold then is not promised",
        before=_two_each,
        after=lambda before, rank: _sums(before) if rank == ROOT else None,
        prepare=_in_place(partial(dist.reduce, dst=ROOT)),
    ),
    Collective(
        name="scatter",
        sentence="rank 0 cuts its tensor in equal parts, and rank r gets part r",
        before=lambda rank, world_size: list(range(1, world_size + 1)) if rank == ROOT else [0],
        after=lambda before, rank: [before[ROOT][rank]],
        prepare=_scatter,
        bus_factor=_all_but_own,
    ),
    Collective(
        name="gather",
        sentence="rank 0 collects everybody's tensor, in order of rank",
        before=_two_each,
        after=lambda before, rank: list(chain(*before)) if rank == ROOT else [],
        prepare=_gather,
        bus_factor=_all_but_own,
    ),
    Collective(
        name="all_gather",
        sentence="every rank collects everybody's tensor, in order of rank",
        before=_two_each,
        after=lambda before, rank: list(chain(*before)),
        prepare=_into(dist.all_gather_single, lambda own, ranks: own * ranks),
        bus_factor=_all_but_own,
    ),
    Collective(
        name="reduce_scatter",
        sentence="the sum over all ranks is cut in equal parts, and rank r gets part r",
        before=_one_for_each,
        after=lambda before, rank: [_sums(before)[rank]],
        prepare=_into(dist.reduce_scatter_single, lambda own, ranks: own // ranks),
        bus_factor=_all_but_own,
    ),
    Collective(
        name="all_to_all",
        sentence="part s of rank r's tensor becomes part r of rank s's: a transpose across ranks",
        before=_one_for_each,
        after=lambda before, rank: [theirs[rank] for theirs in before],
        prepare=_into(dist.all_to_all_single, lambda own, ranks: own),
        bus_factor=_all_but_own,
    ),
    Collective(
        name="send_recv",
        sentence="each rank sends to the next and receives from the one before it, in a ring",
        before=_two_each,
        after=lambda before, rank: before[rank - 1],
        prepare=_send_recv,
    ),
)
