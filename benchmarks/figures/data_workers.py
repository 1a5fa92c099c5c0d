"""The figure of docs/learn/data-workers.md."""

from __future__ import annotations

import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.figures.figure import Data, Figure, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


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


FIGURES = (
    Figure(
        name="workers",
        page="data-workers",
        title="Samples per second of a DataLoader by its number of workers",
        measure=workers,
        draw=draw_workers,
        table=table_workers,
    ),
)
