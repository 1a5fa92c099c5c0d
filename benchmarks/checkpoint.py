"""How long a checkpoint holds training up, beside the shortest time there could be.

Run as `python -m benchmarks.checkpoint`. The benchmark times the call of the training loop,
`Saver.save()`; a thread writes the checkpoint to disk afterwards. The floor is a copy of the same
tensors into memory that is allocated already. All rows take turns, so that a busy machine
disturbs them alike.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from train.checkpoints.saver import Saver
from train.cli.config import Config
from train.data.order import Batch
from train.model.gradients import LossScaler
from train.model.optimizer import NamedOptimizer
from train.parallel.base import Parts
from train.parallel.one_process import Single
from train.rundir.console import Console
from train.rundir.files import RunDirectory, TrainingProgress
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.tasks.base import Task

WIDTH = 1024
TARGET = 1.5


@dataclass(frozen=True, kw_only=True)
class Stack(Task):
    """Linear layers, as many as it takes."""

    layers: int
    """How many."""

    def model(self) -> nn.Module:
        """Stack them."""
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)))

    def train(self) -> Batch:
        """Give nothing to speak of."""
        return Batch(inputs=torch.zeros(1, WIDTH), targets=torch.zeros(1, WIDTH))

    def test(self) -> Batch:
        """Give the same."""
        return self.train()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum something."""
        return (outputs - targets).square().sum()


class Bench:
    """A live model and optimizer, and ways to save them."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        """Make one optimizer step, so that there are moments."""
        layers = round(megabytes * 1e6 / (3 * 4 * (WIDTH * WIDTH + WIDTH)))
        task = Stack(layers=layers)
        config = Config(task="stack", run_dir=folder / "run", keep_checkpoints=1)
        rank_info = RankInfo()
        layout = config.layout_on(rank_info)
        group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
        parts = Parts(task=task, config=config, layout=layout, group=group)
        self.folder = folder
        self.strategy = Single(parts)
        self.optimizer = NamedOptimizer(self.strategy.named_parameters(), config)
        self.strategy.accumulate([task.train()])
        self.optimizer.step()
        config.directory.mkdir()
        self.saver = Saver(
            identity={},
            strategy=self.strategy,
            optimizer=self.optimizer,
            scaler=LossScaler(enabled=False),
            directory=RunDirectory(config.directory, rank_info),
            console=Console(rank=0),
        )
        self.progress = TrainingProgress(steps=0)
        self.buffers = {name: torch.empty_like(t) for name, t in self.tensors().items()}
        self._async: Any = None

    def tensors(self) -> dict[str, Tensor]:
        """Give the live state."""
        return {**self.strategy.model_state(), **self.optimizer.tensors()}

    def copy(self) -> None:
        """Do what no checkpoint can do without."""
        for name, tensor in self.tensors().items():
            self.buffers[name].copy_(tensor.detach())

    def ours(self) -> None:
        """Save as the training loop does."""
        self.progress.step += 1
        self.saver.save(self.progress, epoch=0)

    def torch_save(self) -> None:
        """Save as introductions do."""
        torch.save(self.tensors(), self.folder / "state.pt")

    def dcp_save(self) -> None:
        """Save with torch's distributed checkpoints."""
        save(self.tensors(), storage_writer=self._writer())

    def dcp_async_save(self) -> None:
        """Save with their asynchronous form."""
        self._async = async_save(self.tensors(), storage_writer=self._writer())

    def _writer(self) -> FileSystemWriter:
        return FileSystemWriter(self.folder / "dcp")

    def settle(self) -> None:
        """Wait for the checkpoints that are still being written."""
        self.saver.wait()
        if self._async is not None:
            self._async.result()
            self._async = None
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)


def measure(action: Callable[[], None], settle: Callable[[], None]) -> tuple[float, float]:
    """Give the seconds until an action returns, and until it is done."""
    started = time.perf_counter()
    action()
    stall = time.perf_counter() - started
    settle()
    return stall, time.perf_counter() - started


def show(stalls: Mapping[str, list[float]], totals: Mapping[str, list[float]], floor: str) -> float:
    """Print the table; give our ratio to the floor."""
    lowest = statistics.median(stalls[floor])
    print(f"{'':<28} {'stall':>8} {'':>15} {'x floor':>8} {'total':>8}")
    for name, values in stalls.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f} to {max(values):.3f}"
        total = statistics.median(totals[name])
        print(f"{name:<28} {median:>6.3f} s {spread:>15} {median / lowest:>8.2f} {total:>6.2f} s")
    return statistics.median(stalls["toolkit"]) / lowest


def main() -> int:
    """Measure and print; fail when a checkpoint holds training up for too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds (default 10)")
    parser.add_argument("--megabytes", type=int, default=500, help="size of model and optimizer")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        bench = Bench(Path(folder), options.megabytes)
        rows = {
            "copy (the floor)": bench.copy,
            "toolkit": bench.ours,
            "dcp.async_save": bench.dcp_async_save,
            "dcp.save": bench.dcp_save,
            "torch.save": bench.torch_save,
        }
        stalls: dict[str, list[float]] = {name: [] for name in rows}
        totals: dict[str, list[float]] = {name: [] for name in rows}
        for count in range(options.rounds + 1):
            # In another order each time: what follows a flood of writes is at a disadvantage.
            for name in random.Random(count).sample(list(rows), len(rows)):
                stall, total = measure(rows[name], bench.settle)
                if count:  # the first round gets memory and warms the caches
                    stalls[name].append(stall)
                    totals[name].append(total)
        size = sum(tensor.nbytes for tensor in bench.tensors().values())
        print(f"{size / 1e6:.0f} MB of model and AdamW state, median of {options.rounds}:")
        ratio = show(stalls, totals, "copy (the floor)")
        dist.destroy_process_group()
    print(f"toolkit / copy: {ratio:.2f} (at most {TARGET})")
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
