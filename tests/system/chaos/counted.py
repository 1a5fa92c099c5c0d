"""A task that notes which samples it was given, so that a test can count them.

`$COUNTED` names a folder that all ranks see. Its files also say how fast to train, and which rank
shall eat up its memory or raise an exception. Each rank prints a line before it notes a step, so
that a test can look for the last line of every rank.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.data.order import Batch
from train.tasks import Task

SAMPLES = 1000


class Counted(Task):
    """Regression on noise; a target is its value beside its sample's number, counted from 1."""

    def __init__(self) -> None:
        folder, rank = Path(os.environ["COUNTED"]), os.environ["RANK"]
        self.attempt = os.environ["TRAIN_ATTEMPT"]
        # torchruns of one job may count restarts differently; the port is one for all that met.
        self.log = folder / f"{self.attempt}-{os.environ['MASTER_PORT']}-{rank}.jsonl"
        self.restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.pace, self.hungry = folder / "pace", folder / f"hungry-{rank}"
        self.faulty = folder / f"faulty-{rank}"
        self.steps = 0
        self.eaten: list[bytes] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def train(self) -> Batch:
        return _samples(SAMPLES, seed=1)

    def test(self) -> Batch:
        return _samples(32, seed=2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        numbers = [int(number) for number in targets[:, 1].tolist()]
        # Neither an evaluation nor the passes over zeros with which DDP warms up.
        if torch.is_grad_enabled() and any(numbers):
            self._note(numbers)
        return functional.mse_loss(outputs[:, 0], targets[:, 0], reduction="sum")

    def _note(self, numbers: list[int]) -> None:
        self.steps += 1
        print(word(self.log, self.restart, self.steps), end="", flush=True)
        note = {"time": time.time(), "restart": int(self.restart), "numbers": numbers}
        with self.log.open("a") as file:
            file.write(json.dumps(note) + "\n")
        while self.hungry.exists():
            self.eaten.append(os.urandom(1 << 25))
            with suppress(FileNotFoundError):
                time.sleep(float(self.hungry.read_text() or 0))
        if self.faulty.exists():
            raise IndexError("list index out of range")
        time.sleep(float(self.pace.read_text() or 0))


def word(log: Path, restart: str | int, step: int) -> str:
    """Return the line that a rank prints for the step of this number since its start."""
    return f"{log.stem} of start {restart} notes its step {step}\n"


def _samples(count: int, *, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    numbers = torch.arange(1.0, count + 1)
    return Batch(inputs=inputs, targets=torch.stack([inputs.sin().sum(dim=1), numbers], dim=1))
