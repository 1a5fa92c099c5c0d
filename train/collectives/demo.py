"""One collective shown: numbers before and after on every rank, checked against plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from train.collectives.operations import Collective
from train.collectives.ranks import Ranks
from train.errors import TrainError
from train.rundir.console import Console

MOST_NUMBERS = 8
MOST_RANKS = 8


class WrongResult(TrainError):
    """A collective gave a rank something else than plain Python computes."""


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
    """Compare on every rank what came with what had to come, and draw the numbers that came.

    Raises:
        WrongResult: as for `demonstrate()`.
    """
    seen = ranks.exchange((list(before), None if expected is None else list(expected), list(got)))
    wrong = [
        f"{name}: rank {rank} expected {_numbers(due)}, got {_numbers(came)}"
        for rank, (_, due, came) in enumerate(seen)
        if due is not None and due != came
    ]
    if wrong:
        raise WrongResult("\n".join(wrong))
    lines = [
        (f"rank {rank}", _numbers(own), "not promised" if due is None else _numbers(came))
        for rank, (own, due, came) in enumerate(seen[:MOST_RANKS])
    ]
    width = max(len(own) for _, own, _ in lines)
    console.say(f"\n{name}: {sentence}")
    for who, own, came in lines:
        console.say(f"  {who:<7}  {own:<{width}}  →  {came}")
    if len(seen) > MOST_RANKS:
        console.say(f"  … and {len(seen) - MOST_RANKS} more")
    console.say(f"  right on all {len(seen)} ranks")


def _numbers(values: Sequence[float]) -> str:
    """Write the first few numbers; nothing is a dash.

    >>> _numbers([1.0, 2.5])
    '1 2.5'
    """
    shown = " ".join(f"{value:g}" for value in values[:MOST_NUMBERS])
    return (shown + (" …" if len(values) > MOST_NUMBERS else "")) or "-"
