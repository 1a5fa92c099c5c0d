"""The figures of asynchrony: training without waiting for the slowest rank.

A rank is slow because its task sleeps for each sample that it trains on. So the ratios hold on any
machine on which computing takes little of that time.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.figures.figure import Data, Figure, machine
from benchmarks.trainers import trainer_of
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import Batch
from train.rundir.files import read_lines
from train.runtime.rank import RankInfo
from train.tasks.digits import Digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


RANKS = 4
PACE_S = 0.0008
SLOWER = 5
BATCH, BOUND = 64, 4
UPDATES = 180
LATE = 45
LR, SMALL_LR = 0.4, 0.1
MODES = ("sync", "bounded", "async")


class Paced(Digits):
    """Digits, on which each rank trains at a given pace; an epoch is longer than a run."""

    def __init__(self, seconds_per_sample: float) -> None:
        """Read the images ten times each."""
        super().__init__()
        self._pace_s = seconds_per_sample

    def train(self) -> Batch:
        """Return each sample ten times: ranks meet at the end of an epoch, and shall not here."""
        once = super().train()
        assert isinstance(once, Batch)
        return once.take(torch.arange(len(once)).repeat(10))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum the loss; take time if it is trained on."""
        if outputs.requires_grad:
            time.sleep(self._pace_s * len(targets))
        return super().loss(outputs, targets)


def _served(rank: int, mode: str, lr: float, slower: float) -> dict[str, Any]:
    rank_info = RankInfo(
        rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS, launched=True
    )
    pace_s = PACE_S * (slower if rank == RANKS - 1 else 1)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            strategy="ps",
            ps_mode=mode,  # type: ignore[arg-type]
            staleness=BOUND,
            global_batch=BATCH,
            optimizer="sgd",
            lr=lr,
            checkpoint_every=0,
            run_dir=Path(folder),
        )
        trainer = trainer_of(Paced(pace_s), config, rank_info)
        trainer.progress.steps = UPDATES
        trainer.run()
        lines = [line for line in read_lines(Path(folder) / "metrics.jsonl") if "lr" in line]
    if rank > 0:
        return {}
    times = [float(str(line["time"])) for line in lines]
    # The first updates include the connection; the last ones no longer have all trainers.
    begin, end = UPDATES // 10, UPDATES - UPDATES // 10
    ages = Counter(int(str(line.get("staleness", 0))) for line in lines)
    return {
        "updates_per_s": (end - begin) / (times[end] - times[begin]),
        "seconds": [round(each - times[0], 4) for each in times],
        "losses": [round(float(str(line["loss"])), 4) for line in lines],
        "ages": [ages[age] for age in range(max(ages) + 1)],
    }


def _all_modes(rank: int) -> list[dict[str, Any]]:
    return [
        {"mode": mode, "lr": lr, "slower": slower, **_served(rank, mode, lr, slower)}
        for slower, lr in ((1, SMALL_LR), (SLOWER, LR), (SLOWER, SMALL_LR))
        for mode in MODES
    ]


@cache
def measure_modes() -> Data:
    """Train under a parameter server in each mode; one of three trainers is slower."""
    return {"machine": machine(), "slower": SLOWER, "runs": on_ranks(RANKS, _all_modes)[0]}


def _runs(data: Data, **wanted: object) -> Iterator[dict[str, Any]]:
    for run in data["runs"]:
        if all(run[key] == value for key, value in wanted.items()):
            yield run


def _late_loss(run: dict[str, Any]) -> float:
    return statistics.fmean(run["losses"][-LATE:])


def _whole(found: object) -> Drawing:
    from matplotlib.figure import Figure as Whole

    assert isinstance(found, Whole)
    return found


def draw_staleness(data: Data) -> Drawing:
    """Draw how many updates had gradients of which age."""
    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    with axes(height=2.9) as ax:
        width = 0.27
        for number, mode in enumerate(MODES):
            run = next(_runs(data, mode=mode, lr=LR, slower=SLOWER))
            ages = range(len(run["ages"]))
            places = [age + (number - 1) * width for age in ages]
            shares = [100 * count / sum(run["ages"]) for count in run["ages"]]
            ax.bar(places, shares, width, color=COLOURS[number])
            name = {"bounded": f"bounded ({BOUND})"}.get(mode, mode)
            ax.text(0.97, 0.9 - 0.11 * number, name, color=COLOURS[number], ha="right",
                    transform=ax.transAxes)  # fmt: skip
        ax.set_xlabel(
            "staleness: updates between the weights of a gradient and its use", color=TEXT
        )
        ax.set_ylabel("share of updates, %")
        ax.set_xticks(range(0, max(len(r["ages"]) for r in data["runs"]), 1))
        ax.grid(axis="x", visible=False)
        return _whole(ax.figure)


def table_modes(data: Data) -> str:
    """Return the speed, the staleness and the loss of each mode."""
    lines = [
        f"| mode | updates per s, equal ranks | updates per s, one rank {data['slower']} times "
        f"slower | staleness: mean, largest | loss at lr {LR} | loss at lr {SMALL_LR} |",
        "|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        equal, large, small = _runs(data, mode=mode)
        count = sum(large["ages"])
        mean = sum(age * number for age, number in enumerate(large["ages"])) / count
        lines.append(
            f"| `{mode}`{f', {BOUND}' if mode == 'bounded' else ''} "
            f"| {equal['updates_per_s']:.0f} | {small['updates_per_s']:.0f} "
            f"| {mean:.1f}, {len(large['ages']) - 1} "
            f"| {_late_loss(large):.2f} | {_late_loss(small):.2f} |"
        )
    return "\n".join(lines)


def draw_modes(data: Data) -> Drawing:
    """Draw the loss against the time, at both learning rates."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes(height=3.2, ncols=2, sharey=True) as both:
        for ax, lr in zip(both, (SMALL_LR, LR), strict=True):  # type: ignore[call-overload]
            for number, mode in enumerate(MODES):
                run = next(_runs(data, mode=mode, lr=lr, slower=SLOWER))
                losses = [
                    statistics.fmean(run["losses"][max(0, at - 15) : at + 1])
                    for at in range(len(run["losses"]))
                ]
                ax.plot(run["seconds"], losses, color=COLOURS[number])
                ax.plot(run["seconds"][-1], losses[-1], "o", color=COLOURS[number])
                ax.annotate(
                    mode,
                    (run["seconds"][-1], losses[-1]),
                    xytext=(0, 8),
                    textcoords="offset points",
                    ha="right" if mode == "sync" else "left",
                    color=COLOURS[number],
                )
            ax.set_title(f"learning rate {lr}", fontsize=10)
            ax.set_xlabel("seconds")
            ax.set_ylim(bottom=0)
        both[0].set_ylabel("training loss, mean of 16 updates")  # type: ignore[index]
        return _whole(both[0].figure)  # type: ignore[index]


DELAYS = (0, 1, 2, 4, 8)
DELAYED_STEPS = 400


def largest_lr(delay: int) -> float:
    """Return the largest stable learning rate times curvature: 2 sin(pi / (4 delay + 2)).

    For w <- w - lr * curvature * w_old, where w_old is `delay` updates old: there the first pair of
    roots of z^(delay + 1) - z^delay + lr * curvature leaves the unit circle.
    """
    return 2 * math.sin(math.pi / (4 * delay + 2))


def distance_after(delay: int, lr: float, steps: int = DELAYED_STEPS) -> float:
    """Return |w| after descent on w²/2 from w = 1, by gradients that are `delay` updates old."""
    past = [1.0] * (delay + 1)
    for _ in range(steps):
        past = [*past[1:], past[-1] - lr * past[0]]
        if abs(past[-1]) > 1e30:
            return math.inf
    return max(map(abs, past))


def largest_lr_seen(delay: int) -> float:
    """Return the largest learning rate at which descent does not diverge, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if distance_after(delay, middle, 20_000) < 10 else (low, middle)
    return low


def measure_delay() -> Data:
    """Descend on a parabola with gradients of a fixed age."""
    rates = [round(0.01 * 1.03**n, 5) for n in range(182)]
    return {
        "rates": rates,
        "curves": [
            {
                "delay": delay,
                "distances": [min(distance_after(delay, lr, 60), 1e3) for lr in rates],
                "limit": largest_lr(delay),
                "limit_seen": largest_lr_seen(delay),
            }
            for delay in DELAYS
        ],
    }


def draw_delay(data: Data) -> Drawing:
    """Draw the distance from the minimum after 60 updates against the learning rate."""
    from benchmarks.figures.drawing import COLOURS, FAINT, axes

    with axes() as ax:
        ax.axhline(1, color=FAINT, linewidth=1.5)
        for number, curve in enumerate(data["curves"]):
            distances = [max(each, 1e-8) for each in curve["distances"]]
            ax.plot(data["rates"], distances, color=COLOURS[number])
            ax.text(
                curve["limit"],
                2.2,
                f" {curve['delay']}",
                color=COLOURS[number],
                ha="right",
                fontweight="bold",
            )
        ax.text(0.011, 2.2, "staleness:")
        ax.text(0.011, 0.2, "start")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_ylim(1e-6, 30)
        ax.set_xlim(0.01, 2.2)
        ax.set_xticks([0.01, 0.03, 0.1, 0.3, 1, 2], ["0.01", "0.03", "0.1", "0.3", "1", "2"])
        ax.minorticks_off()
        ax.set_xlabel("learning rate times curvature")
        ax.set_ylabel("distance after 60 updates")
        return _whole(ax.figure)


def table_delay(data: Data) -> str:
    """Return the limit of the learning rate by the formula and by trial."""
    curves = data["curves"]
    return "\n".join(
        (
            f"| staleness | {' | '.join(str(curve['delay']) for curve in curves)} |",
            f"|---{'|---' * len(curves)}|",
            f"| largest stable lr times curvature, by the formula | "
            f"{' | '.join(format(curve['limit'], '.3f') for curve in curves)} |",
            f"| by trial | {' | '.join(format(curve['limit_seen'], '.3f') for curve in curves)} |",
        )
    )


FIGURES = (
    Figure(
        name="delayed-gradients",
        page="asynchrony",
        title="Distance from the minimum of a parabola after 60 updates, by learning rate and "
        "staleness",
        measure=measure_delay,
        draw=draw_delay,
        table=table_delay,
    ),
    Figure(
        name="staleness",
        page="asynchrony",
        title="How many updates old gradients are, in the three modes of a parameter server with "
        "one slow trainer",
        measure=measure_modes,
        draw=draw_staleness,
        data="without-waiting",
    ),
    Figure(
        name="without-waiting",
        page="asynchrony",
        title="Training loss against time in the three modes of a parameter server with one slow "
        "trainer",
        measure=measure_modes,
        draw=draw_modes,
        table=table_modes,
    ),
)
