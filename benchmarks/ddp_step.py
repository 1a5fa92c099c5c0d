"""A step of our ddp strategy beside a hand-written DistributedDataParallel loop, on two processes.

Run as `make bench-train-loop`. Both live in the same two processes, and a round of one follows a
round of the other. The benchmark measures the wall time of rank 0, because a step consists of
waiting, too, and its CPU time, which is more reliable when other programs run. Ratios are taken
round by round; the output shows their median and its 95 % interval. In our step, the ranks agree on
the loss before the weights move, by an exchange of four numbers; the cost of this exchange has its
own line.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainers import trainer_of
from train.cli.config import Config
from train.data.order import Batch
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.tasks import Classifier

RANKS = 2
BATCH = 128
FEATURES, HIDDEN, CLASSES, SAMPLES = 512, 2048, 10, 4096
LR = 0.001
TARGET = 1.02


class Wide(Classifier):
    """A perceptron of 5.3 million parameters on random numbers: a step of some 10 ms."""

    name = "wide"

    def model(self) -> nn.Module:
        """Make it, [batch, 512] to [batch, 10]."""
        return nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def train(self) -> Batch:
        """Give the same samples on every rank."""
        generator = torch.Generator().manual_seed(0)
        return Batch(
            inputs=torch.randn(SAMPLES, FEATURES, generator=generator),
            targets=torch.randint(CLASSES, (SAMPLES,), generator=generator),
        )

    def test(self) -> Batch:
        """Give a few."""
        return self.train().part(0, 8)


def by_hand(rank: int) -> Callable[[], None]:
    """Write the loop as the documentation of DistributedDataParallel does, at its best."""
    task = Wide()
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    batch, count = task.train(), 0

    def step() -> None:
        nonlocal count
        start = (count * BATCH + rank * BATCH // RANKS) % SAMPLES
        part = batch.take(torch.arange(start, start + BATCH // RANKS))
        functional.cross_entropy(model(part.inputs), part.targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        count += 1

    return step


def measure(rank: int, folder: str, rounds: int, steps: int) -> None:
    """Be a rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    rank_info = RankInfo(rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS)
    config = Config(run_dir=Path(folder) / "run", strategy="ddp", global_batch=BATCH, lr=LR)
    loops = {"by hand": by_hand(rank), "ours": trainer_of(Wide(), config, rank_info).train_step}
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    times: dict[tuple[str, str], list[float]] = {(c, n): [] for c in clocks for n in loops}
    for count in range(rounds + 1):
        # The one that comes second finds the caches as the first has left them: take turns.
        for name in sorted(loops, reverse=bool(count % 2)):
            dist.barrier()
            started = {clock: now() for clock, now in clocks.items()}
            for _ in range(steps):
                loops[name]()
            dist.barrier()
            for clock, now in clocks.items():
                if count:  # the first round warms up: DDP rebuilds its buckets in it
                    times[clock, name].append((now() - started[clock]) / steps * 1e3)
    agreement = agreement_ms(RankGroup(rank_info=rank_info, device=torch.device("cpu")))
    if rank == 0:
        report(times)
        step = statistics.median(times["wall", "by hand"])
        print(
            f"of which agreeing on the loss: {agreement:.2f} ms, {agreement / step:.3f} of a step"
        )
    dist.destroy_process_group()


def agreement_ms(group: RankGroup, count: int = 200) -> float:
    """Measure the one exchange that our step has and the other has not: of four numbers."""
    loss = torch.zeros(())
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        group.sum_with(loss, (0, 0, 0))
    return (time.perf_counter() - started) / count * 1e3


def report(times: dict[tuple[str, str], list[float]]) -> None:
    """Print both loops by both clocks, and the verdict."""
    for (clock, name), values in times.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{clock:<5}{name:<8}{median:>8.2f} ms a step ({low:.2f} to {high:.2f})")
    for clock in ("wall", "CPU"):
        pairs = zip(times[clock, "ours"], times[clock, "by hand"], strict=True)
        ratios = sorted(ours / hand for ours, hand in pairs)
        ratio = statistics.median(ratios)
        # Where the median of as many rounds lies in 19 of 20 cases, by the binomial distribution.
        middle, spread = len(ratios) / 2, 0.98 * len(ratios) ** 0.5
        low = ratios[max(int(middle - spread), 0)]
        high = ratios[min(int(middle + spread), len(ratios) - 1)]
        verdict = "met" if ratio <= TARGET else "missed"
        target = f" (target: at most {TARGET}, {verdict})" if clock == "wall" else ""
        print(f"{clock:<5}ours / by hand: {ratio:.3f}, {low:.3f} to {high:.3f}{target}")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="counted rounds (default 200)")
    parser.add_argument("--steps", type=int, default=5, help="steps per round (default 5)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]
            measure, args=(folder, given.rounds, given.steps), nprocs=RANKS
        )


if __name__ == "__main__":
    main()
