"""The figures of docs/learn/several-devices.md."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from benchmarks.figures.collectives import on_ranks
from benchmarks.figures.figure import Data, Figure, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

ROUNDS = 3

MESH = {"pp": 2, "dp": 2, "tp": 4}
"""Outermost first; a node has as many GPUs as the last dimension."""

WIDTHS = {"small layers (16 units)": 16, "large layers (512 units)": 512}


def threads_or_processes() -> Data:
    """Compare two threads of one process with two processes, in a loop of forward and backward."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS):
        ways = {
            "one alone": on_ranks(1, _alone),
            "threads": on_ranks(1, _in_threads),
            "processes": on_ranks(2, _alone),
        }
        for way, by_rank in ways.items():
            for size in WIDTHS:
                times = found.setdefault(size, {}).setdefault(way, [])
                times.append(max(times_s[size] for times_s in by_rank))
    return {
        "machine": machine(),
        "median_s": {
            size: {way: statistics.median(times) for way, times in by_way.items()}
            for size, by_way in found.items()
        },
    }


def _work(width: int) -> Callable[[], None]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(32) for layer in (nn.Linear(width, width), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(64, width)
    repeats = 60 if width < 100 else 4

    def work() -> None:
        for _ in range(repeats):
            torch.autograd.backward(model(x).square().sum())

    return work


def _alone() -> dict[str, float]:
    import torch.distributed as dist

    times = {}
    for size, width in WIDTHS.items():
        work = _work(width)
        work()
        dist.barrier()
        started = time.perf_counter()
        work()
        times[size] = time.perf_counter() - started
    return times


def _in_threads() -> dict[str, float]:
    times = {}
    for size, width in WIDTHS.items():
        both = [_work(width) for _ in range(2)]
        both[0]()
        threads = [threading.Thread(target=work) for work in both]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times[size] = time.perf_counter() - started
    return times


def table_of_threads(data: Data) -> str:
    """Return the work done per second, as a multiple of one process's."""
    lines = [
        "| forward and backward passes per second, one worker = 1 | 2 threads | 2 processes |",
        "|---|---|---|",
    ]
    for size, times in data["median_s"].items():
        cells = [f"{2 * times['one alone'] / times[way]:.2f}" for way in ("threads", "processes")]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mesh() -> Data:
    """Ask torch for the ranks of a mesh, and for the groups of rank 0."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=store, rank=0, world_size=16)
    made = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    found = {
        "ranks": made.mesh.tolist(),
        "with_rank_0": {name: made[name].mesh.tolist() for name in MESH},
    }
    dist.destroy_process_group()
    return found


def draw_mesh(data: Data) -> Drawing:
    """Draw a node for each stage and replica; the groups of rank 0 are connected."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    with axes(7.4, 3.7) as ax:
        corner: dict[int, tuple[float, float]] = {}
        for stage, replicas in enumerate(data["ranks"]):
            for replica, ranks in enumerate(replicas):
                left, top = stage * 6.4, replica * 2.7
                box = FancyBboxPatch(
                    (left - 0.12, top - 0.12),
                    4.24,
                    1.24,
                    boxstyle="round,pad=0.1",
                    fill=False,
                    edgecolor=FAINT,
                )
                ax.add_patch(box)
                label = f"stage {stage} of replica {replica}"
                ax.text(left + 4, top - 0.35, label, ha="right", fontsize=9, color=TEXT)
                for number, rank in enumerate(ranks):
                    corner[rank] = (left + number, top)
                    ax.add_patch(
                        Rectangle(
                            (left + number + 0.06, top + 0.06),
                            0.88,
                            0.88,
                            facecolor=FAINT if rank else COLOURS[0],
                            linewidth=0,
                        )
                    )
                    ax.text(
                        left + number + 0.5,
                        top + 0.5,
                        str(rank),
                        ha="center",
                        va="center",
                        color=TEXT if rank else "#ffffff",
                    )
        labels = {
            "tp": (1.0, 1.5, "tp: activations in each layer", "left"),
            "dp": (0.65, 1.95, "dp: gradients", "left"),
            "pp": (3.7, -1.5, "pp: activations of one layer", "center"),
        }
        for colour, (name, ranks) in zip(COLOURS[1:], data["with_rank_0"].items(), strict=False):
            x, y, text, place = labels[name]
            ax.text(x, y, text, ha=place, va="center", fontsize=9, color=colour)
            line = [corner[rank] for rank in ranks]
            if name == "tp":
                ax.plot([line[0][0] + 0.1, line[-1][0] + 0.9], [1.22, 1.22], color=colour)
            elif name == "dp":
                ax.plot([0.5, 0.5], [1.0, line[-1][1] + 0.06], color=colour)
            else:
                ends = [(x + 0.5, y + 0.06) for x, y in line]
                arrow = {"arrowstyle": "-", "color": colour, "linewidth": 2}
                curve = {"connectionstyle": "arc3,rad=-0.28"}
                ax.annotate("", ends[1], ends[0], arrowprops=arrow | curve)
        ax.set_xlim(-0.4, 10.7)
        ax.set_ylim(4.0, -1.8)
        ax.axis("off")
        return cast("Drawing", ax.figure)


FIGURES = (
    Figure(
        name="mesh",
        page="several-devices",
        title="16 ranks as a mesh of 2 pipeline stages, 2 replicas and 4 tensor parallel ranks",
        measure=mesh,
        draw=draw_mesh,
    ),
    Figure(
        name="threads-or-processes",
        page="several-devices",
        title="Two threads of one process beside two processes",
        measure=threads_or_processes,
        table=table_of_threads,
    ),
)
