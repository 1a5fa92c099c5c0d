"""The figures of docs/learn/gradients.md."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional

from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


RANKS = 2
MIB = 2**20


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: inputs [1797, 64] from 0 to 1, in float64, and classes."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return torch.from_numpy(loaded.data) / 16, torch.from_numpy(loaded.target)


def on_ranks(work: Callable[[], Data | None]) -> Data:
    """Call a function of a module on each of `RANKS` ranks; return what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]  # torch's
            _on_rank, args=(Path(folder), work), nprocs=RANKS, start_method="spawn"
        )
        found: Data = json.loads((Path(folder) / "found.json").read_text())
    return found


def _on_rank(rank: int, folder: Path, work: Callable[[], Data | None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    torch.manual_seed(rank)
    found = work()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


BATCH, BATCHES = 64, 40
SHARES = (32, 36, 40, 44, 48, 52, 56, 60, 62, 63)


def mean_of_means() -> Data:
    """Measure how far gradients are off, relative to their norm, by the share of rank 0."""
    inputs, classes = digits()
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()

    def gradient(numbers: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(inputs[numbers]), classes[numbers])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    errors: dict[str, list[list[float]]] = {"shuffled": [], "sorted": [], "right": []}
    for _ in range(BATCHES):
        shuffled = torch.randperm(len(inputs), generator=generator)[:BATCH]
        ordered = shuffled[classes[shuffled].argsort(stable=True)]
        for form, batch in (("shuffled", shuffled), ("sorted", ordered)):
            whole = gradient(batch)
            pairs = [(gradient(batch[:n]), gradient(batch[n:])) for n in SHARES]
            means = [(one + other) / 2 for one, other in pairs]
            errors[form].append([float((m - whole).norm() / whole.norm()) for m in means])
            if form == "sorted":
                # What DDP makes of sum / global count * ranks.
                sums = [
                    (one * n + other * (BATCH - n)) / BATCH
                    for n, (one, other) in zip(SHARES, pairs, strict=True)
                ]
                errors["right"].append([float((s - whole).norm() / whole.norm()) for s in sums])
    return {
        "batch": BATCH,
        "share_of_rank_0": list(SHARES),
        **{
            form: [round(statistics.median(found), 6) for found in zip(*rows, strict=True)]
            for form, rows in errors.items()
        },
    }


FORMS = {
    "sorted": "mean of means, samples sorted by class",
    "shuffled": "mean of means, samples shuffled",
    "right": "sum / global count x ranks",
}


def draw_mean_of_means(data: Data) -> Drawing:
    """Draw the error against the share of rank 0."""
    from benchmarks.figures.drawing import COLOURS, axes

    places = {
        "sorted": (47.3, 1.2, "right"),
        "shuffled": (51.5, 0.2, "left"),
        "right": (36, -0.2, "left"),
    }
    with axes() as ax:
        for (form, label), colour in zip(FORMS.items(), COLOURS, strict=False):
            ax.plot(data["share_of_rank_0"], data[form], "o-", color=colour)
            x, y, side = places[form]
            ax.text(x, y, label, color=colour, ha=side)
        ax.set_xlabel(f"samples of rank 0, of {data['batch']} on two ranks")
        ax.set_ylabel("error of the gradient,\nrelative to its norm")
        ax.set_xlim(left=30)
        ax.set_ylim(bottom=-0.3)
        return ax.figure  # type: ignore[return-value]


def table_mean_of_means(data: Data) -> str:
    """Write the errors in per cent."""
    chosen = [n for n in (32, 40, 48, 56, 62) if n in data["share_of_rank_0"]]
    columns = [data["share_of_rank_0"].index(n) for n in chosen]
    head = " | ".join(f"{n} + {data['batch'] - n}" for n in chosen)
    rows = [
        f"| error of the gradient, samples on the two ranks | {head} |",
        "|---" * (len(chosen) + 1) + "|",
    ]
    for form, label in FORMS.items():
        cells = " | ".join(f"{100 * data[form][c]:.0f} %" for c in columns)
        rows.append(f"| {label} | {cells} |")
    return "\n".join(rows)


FIGURES = (
    Figure(
        name="mean_of_means",
        page="gradients",
        title="The error of a gradient that is a mean of means, by how uneven the shares are",
        measure=mean_of_means,
        draw=draw_mean_of_means,
        table=table_mean_of_means,
    ),
)
