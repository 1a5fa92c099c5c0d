"""The figures of docs/learn/data.md."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

from benchmarks.figures.figure import Data, Figure, machine
from train.data.order import SampleOrder

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# Who sees what

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


# Workers

WORKERS = (0, 1, 2, 4, 8)
READ, ROUNDS = 128, 5
WAIT_S = 0.004


class Slow(Dataset[Tensor]):
    """Samples whose transform takes some 4 ms: it waits, or it computes."""

    def __init__(self, *, computes: bool) -> None:
        self._computes = computes

    def __len__(self) -> int:
        return READ

    def __getitem__(self, number: int) -> Tensor:
        if not self._computes:
            time.sleep(WAIT_S)
            return torch.zeros(64)
        generator = torch.Generator().manual_seed(number)
        return torch.randn(64_000, generator=generator).sort().values[:64]


def workers() -> Data:
    """Measure how many samples per second a loader gives, by its number of workers."""
    # More workers than cores are the point here.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    loaders: dict[tuple[bool, int], DataLoader[Any]] = {
        (computes, count): DataLoader(
            Slow(computes=computes),
            batch_size=8,
            num_workers=count,
            persistent_workers=count > 0,
            multiprocessing_context="fork" if count else None,
        )
        for computes in (False, True)
        for count in WORKERS
    }
    rates: dict[tuple[bool, int], list[float]] = {}
    torch.set_num_threads(1)  # as in the workers
    for number in range(ROUNDS + 1):
        for key, loader in loaders.items():
            started = time.perf_counter()
            for _ in loader:
                pass
            if number:  # the first round starts the workers
                rates.setdefault(key, []).append(READ / (time.perf_counter() - started))
    return {
        "workers": list(WORKERS),
        **{
            f"{name}_samples_per_s": [
                round(statistics.median(rates[computes, count])) for count in WORKERS
            ]
            for name, computes in (("waits", False), ("computes", True))
        },
        "machine": machine(),
    }


def draw_workers(data: Data) -> Drawing:
    """Draw samples per second against workers."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes(height=3.2) as ax:
        for name, label, colour in (
            ("waits", "transform\nthat waits", COLOURS[0]),
            ("computes", "transform\nthat computes", COLOURS[1]),
        ):
            rates = data[f"{name}_samples_per_s"]
            ax.plot(data["workers"], rates, "o-", color=colour)
            place = "bottom" if name == "computes" else "center"
            ax.text(data["workers"][-1] + 0.2, rates[-1], label, color=colour, va=place)
        ax.set_xticks(data["workers"])
        ax.set_xlim(-0.3, data["workers"][-1] + 2.4)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("num_workers")
        ax.set_ylabel("samples per second")
        return ax.figure  # type: ignore[return-value]


def table_workers(data: Data) -> str:
    """Write samples per second by workers."""
    head = " | ".join(map(str, data["workers"]))
    rows = [
        f"| samples per second with `num_workers` | {head} |",
        "|---" * (len(data["workers"]) + 1) + "|",
    ]
    for name, label in (
        ("waits", f"transform that waits {1000 * WAIT_S:.0f} ms"),
        ("computes", "transform that computes"),
    ):
        rows.append(f"| {label} | {' | '.join(map(str, data[f'{name}_samples_per_s']))} |")
    return "\n".join(rows)


# Rare classes

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
        name="who_sees_what",
        page="data",
        title="Which rank sees which of ten samples in an epoch, under four samplers",
        measure=who_sees_what,
        draw=draw_who_sees_what,
        table=table_who_sees_what,
    ),
    Figure(
        name="workers",
        page="data",
        title="Samples per second of a DataLoader by its number of workers",
        measure=workers,
        draw=draw_workers,
        table=table_workers,
    ),
    Figure(
        name="rare_classes",
        page="data",
        title="How often samples of frequent and of rare classes are drawn",
        measure=rare_classes,
        draw=draw_rare_classes,
        table=table_rare_classes,
    ),
)
