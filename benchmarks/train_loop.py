"""What a training loop costs beyond the training: CPU time per step over a bare loop.

Run as `make bench-train-loop`. The same model, optimizer and batches of 64 digits go through bare
loops, our trainer, Lightning Fabric, Accelerate and the Lightning Trainer: all in one process and
in turn, so that a busy machine disturbs all alike, with one thread. What counts is the CPU time of
the process. Rounds are short and many, since a loop is compared with the bare one of its own round;
the first is dropped, and the median of the others is shown. Numbers too small
for their format (denormals) count as zero: AdamW's averages of gradients that have vanished become
such numbers, on which a processor takes many times as long, in some loops earlier than in others.

Our loop does more in a step than the others: it seeds every step, checks that the
loss is finite, notes which parameters it has trained, and writes a line to metrics.jsonl. The
notes guard against ranks that train different parameters; their cost has its own line.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trainers import trainer_of
from train.cli.config import Config
from train.data.order import Batch, Samples
from train.loop import Trainer
from train.tasks.digits import Digits

BATCH = 64
LR = 0.005
WARM_UP = 20
TARGET_US = 50.0
GUARDS_PERCENT = 1.0
Pair = tuple[Tensor, Tensor]
# Makes a number of steps, and gives the CPU seconds they took.
Run = Callable[[int], float]


class DigitsByNumber(Digits):
    """The same task with its samples in a Dataset, which are collated as a DataLoader does."""

    def train(self) -> Samples:  # type: ignore[override]  # a Batch is one kind of Samples
        """Give the training samples one by one."""
        return dataset()


def dataset() -> TensorDataset:
    """Give the training samples as a Dataset."""
    batch = Digits().train()
    return TensorDataset(batch.inputs, batch.targets)


def loader() -> "DataLoader[Pair]":
    """Give what introductions use."""
    return DataLoader(dataset(), batch_size=BATCH, shuffle=True, drop_last=True)  # type: ignore[arg-type]


def forever(batches: "DataLoader[Pair]") -> Iterator[Pair]:
    """Give epoch after epoch."""
    while True:
        yield from batches


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make them as our trainer does."""
    torch.manual_seed(0)
    model = Digits().model()
    return model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)


def timed(step: Callable[[], object]) -> Run:
    """Measure a loop that makes one step at a time."""

    def run(steps: int) -> float:
        started = time.process_time()
        for _ in range(steps):
            step()
        return time.process_time() - started

    return run


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Pair],
    backward: Callable[[Tensor], object] = torch.autograd.backward,
) -> Run:
    """Train in a hand-written loop."""

    def step() -> None:
        inputs, targets = next(batches)
        backward(functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def bare(batches: Iterator[Pair]) -> Run:
    """Train with nothing but torch."""
    return by_hand(*model_and_optimizer(), batches)


def slices(batch: Batch) -> Iterator[Pair]:
    """Pick batches out of tensors in memory, without a DataLoader."""
    while True:
        order = torch.randperm(len(batch))
        for start in range(0, len(batch) - BATCH + 1, BATCH):
            numbers = order[start : start + BATCH]
            yield batch.inputs[numbers], batch.targets[numbers]


def trainer(task: Digits, run_dir: Path) -> Trainer:
    """Make our trainer."""
    return trainer_of(task, Config(run_dir=run_dir, global_batch=BATCH, lr=LR))


def guards(trainer: Trainer) -> Run:
    """Do what a step of ours does to know which parameters it trains, and nothing else."""

    def step() -> None:
        trainer.strategy.begin_step(trainer.progress.step)
        trainer.untrained.changed()
        trainer.untrained.forget_zeros()

    return timed(step)


def fabric() -> Run:
    """Train by Lightning Fabric."""
    from lightning.fabric import Fabric

    helper = Fabric(accelerator="cpu", devices=1)
    model, optimizer = helper.setup(*model_and_optimizer())
    prepared: DataLoader[Pair] = helper.setup_dataloaders(loader())
    return by_hand(model, optimizer, forever(prepared), helper.backward)


def accelerate() -> Run:
    """Train by Accelerate."""
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    model, optimizer, prepared = helper.prepare(*model_and_optimizer(), loader())
    return by_hand(model, optimizer, forever(prepared), helper.backward)


def lightning() -> Run:
    """Train by the Lightning Trainer, without logger, progress bar and checkpoints."""
    from lightning import pytorch

    class Module(pytorch.LightningModule):  # type: ignore[misc]  # its types are not installed
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = model_and_optimizer()

        def training_step(self, batch: Pair, number: int) -> Tensor:
            return functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    class Clock(pytorch.Callback):  # type: ignore[misc]
        def __init__(self, steps: int) -> None:
            self.last, self.started, self.spent = WARM_UP + steps, 0.0, 0.0

        def on_train_batch_end(self, trainer: pytorch.Trainer, *_: object) -> None:
            if trainer.global_step == WARM_UP:
                self.started = time.process_time()
            elif trainer.global_step == self.last:
                self.spent = time.process_time() - self.started

    def run(steps: int) -> float:
        clock = Clock(steps)
        trainer = pytorch.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            max_steps=clock.last,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(Module(), loader())
        return clock.spent

    return run


def quiet() -> None:
    """Keep Lightning's hints about this machine out of the table."""
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", module="torch")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="counted rounds (default 60)")
    parser.add_argument("--steps", type=int, default=50, help="steps per round (default 50)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory() as folder:
        own = trainer(DigitsByNumber(), Path(folder) / "dataset")
        try:
            runs = {
                "bare loop, DataLoader": bare(forever(loader())),
                "bare loop, tensors": bare(slices(Digits().train())),
                "ours, Dataset": timed(own.train_step),
                "ours, Batch": timed(trainer(Digits(), Path(folder) / "batch").train_step),
                "Lightning Fabric": fabric(),
                "Accelerate": accelerate(),
                "Lightning Trainer": lightning(),
            }
        except ImportError as error:
            sys.exit(f"{error}: install the peers: pip install -c constraints.txt -e '.[bench]'")
        quiet()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for count in range(given.rounds + 1):
            # Each comes as often after its neighbour as before it.
            for name, run in sorted(runs.items(), reverse=bool(count % 2)):
                spent = run(given.steps) / given.steps * 1e6
                if count:  # the first round warms the caches
                    times[name].append(spent)
        guarded = guards(own)
        guards_us = statistics.median(guarded(given.steps) / given.steps * 1e6 for _ in range(20))
    report(times)
    percent = guards_us / statistics.median(times["ours, Dataset"]) * 100
    verdict = "met" if percent < GUARDS_PERCENT else "missed"
    print(
        f"guards in a step        {guards_us:>6.1f} µs, {percent:.2f} % of it "
        f"(target: less than {GUARDS_PERCENT:.0f} %, {verdict})"
    )


def report(times: dict[str, list[float]]) -> None:
    """Print each loop's CPU time per step, and its excess over the bare loop on the same data."""
    loops = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'CPU time per step':<24}{'median':>9} {'range':>17}  over the bare loop")
    for name, median in loops.items():
        base = "bare loop, tensors" if name == "ours, Batch" else "bare loop, DataLoader"
        # Round by round: what slows one round down slows all its loops down.
        added = statistics.median(a - b for a, b in zip(times[name], times[base], strict=True))
        low, high = min(times[name]), max(times[name])
        over = "" if name.startswith("bare") else f"{added:+9.0f} µs ({base[11:]})"
        print(f"{name:<24}{median:>6.0f} µs {low:>6.0f} to {high:>4.0f} µs {over}")
        if name.startswith("ours"):
            verdict = "met" if added <= TARGET_US else "missed"
            print(f"{'':<24}target: at most +{TARGET_US:.0f} µs, {verdict}")


if __name__ == "__main__":
    main()
