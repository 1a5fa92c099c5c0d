"""Whole runs of `python -m train` in processes that need not import torch first."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from tests.train.support.processes import PROCESSES

# Generous: a loaded machine is slow, not broken.
PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run has ended."""

    statuses: tuple[int | None, ...]
    """Exit status by rank; None: it had to be ended."""
    output: str
    """All that its ranks have printed."""

    @property
    def status(self) -> int | None:
        """The most informative status of all ranks: refusals before their echoes; None: a hang."""
        failed = [status for status in self.statuses if status]
        if 2 in failed or not failed:
            return 2 if failed else None if None in self.statuses else 0
        return failed[0]


def run(
    ranks: int,
    *flags: str,
    environ: Mapping[str, str],
    verify: tuple[str, ...] = ("--no-verify",),
) -> Ended:
    """Run the command line on some ranks of this machine, as `--spawn` would."""
    flags = (*verify, *flags)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            PROCESSES.Process(target=_rank, args=(rank, ranks, folder, flags, dict(environ)))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE_S
        failed_at = float("inf")
        # A rank that waits for a lost one learns of it from its connections.
        while time.monotonic() < deadline and (running := [p for p in processes if p.is_alive()]):
            wait([p.sentinel for p in running], timeout=1)
            if any(p.exitcode for p in processes) and failed_at == float("inf"):
                failed_at = time.monotonic()
            if time.monotonic() - failed_at > 20:
                break
        statuses = tuple(p.exitcode for p in processes)
        for process in processes:
            process.kill()
            process.join()
        return Ended(statuses=statuses, output=outputs(folder))


def output(folder: Path, rank: int) -> Path:
    """Name the file of what a rank prints."""
    return folder / f"output-{rank}"


def outputs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("output-*")))


def environment_of(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """Return what a launcher tells a rank; nothing to the only one."""
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TRAIN_MEETING": f"file://{folder}/meeting",
    }


def _rank(
    rank: int, ranks: int, folder: Path, flags: Sequence[str], environ: Mapping[str, str]
) -> None:
    printed = os.open(output(folder, rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= {**environ, **environment_of(rank, ranks, folder)}
    sys.argv[:] = ["train", *flags]
    import torch

    torch.set_num_threads(1)
    from train.__main__ import enter

    enter()
