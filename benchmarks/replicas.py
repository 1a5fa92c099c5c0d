"""What comparing replicas costs: a ddp run, beside the same run without it.

Run as `make bench-train-loop`. Both runs live in the same processes, and a round of one follows a
round of the other: a small language model and the digits, whose steps take a few milliseconds, on
two ranks with a checkpoint in each round; and the digits on four ranks without checkpoints. At a
checkpoint the cost does not depend on the steps before it, so that the share is larger the shorter
they are. CPU time counts, that of all of a rank's threads: it varies less than wall time when
other programs run. The share is the time within the calls that compare, of the CPU time of the run.
Both are medians, of each kind of comparison and of the rounds: CPU time of a virtual machine
contains what other machines have taken from it. The mean is shown, too. The ratio of both runs, of
which the median and its 95 % interval are shown, also contains what the calls do to the rest.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.trainers import trainer_of
from train.cli.config import Config
from train.loop import Trainer
from train.parallel.watch import Watch
from train.runtime.rank import RankInfo
from train.tasks import Task
from train.tasks.chars import Chars
from train.tasks.digits import Digits

BATCH = 64
TARGET = 0.001

CASES: Mapping[str, tuple[type[Task], int, bool]] = {
    "language model, 2 ranks, a checkpoint every 100 steps": (Chars, 2, True),
    "digits, 2 ranks, a checkpoint every 100 steps": (Digits, 2, True),
    "digits, 4 ranks, no checkpoint": (Digits, 4, False),
}
"""The task, how many ranks train it, and whether they save it."""
FEWER: Mapping[type[Task], int] = {Chars: 4}
"""How many times fewer rounds are enough, as each takes so much longer."""


class NoWatch:
    """Compares nothing."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def numbers(self, *_: object) -> list[float]:
        """Return nothing to exchange."""
        return []

    def check(self, totals: Sequence[float]) -> None:
        """Look at nothing."""

    def other_names(self, model: object) -> list[str]:
        """Look for none."""
        return []


class Timed:
    """A watch whose comparisons are timed."""

    def __init__(self, watch: Watch, steps: int) -> None:
        self._watch, self.steps = watch, steps
        self.due, self.other_names = watch.due, watch.other_names
        self._spent_s = 0.0
        self.kinds: dict[bool, list[float]] = {}
        """Seconds of each comparison: of everything, and without the optimizer's state."""

    def numbers(self, *arguments: Any) -> list[float]:
        """Begin a comparison."""
        started = time.thread_time()
        found = self._watch.numbers(*arguments)
        self._spent_s = time.thread_time() - started
        return found

    def check(self, totals: Sequence[float]) -> None:
        """End it."""
        started = time.thread_time()
        self._watch.check(totals)
        self._spent_s += time.thread_time() - started
        self.kinds.setdefault(self._watch._held[1], []).append(self._spent_s)


def run(trainer: Trainer, steps: int, *, save: bool) -> float:
    """Make some steps, and a checkpoint; return the CPU seconds."""
    dist.barrier()
    started = time.process_time()
    for _ in range(steps):
        trainer.train_step()
    if save:
        trainer.saver.save(trainer.progress, epoch=0)
        trainer.saver.wait()
    spent = time.process_time() - started
    dist.barrier()
    return spent


def measure(
    rank: int,
    task: type[Task],
    ranks: int,
    save: bool,
    folder: str,
    rounds: int,
    steps: int,
    title: str,
) -> None:
    """Be a rank; rank 0 prints."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    rank_info = RankInfo(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    trainers: dict[str, Trainer] = {}
    for name in ("with", "without"):
        config = Config(run_dir=Path(folder) / name, strategy="ddp", global_batch=BATCH)
        trainers[name] = trainer_of(task(), config, rank_info)
        trainers[name].resume()
    timed = Timed(trainers["with"].saver.watch, steps)
    trainers["with"].saver.watch = timed  # type: ignore[assignment]
    trainers["without"].saver.watch = NoWatch()  # type: ignore[assignment]
    spent: dict[str, list[float]] = {name: [] for name in trainers}
    for count in range(rounds + 1):
        if count == 1:
            # The first round warms up.
            timed.kinds.clear()
        for name in sorted(trainers, reverse=bool(count % 2)):
            seconds = run(trainers[name], steps, save=save)
            if count:
                spent[name].append(seconds)
    if rank == 0:
        report(spent, timed, title)
    dist.destroy_process_group()


def report(spent: Mapping[str, Sequence[float]], timed: Timed, title: str) -> None:
    """Print the share, the ratio and the verdict."""
    rounds, all_s = len(spent["with"]), sum(spent["with"])
    usual_s = sum(len(each) * statistics.median(each) for each in timed.kinds.values())
    share = usual_s / (rounds * statistics.median(spent["with"]))
    mean = sum(map(sum, timed.kinds.values())) / all_s
    ratios = sorted(a / b for a, b in zip(spent["with"], spent["without"], strict=True))
    # Where the median of as many rounds lies in 19 of 20 cases, by the binomial distribution.
    middle, spread = len(ratios) / 2, 0.98 * len(ratios) ** 0.5
    low, high = (
        ratios[min(max(int(at), 0), len(ratios) - 1)] for at in (middle - spread, middle + spread)
    )
    verdict = "met" if share <= TARGET else "missed"
    print(f"{title}: {share:.3%} of CPU time (target: at most {TARGET:.1%}, {verdict})")
    calls = sum(map(len, timed.kinds.values()))
    each_us = usual_s / max(calls, 1) * 1e6
    step_ms = statistics.median(spent["without"]) / timed.steps * 1e3
    print(f"  {calls} comparisons of {each_us:.0f} µs, steps of {step_ms:.2f} ms; mean {mean:.3%}")
    print(f"  with / without: {statistics.median(ratios):.4f}, {low:.4f} to {high:.4f}")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="counted rounds (default 40)")
    parser.add_argument("--steps", type=int, default=100, help="steps per round (default 100)")
    given = parser.parse_args()
    for title, (task, ranks, save) in CASES.items():
        rounds = -(-given.rounds // FEWER.get(task, 1))
        with tempfile.TemporaryDirectory() as folder:
            start_processes(  # type: ignore[no-untyped-call]
                measure,
                args=(task, ranks, save, folder, rounds, given.steps, title),
                nprocs=ranks,
            )


if __name__ == "__main__":
    main()
