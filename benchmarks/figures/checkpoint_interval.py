"""The figure of docs/learn/checkpoint-interval.md."""

from __future__ import annotations

import random
from math import sqrt
from typing import TYPE_CHECKING

from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


COST_S = 30.0
BETWEEN_S = {"3 hours": 10_800.0, "day": 86_400.0, "week": 604_800.0}
"""Mean times between failures."""
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Intervals, as multiples of the best one."""
FAILURES = 20_000


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


FIGURES = (
    Figure(
        name="checkpoint-interval",
        page="checkpoint-interval",
        title="Time lost to checkpoints of 30 s and to failures, by interval",
        measure=measure_interval,
        draw=draw_interval,
        table=table_interval,
    ),
)
