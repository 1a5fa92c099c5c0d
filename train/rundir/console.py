"""Console output for people: lines from rank 0 only."""

import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, kw_only=True)
class Console:
    """Prints on one rank, is silent on the others."""

    rank: int
    """Rank of this process; 0 speaks."""

    def say(self, text: str) -> None:
        """Print a line on standard output, at once: a buffered last line dies with the process."""
        if self.rank == 0:
            print(f"{text}\n", end="", flush=True)

    def complain(self, text: str, *, every_rank: bool = False) -> None:
        """Print an error on standard error; `every_rank` for what only this rank can know."""
        if self.rank == 0 or every_rank:
            who = f"train: rank {self.rank}" if every_rank and self.rank else "train"
            print(f"{who}: {text}\n", end="", file=sys.stderr, flush=True)


def keep_lines_whole() -> None:
    """Make this process write each line as soon as it ends, and in one piece.

    Under PYTHONUNBUFFERED, `print` writes the newline separately, and another rank's line may come
    in between, as torchrun also forwards parts of lines. After a text of several lines, `print`
    still writes the last newline separately, unless it is part of the text.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def end_process(exit_status: int) -> NoReturn:
    """Flush buffered output, and end this process at once.

    Not by sys.exit(): gloo's threads may still hold tensors from DDP, and free them while the
    interpreter shuts down. That aborts the process (seen in 1 of 8 runs), so a finished run would
    be reported as failed. We have no exit handlers to run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)


def figures(metrics: Mapping[str, float]) -> str:
    """Format metrics for a line: `loss 0.0312, test_accuracy 0.9722`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
