"""Which parameters a step trains: those to which some rank's data have given a gradient.

A layer that only some batches use, or none, has no gradient, and an optimizer leaves it alone.
Ranks that exchange gradients must send one for every parameter, so zeros stand in for those that a
rank has none of. Where no rank has one, the zeros have to go again: momentum and weight decay would
move the parameter, which one process does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from train.parallel.base import Strategy
    from train.runtime.process_group import RankGroup

NOTHING: frozenset[str] = frozenset()


class Untrained:
    """Agrees between the ranks on the parameters that a step leaves alone.

    Each rank knows for which of its own it has no gradient. As long as that stays as it was when
    they last agreed, nothing is exchanged: that it does travels with the step's loss.
    """

    def __init__(self, strategy: Strategy, group: RankGroup) -> None:
        """Begin with every parameter trained."""
        self._strategy, self._group = strategy, group
        self._agreed_for = NOTHING
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: Sequence[str] = ()
        self.names = NOTHING
        """Parameters, on any rank, for which no rank has a gradient."""

    def changed(self) -> bool:
        """Say whether this rank's data have left out other parameters than when last agreed."""
        return self._strategy.without_gradient() != self._agreed_for

    def agree(self) -> None:
        """Find out what no rank has a gradient for; all ranks call this."""
        if not self._names:
            self._parameters = dict(self._strategy.named_parameters())
            mine = [name for name, p in self._parameters.items() if p.requires_grad]
            self._names = sorted({name for rank in self._group.gather(mine) for name in rank})
        lacking = self._agreed_for = self._strategy.without_gradient()
        trained = torch.tensor(
            [name in self._parameters and name not in lacking for name in self._names],
            dtype=torch.int32,
            device=self._group.device,
        )
        if self._group.connected:
            dist.all_reduce(trained)
        counts: list[int] = trained.tolist()
        self.names = frozenset(n for n, count in zip(self._names, counts, strict=True) if not count)

    def forget_zeros(self) -> None:
        """Take away the zeros that stand for gradients which no rank has."""
        for name in self.names:
            if (parameter := self._parameters.get(name)) is not None:
                parameter.grad = None


def some_of(names: frozenset[str], most: int = 4) -> str:
    """Write names, the first of many."""
    rest = len(names) - most
    return ", ".join(sorted(names)[:most]) + (f" and {rest} more" if rest > 0 else "")
