"""The figures of docs/learn/data.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.data import DistributedSampler

from benchmarks.figures.figure import Data, Figure
from train.data.order import SampleOrder

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


SAMPLES, RANKS = 10, 4


def who_sees_what() -> Data:
    """Ask the real samplers which ranks see which sample in an epoch."""
    numbers = list(range(SAMPLES))
    order = SampleOrder(size=SAMPLES, seed=0)
    forms = {
        "shuffle=True on each rank": [numbers for _ in range(RANKS)],
        "DistributedSampler": [_sampled(rank, drop_last=False) for rank in range(RANKS)],
        "… with drop_last=True": [_sampled(rank, drop_last=True) for rank in range(RANKS)],
        "slices of one order": [
            order.share(0, SAMPLES, shard=rank, shards=RANKS).tolist() for rank in range(RANKS)
        ],
    }
    return {
        "samples": SAMPLES,
        "ranks": RANKS,
        "ranks_by_sample": {
            form: [
                [r for r, mine in enumerate(shares) for n in mine if n == number]
                for number in numbers
            ]
            for form, shares in forms.items()
        },
    }


def _sampled(rank: int, *, drop_last: bool) -> list[int]:
    sampler: DistributedSampler[int] = DistributedSampler(
        range(SAMPLES),  # type: ignore[arg-type]  # only needs the length
        num_replicas=RANKS,
        rank=rank,
        drop_last=drop_last,
    )
    return list(sampler)


def draw_who_sees_what(data: Data) -> Drawing:
    """Draw a row of samples for each form: each cell has the colours of its ranks."""
    from benchmarks.figures.drawing import COLOURS, FAINT, GROUND, TEXT, axes

    forms = data["ranks_by_sample"]
    with axes(height=3.0) as ax:
        for row, cells in enumerate(forms.values()):
            for sample, ranks in enumerate(cells):
                ax.barh(row, 0.9, left=sample + 0.05, height=0.62, color=GROUND, edgecolor=FAINT)
                for place, rank in enumerate(ranks):
                    width = 0.9 / len(ranks)
                    ax.barh(
                        row,
                        width,
                        left=sample + 0.05 + place * width,
                        height=0.62,
                        color=COLOURS[rank],
                        edgecolor=GROUND,
                        linewidth=0.8,
                    )
                    if len(ranks) < 3:
                        middle = sample + 0.05 + (place + 0.5) * width
                        ax.text(middle, row, str(rank), color=GROUND, ha="center", va="center")
                if not ranks:
                    ax.text(sample + 0.5, row, "none", color=TEXT, ha="center", va="center")
        ax.set_yticks(range(len(forms)), list(forms))
        ax.set_xticks(
            [s + 0.5 for s in range(data["samples"])], [str(s) for s in range(data["samples"])]
        )
        ax.set_xlim(0, data["samples"])
        ax.set_ylim(len(forms) - 0.5, -0.5)
        ax.grid(visible=False)
        ax.tick_params(length=0)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        ax.set_xlabel(f"number of the sample; colours and digits: its rank, of {data['ranks']}")
        return ax.figure  # type: ignore[return-value]


def table_who_sees_what(data: Data) -> str:
    """Count how often samples are seen."""
    rows = [
        f"| {data['samples']} samples, {data['ranks']} ranks "
        "| draws | seen once | more often | never |",
        "|---|---|---|---|---|",
    ]
    for form, cells in data["ranks_by_sample"].items():
        seen = [len(ranks) for ranks in cells]
        label = form.replace("…", "DistributedSampler")
        rows.append(
            f"| {label} | {sum(seen)} | {seen.count(1)} | {sum(n > 1 for n in seen)} "
            f"| {seen.count(0)} |"
        )
    return "\n".join(rows)


FIGURES = (
    Figure(
        name="who_sees_what",
        page="data",
        title="Which rank sees which of ten samples in an epoch, under four samplers",
        measure=who_sees_what,
        draw=draw_who_sees_what,
        table=table_who_sees_what,
    ),
)
