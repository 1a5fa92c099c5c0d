"""The figure of docs/learn/rare-classes.md."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch.utils.data import WeightedRandomSampler

from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


SIZES = (900, 90, 10)
EPOCHS = 100


def rare_classes() -> Data:
    """Count how often samples of each class are drawn in an epoch, and how many are not drawn."""
    classes = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    weights = 1.0 / torch.tensor(SIZES, dtype=torch.float64)[classes]
    generator = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler(weights.tolist(), len(classes), generator=generator)
    draws, never = torch.zeros(len(SIZES)), torch.zeros(len(SIZES))
    for _ in range(EPOCHS):
        times = Counter(sampler)
        counts = torch.tensor([times[number] for number in range(len(classes))])
        draws += torch.stack([counts[classes == c].float().mean() for c in range(len(SIZES))])
        never += torch.stack(
            [(counts[classes == c] == 0).float().mean() for c in range(len(SIZES))]
        )
    return {
        "class_sizes": list(SIZES),
        "epochs": EPOCHS,
        "draws_per_sample": [round(float(d), 2) for d in draws / EPOCHS],
        "never_drawn": [round(float(n), 3) for n in never / EPOCHS],
    }


def draw_rare_classes(data: Data) -> Drawing:
    """Draw the draws per sample and epoch as bars."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes(height=2.8) as ax:
        rows = range(len(data["class_sizes"]))
        ax.barh([r - 0.2 for r in rows], [1.0 for _ in rows], height=0.36, color=COLOURS[0])
        ax.barh([r + 0.2 for r in rows], data["draws_per_sample"], height=0.36, color=COLOURS[1])
        for row, draws in enumerate(data["draws_per_sample"]):
            ax.text(1.3, row - 0.2, "1, uniform", color=COLOURS[0], va="center")
            ax.text(
                draws + 0.3 if draws > 1.3 else 1.3,
                row + 0.2,
                f"{draws:.1f}, weighted",
                color=COLOURS[1],
                va="center",
            )
        ax.set_yticks(rows, [f"class of {size}" for size in data["class_sizes"]])
        ax.set_ylim(len(data["class_sizes"]) - 0.5, -0.5)
        ax.set_xlim(0, max(data["draws_per_sample"]) * 1.25)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("draws per sample and epoch")
        return ax.figure  # type: ignore[return-value]


def table_rare_classes(data: Data) -> str:
    """Write draws per sample, and the share that an epoch leaves out."""
    rows = [
        "| samples of the class | draws per sample, uniform | draws per sample, weighted "
        "| share of all draws, weighted | never drawn in an epoch, weighted |",
        "|---|---|---|---|---|",
    ]
    whole = sum(data["class_sizes"])
    for size, draws, never in zip(
        data["class_sizes"], data["draws_per_sample"], data["never_drawn"], strict=True
    ):
        rows.append(f"| {size} | 1 | {draws:.1f} | {size * draws / whole:.0%} | {never:.0%} |")
    return "\n".join(rows)


FIGURES = (
    Figure(
        name="rare_classes",
        page="rare-classes",
        title="How often samples of frequent and of rare classes are drawn",
        measure=rare_classes,
        draw=draw_rare_classes,
        table=table_rare_classes,
    ),
)
