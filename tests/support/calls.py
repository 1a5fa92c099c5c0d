"""Functions that the tests of the executors submit; light, since every rank imports this file."""

import os
import sys
import time
from pathlib import Path
from typing import Any


def gather(factor: int, *, plus: int = 0) -> dict[str, Any]:
    """Say what a rank knows, and what all of them make together."""
    import submitit
    import torch
    from torch import distributed

    mine = torch.tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(mine)
    print(f"rank {distributed.get_rank()} is here")
    return {
        "rank": distributed.get_rank(),
        "submitit": submitit.JobEnvironment().global_rank,
        "tasks": submitit.JobEnvironment().num_tasks,
        "backend": distributed.get_backend(),
        "host": os.environ.get("SLURMD_NODENAME"),
        "sum": float(mine) * factor + plus,
        "run_dir": os.environ["TRAIN_RUN_DIR"],
        "writes": [getattr(sys.stdout, name) for name in ("line_buffering", "write_through")],
    }


def fail_on(rank: int) -> None:
    """Raise an exception on one rank while the others wait for it."""
    from torch import distributed

    if distributed.get_rank() == rank:
        raise ArithmeticError(f"rank {rank} cannot do this")
    distributed.barrier()


def wait_for_ever(marks: str) -> None:
    """Report that this rank has started, and run until it is killed."""
    from torch import distributed

    Path(marks, f"rank-{distributed.get_rank()}-{os.environ['TRAIN_ATTEMPT']}").touch()
    while True:
        time.sleep(0.1)
        distributed.barrier()


class Counter:
    """Counts to the end over several attempts, on all ranks in step."""

    def __init__(self, marks: str) -> None:
        self.marks = marks
        self.count = 0
        self.attempts: list[int] = []

    def __call__(self, first: int, *, leap: int = 0) -> tuple[int, list[int], int]:
        """Count on; the first attempt would never come to the end."""
        from torch import distributed

        attempt = int(os.environ["TRAIN_ATTEMPT"])
        self.attempts.append(attempt)
        while attempt == 0:
            self.count += 1
            Path(self.marks, f"rank-{distributed.get_rank()}-{attempt}").touch()
            distributed.barrier()
            time.sleep(0.05)
        return self.count, self.attempts, first + leap

    def checkpoint(self, first: int, *, leap: int = 0) -> Any:
        """Continue with the count so far, and with another argument."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, first, leap=leap + 100)
