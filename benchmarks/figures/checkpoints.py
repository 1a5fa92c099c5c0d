"""What checkpoints cost: while they are written, and for want of them."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures.figure import Data, Figure, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

COST_S = 30.0
BETWEEN_S = {"3 hours": 10_800.0, "day": 86_400.0, "week": 604_800.0}
"""Mean times between failures."""
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Intervals, as multiples of the best one."""
FAILURES = 20_000
STATE_MB, ROUNDS = 128, 5


def lost_share(interval_s: float, between_s: float) -> float:
    """Return the share of time that checkpoints and failures cost (Young 1974, first order)."""
    return COST_S / interval_s + interval_s / 2 / between_s


def simulated_share(interval_s: float, between_s: float, rng: random.Random) -> float:
    """Return the same of simulated failures, at exponentially distributed times."""
    gaps = [rng.expovariate(1 / between_s) for _ in range(FAILURES)]
    useful = sum(gap // (interval_s + COST_S) * interval_s for gap in gaps)
    return 1 - useful / sum(gaps)


def measure_interval() -> Data:
    """Return the share of lost time by interval, in seconds, by formula and by simulation."""
    rng, curves = random.Random(0), []
    for name, between_s in BETWEEN_S.items():
        best_s = sqrt(2 * COST_S * between_s)
        for factor in FACTORS:
            interval_s = best_s * factor
            curves.append(
                {
                    "failure_each": name,
                    "factor": factor,
                    "interval_s": interval_s,
                    "share": round(lost_share(interval_s, between_s), 6),
                    "simulated_share": round(simulated_share(interval_s, between_s, rng), 6),
                }
            )
    return {"cost_s": COST_S, "curves": curves}


def table_interval(data: Data) -> str:
    """Return the simulated shares around the best interval."""
    shown = [factor for factor in FACTORS if 1 / 4 <= factor <= 4]
    heads = ["best interval" if f == 1 else f"{f:g} of it" for f in shown]
    lines = [f"| a failure each | {' | '.join(heads)} |", "|---|" + "---|" * len(shown)]
    for name in BETWEEN_S:
        found = {c["factor"]: c for c in data["curves"] if c["failure_each"] == name}
        cells = [f"{100 * found[factor]['simulated_share']:.1f} %" for factor in shown]
        lines.append(f"| {name}: {found[1]['interval_s'] / 60:.0f} min | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_interval(data: Data) -> Drawing:
    """Draw the share of lost time over the interval."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes() as ax:
        for colour, name in zip(COLOURS, BETWEEN_S, strict=False):
            curve = [c for c in data["curves"] if c["failure_each"] == name]
            ends = curve[0]["interval_s"], curve[-1]["interval_s"]
            xs = [ends[0] * (ends[1] / ends[0]) ** (n / 60) for n in range(61)]
            ys = [100 * lost_share(x, BETWEEN_S[name]) for x in xs]
            ax.plot([x / 60 for x in xs], ys, color=colour)
            dots = [100 * c["simulated_share"] for c in curve]
            ax.plot([c["interval_s"] / 60 for c in curve], dots, "o", color=colour)
            ax.text(1.1 * xs[-1] / 60, ys[-1], f"a failure each {name}", va="center")
        ax.set(xscale="log", yscale="log", xlim=(1, 6000), ylim=(0.5, 50))
        ax.set(xlabel=f"minutes between checkpoints of {data['cost_s']:g} s", ylabel="lost time, %")
        ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        ax.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
        ax.minorticks_off()
        return ax.figure  # type: ignore[return-value]


def measure_stall() -> Data:
    """Return for how many seconds a loop stands still, and until the bytes are written."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as save_parts

    state = {f"weight{n}": torch.rand(STATE_MB * 2**20 // 4 // 8) for n in range(8)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
        )
        group = dist.new_group(backend="gloo")

        def whole(place: Path) -> None:
            with place.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        def parts(place: Path) -> None:
            save_parts(state, checkpoint_id=place)

        def later(place: Path) -> Callable[[], object]:
            saving = async_save(state, checkpoint_id=place, process_group=group)
            return saving.result  # type: ignore[union-attr]

        def copy(place: Path) -> None:
            for tensor in state.values():
                tensor.clone()

        ways: dict[str, Callable[[Path], Callable[[], object] | None]] = {
            "torch.save, fsync": whole,
            "dcp.save": parts,
            "dcp.async_save": later,
            "a copy in memory": copy,
        }
        stalls: dict[str, list[float]] = {way: [] for way in ways}
        totals: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS + 1):
            for number, (way, begin) in enumerate(ways.items()):
                place = folder / str(number)
                began = time.perf_counter()
                wait = begin(place)
                stalls[way].append(time.perf_counter() - began)
                if wait is not None:
                    wait()
                totals[way].append(time.perf_counter() - began)
                if place.is_dir():
                    shutil.rmtree(place)
        dist.destroy_process_group()
    return {
        "machine": machine(),
        "state_MiB": STATE_MB,
        "rounds": ROUNDS,
        "ways": {
            way: {
                "stall_s": round(statistics.median(stalls[way][1:]), 4),
                "total_s": round(statistics.median(totals[way][1:]), 4),
            }
            for way in ways
        },
    }


def table_stall(data: Data) -> str:
    """Return both times of each way to save."""
    lines = [
        f"| {data['state_MiB']} MiB | the loop stands still | complete after |",
        "|---|---|---|",
    ]
    for way, found in data["ways"].items():
        lines.append(f"| {way} | {found['stall_s']:.2f} s | {found['total_s']:.2f} s |")
    return "\n".join(lines)


def draw_stall(data: Data) -> Drawing:
    """Draw both times as bars."""
    from benchmarks.figures.drawing import COLOURS, FAINT, axes

    with axes(7.0, 2.6) as ax:
        ways = list(data["ways"])
        for place, way in enumerate(ways):
            found = data["ways"][way]
            ax.barh(place, found["total_s"], color=FAINT, height=0.6)
            ax.barh(place, found["stall_s"], color=COLOURS[1], height=0.6)
            label = f" {found['stall_s']:.2f} of {found['total_s']:.2f} s"
            ax.text(found["total_s"], place, label, va="center")
        ax.set_yticks(range(len(ways)), ways)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, 1.3 * max(found["total_s"] for found in data["ways"].values()))
        ax.set_xlabel("seconds: coloured while the loop stands still, grey while it goes on")
        return ax.figure  # type: ignore[return-value]


FIGURES = (
    Figure(
        name="checkpoint-interval",
        page="checkpoints",
        title="Time lost to checkpoints of 30 s and to failures, by interval",
        measure=measure_interval,
        draw=draw_interval,
        table=table_interval,
    ),
    Figure(
        name="checkpoint-stall",
        page="checkpoints",
        title="How long a training loop stands still for a checkpoint",
        measure=measure_stall,
        draw=draw_stall,
        table=table_stall,
    ),
)
