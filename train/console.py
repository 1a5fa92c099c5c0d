"""What people see: lines from rank 0 only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Console:
    """Prints on one rank, is silent on the others."""

    rank: int
    """Rank of this process; 0 speaks."""

    def say(self, text: str) -> None:
        """Print a line on standard output, at once: a buffered last line dies with the process."""
        if self.rank == 0:
            print(text, flush=True)

    def complain(self, text: str, *, every_rank: bool = False) -> None:
        """Print an error on standard error; `every_rank` for what only this rank can know."""
        if self.rank == 0 or every_rank:
            who = f"train: rank {self.rank}" if every_rank and self.rank else "train"
            print(f"{who}: {text}", file=sys.stderr, flush=True)


def figures(metrics: Mapping[str, float]) -> str:
    """Format metrics for a line: `loss 0.0312, test_accuracy 0.9722`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
