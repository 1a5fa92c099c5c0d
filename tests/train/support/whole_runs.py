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
        """The most informative status of all ranks: refusals before their echoes."""
        known = [status for status in self.statuses if status]
        if None in self.statuses:
            return None
        return 2 if 2 in known else (known[0] if known else 0)


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
        late = [p.is_alive() for p in processes]
        failed = any(p.exitcode for p in processes)
        for process in processes:
            process.kill()
            process.join()
        statuses = tuple(
            (1 if failed else None) if slow else p.exitcode
            for p, slow in zip(processes, late, strict=True)
        )
        texts = [path.read_text() for path in sorted(folder.glob("output-*"))]
        return Ended(statuses=statuses, output="\n".join(texts))


def _rank(
    rank: int, ranks: int, folder: Path, flags: Sequence[str], environ: Mapping[str, str]
) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= environ
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TRAIN_MEETING": f"file://{folder}/meeting",
        }
    sys.argv[:] = ["train", *flags]
    import torch

    torch.set_num_threads(1)
    from train.__main__ import enter

    enter()
