"""Run a function on several ranks at once, in real processes that talk over gloo."""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.train.support.processes import PROCESSES

# Generous: a loaded machine is slow, not broken.
PATIENCE_S = 600.0

Result = TypeVar("Result")


def on_ranks(
    count: int, function: Callable[..., Result], *arguments: Any, connected: bool = True
) -> list[Result]:
    """Call `function(rank, *arguments)` on each rank; give the results by rank.

    `connected`: ranks are connected by then, rather than by the function.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            PROCESSES.Process(
                target=_rank, args=(rank, count, Path(folder), function, arguments, connected)
            )
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + PATIENCE_S
        try:
            # One that fails leaves the others waiting for it.
            while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
                if time.monotonic() > deadline:
                    pytest.fail(f"{function.__name__}: still running after {PATIENCE_S} s")
                next((p for p in ranks if p.is_alive()), ranks[0]).join(0.02)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if errors := [path.read_text() for path in sorted(Path(folder).glob("*.error"))]:
            pytest.fail("\n".join(errors))
        assert [p.exitcode for p in ranks] == [0] * count
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(count)]


def _rank(
    rank: int,
    count: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    connected: bool,
) -> None:
    torch.set_num_threads(1)
    # As in pytest itself.
    warnings.simplefilter("error")
    try:
        if connected:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=PATIENCE_S),
            )
        torch.save(function(rank, *arguments), folder / f"{rank}.pt")
        if connected:
            dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
