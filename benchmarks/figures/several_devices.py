"""The figures of docs/learn/several-devices.md."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from benchmarks.figures.collectives import on_ranks
from benchmarks.figures.figure import Data, Figure, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

STAGES = 4
SHOWN = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
SHOWN_MICRO_BATCHES = 8

MEASURED = ("GPipe", "1F1B", "Interleaved1F1B")
MICRO_BATCHES = (4, 8, 16, 32)
FORWARD_S = 0.01
"""A forward pass of a micro-batch through a rank's stages; a backward pass takes twice as long."""
STEPS = 4

GPUS = (1, 8, 64)
ROUNDS = 3

# Schedules, drawn from torch's own.


def schedules() -> Data:
    """Play torch's schedules through, with equal stages and messages that take no time."""
    from train.dryrun.simulate import _TIME, _actions, bubble
    from train.parallel.pipeline.split import stage_count

    found = {}
    for name in SHOWN:
        stages = stage_count(name, STAGES)
        share = STAGES / stages
        passes = _played(_actions(name, STAGES, SHOWN_MICRO_BATCHES), stages, _TIME, share)
        found[name] = {
            "passes": passes,
            "idle": bubble(name, STAGES, SHOWN_MICRO_BATCHES),
            "kept": max(_most_kept(rank) for rank in passes) * share,
        }
    return {"stages": STAGES, "micro_batches": SHOWN_MICRO_BATCHES, "schedules": found}


def _played(
    queues: list[list[tuple[str, int, int]]],
    stages: int,
    time_of: dict[str, float],
    share: float,
) -> list[list[dict[str, Any]]]:
    """Return of each rank the passes with their times, in units of a rank's whole forward pass."""
    queues = [list(queue) for queue in queues]
    clocks = [0.0] * len(queues)
    ends: dict[tuple[str, int, int], float] = {}
    passes: list[list[dict[str, Any]]] = [[] for _ in queues]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, stage, number = queue[0]
                if kind == "FORWARD":
                    needs = ("F", stage - 1, number) if stage else None
                elif kind == "BACKWARD_WEIGHT":
                    needs = ("B", stage, number)
                else:
                    last = stage == stages - 1
                    needs = ("F", stage, number) if last else ("B", stage + 1, number)
                if needs is not None and needs not in ends:
                    break
                queue.pop(0)
                begin = max(clocks[rank], ends[needs] if needs else 0.0)
                clocks[rank] = begin + time_of[kind] * share
                if kind != "BACKWARD_WEIGHT":
                    ends["F" if kind == "FORWARD" else "B", stage, number] = clocks[rank]
                passes[rank].append(
                    {
                        "kind": kind,
                        "stage": stage,
                        "micro_batch": number,
                        "from": begin,
                        "to": clocks[rank],
                    }
                )
    return passes


def _most_kept(passes: list[dict[str, Any]]) -> int:
    """Return how many forward passes a rank has at most made without the backward pass."""
    kept = most = 0
    weights = any(one["kind"] == "BACKWARD_WEIGHT" for one in passes)
    freeing = "BACKWARD_WEIGHT" if weights else "FULL_BACKWARD"
    for one in passes:
        kept += (one["kind"] == "FORWARD") - (one["kind"] in (freeing, "FULL_BACKWARD"))
        most = max(most, kept)
    return most


def draw_schedules(data: Data) -> Drawing:
    """Draw a panel for each schedule: ranks below each other, time to the right."""
    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    colours = {
        "FORWARD": COLOURS[0],
        "FULL_BACKWARD": COLOURS[1],
        "BACKWARD_INPUT": COLOURS[1],
        "BACKWARD_WEIGHT": COLOURS[2],
    }
    found = data["schedules"]
    end = max(one["to"] for s in found.values() for rank in s["passes"] for one in rank)
    with axes(7, 6.6, nrows=len(found), ncols=1, sharex=True) as panels:
        for panel, (name, schedule) in zip(cast("Any", panels), found.items(), strict=True):
            for rank, passes in enumerate(schedule["passes"]):
                for one in passes:
                    width = one["to"] - one["from"]
                    second = one["stage"] >= data["stages"]
                    panel.barh(
                        rank,
                        width - 0.06,
                        left=one["from"] + 0.03,
                        height=0.86,
                        color=colours[one["kind"]],
                        alpha=0.6 if second else 1,
                    )
                    if width >= 0.9:
                        panel.text(
                            one["from"] + width / 2,
                            rank,
                            str(one["micro_batch"]),
                            ha="center",
                            va="center",
                            color="#ffffff",
                            fontsize=9,
                        )
            panel.set_title(
                f"{name}: idle {schedule['idle']:.0%}, "
                f"keeps activations of {schedule['kept']:g} micro-batches",
                fontsize=10,
                loc="left",
            )
            panel.set_xlim(0, end)
            panel.set_ylim(data["stages"] - 0.4, -0.6)
            panel.set_yticks(
                range(data["stages"]),
                [f"rank {rank}" for rank in range(data["stages"])],
                fontsize=9,
            )
            panel.tick_params(length=0, labelbottom=False)
            panel.grid(visible=False)
            for side in ("left", "bottom"):
                panel.spines[side].set_visible(False)
        panel.set_xlabel("time →", color=TEXT)
        return cast("Drawing", panel.figure)


# What a real pipeline waits.


def waiting() -> Data:
    """Measure the idle share of a pipeline of four ranks, whose stages compute for a fixed time.

    The computation is a pause, so that the number of this machine's cores does not matter; the
    schedule, the messages and their waiting are real.
    """
    by_rank = on_ranks(STAGES, _idle_shares)
    return {
        "machine": machine(),
        "stages": STAGES,
        "forward_s": FORWARD_S,
        "idle": {
            name: {
                number: statistics.mean(found[name][number] for found in by_rank)
                for number in by_rank[0][name]
            }
            for name in MEASURED
        },
    }


def _idle_shares() -> dict[str, dict[str, float]]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    busy_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal busy_s
        started = time.perf_counter()
        time.sleep(seconds)
        busy_s += time.perf_counter() - started

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> Any:
            ctx.seconds = seconds
            pause(seconds)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            pause(2 * ctx.seconds)
            return gradients[0], gradients[0].sum(), None

    class Layer(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.weight, self.seconds = nn.Parameter(torch.ones(())), seconds

        def forward(self, x: torch.Tensor) -> Any:
            return Pause.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]

    rank = dist.get_rank()
    found: dict[str, dict[str, float]] = {}
    for name in MEASURED:
        per_rank = 1 if name in ("GPipe", "1F1B") else 2
        stages = per_rank * STAGES
        found[name] = {}
        for number in MICRO_BATCHES:
            x = torch.ones(number, 64)
            made = [
                PipelineStage(
                    Layer(FORWARD_S / per_rank), rank + turn * STAGES, stages, torch.device("cpu")
                )
                for turn in range(per_rank)
            ]
            schedule: Any = get_schedule_class(name)(
                made[0] if per_rank == 1 else made, number, loss_fn=nn.functional.mse_loss
            )
            shares = []
            for _ in range(STEPS):
                dist.barrier()
                busy_s, started = 0.0, time.perf_counter()
                arguments = [x] if rank == 0 else []
                last = {"target": x, "losses": []} if rank == STAGES - 1 else {}
                schedule.step(*arguments, **last)
                dist.barrier()
                shares.append(1 - busy_s / (time.perf_counter() - started))
            found[name][str(number)] = statistics.median(shares[1:])
    return found


def draw_waiting(data: Data) -> Drawing:
    """Draw the measured shares beside the formula."""
    from matplotlib.ticker import MultipleLocator, PercentFormatter

    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    p = data["stages"]
    with axes() as ax:
        for row, (name, by_number) in enumerate(data["idle"].items()):
            numbers, colour = [int(number) for number in by_number], COLOURS[row]
            marker, sign = {"GPipe": ("s", "■"), "1F1B": ("o", "●")}.get(name, ("^", "▲"))
            ax.plot(numbers, list(by_number.values()), marker, color=colour, markersize=7)
            ax.text(
                1,
                0.98 - 0.09 * row,
                f"{sign} {name}",
                color=colour,
                transform=ax.transAxes,
                ha="right",
                va="top",
            )
        for stages, label in ((1, "(p-1)/(m+p-1)"), (2, "(p-1)/(2m+p-1)")):
            steps = [m / 4 for m in range(12, 133)]
            ax.plot(
                steps,
                [(p - 1) / (stages * m + p - 1) for m in steps],
                "--",
                color=TEXT,
                linewidth=1,
            )
            at = 5.4 if stages == 1 else 4.1
            height = (p - 1) / (stages * at + p - 1)
            ax.text(at, height + (0.03 if stages == 1 else -0.09), label, color=TEXT, fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_xlim(3.6, 58)
        most = max(share for by_number in data["idle"].values() for share in by_number.values())
        ax.set_ylim(0, max(0.55, most + 0.05))
        ax.set_xticks(list(MICRO_BATCHES), [str(m) for m in MICRO_BATCHES])
        ax.yaxis.set_major_locator(MultipleLocator(0.1))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        ax.set_xlabel("micro-batches of a step (m)")
        ax.set_title(f"Idle share of a pipeline of {p} ranks", loc="left", fontsize=11)
        return cast("Drawing", ax.figure)


def table_of_waiting(data: Data) -> str:
    """Return a row for each schedule: measured, and by formula."""
    p = data["stages"]
    numbers = list(next(iter(data["idle"].values())))
    lines = [
        "| idle share, measured (by formula) | " + " | ".join(f"m = {m}" for m in numbers) + " |",
        "|---|" + "---|" * len(numbers),
    ]
    for name, by_number in data["idle"].items():
        turns = 1 if name in ("GPipe", "1F1B") else 2
        cells = [
            f"{share:.0%} ({(p - 1) / (turns * int(m) + p - 1):.0%})"
            for m, share in by_number.items()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# Tensor parallel.


def cut_matrices() -> Data:
    """Return the shapes of a feed-forward layer on two ranks, as torch cuts it."""
    return {"ranks": on_ranks(2, _cut_shapes)}


def _cut_shapes() -> dict[str, list[int]]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(mlp, init_device_mesh("cpu", (2,)), plan)
    hidden: list[list[int]] = []
    mlp[1].register_forward_hook(lambda layer, inputs, output: hidden.append(list(output.shape)))
    x = torch.ones(3, 4)
    y = mlp(x)

    def transposed(name: str) -> list[int]:
        # torch keeps [outputs, inputs]; drawn as x @ a matrix of [inputs, outputs].
        weight = mlp.get_parameter(name)
        assert isinstance(weight, DTensor)
        return list(weight.to_local().shape)[::-1]

    return {
        "x": list(x.shape),
        "up": transposed("0.weight"),
        "hidden": hidden[0],
        "down": transposed("2.weight"),
        "y": list(y.shape),
    }


def draw_cut(data: Data) -> Drawing:
    """Draw the matrices of both ranks as rectangles, one rank below the other."""
    from matplotlib.patches import Rectangle

    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    unit, gap = 0.25, 0.55
    with axes(7, 3.3) as ax:
        for rank, shapes in enumerate(data["ranks"]):
            middle, left = 1.15 + 2.5 * rank, 0.9
            ax.text(0, middle, f"rank {rank}", va="center", color=COLOURS[rank])
            for name, label, sign in (
                ("x", "x", "@"),
                ("up", "half of the\ncolumns", "→"),
                ("hidden", "half of\nhidden", "@"),
                ("down", "half of\nthe rows", "→"),
                ("y", "partial\nsum", ""),
            ):
                rows, columns = (size * unit for size in shapes[name])
                colour = FAINT if name == "x" else COLOURS[rank]
                top = middle - rows / 2
                ax.add_patch(Rectangle((left, top), columns, rows, facecolor=colour, linewidth=0))
                for number in range(1, shapes[name][1]):
                    at = left + number * unit
                    ax.plot([at, at], [top, top + rows], color="#ffffff", linewidth=0.6)
                for number in range(1, shapes[name][0]):
                    at = top + number * unit
                    ax.plot([left, left + columns], [at, at], color="#ffffff", linewidth=0.6)
                ax.text(
                    left + columns / 2,
                    top + rows + 0.08,
                    label,
                    ha="center",
                    va="top",
                    fontsize=9,
                    color=TEXT,
                )
                left += columns + gap
                ax.text(left - gap / 2, middle, sign, ha="center", va="center", color=TEXT)
        ax.annotate(
            "",
            (left - 0.2, 3.5),
            (left - 0.2, 1.3),
            arrowprops={"arrowstyle": "<->", "color": TEXT},
        )
        ax.text(left, 2.4, "all_reduce", va="center", color=TEXT)
        ax.set_xlim(-0.05, left + 1.35)
        ax.set_ylim(4.9, 0.45)
        ax.axis("off")
        return cast("Drawing", ax.figure)


# What each rank holds.

BYTES = {"weights, bf16": 2, "gradients, bf16": 2, "weights, fp32": 4, "Adam's averages, fp32": 8}
"""Bytes per parameter in mixed precision. Source: ZeRO, arXiv 1910.02054, section 3.1."""

SHARDED = {
    "DDP": (),
    "ZeRO 1": ("weights, fp32", "Adam's averages, fp32"),
    "ZeRO 2": ("weights, fp32", "Adam's averages, fp32", "gradients, bf16"),
    "ZeRO 3": tuple(BYTES),
}
"""What each stage divides among the ranks."""


def held() -> Data:
    """Compute the bytes of each parameter that a rank holds from step to step."""
    return {
        "bytes": {
            stage: {
                str(gpus): {
                    kind: size / gpus if kind in sharded else size for kind, size in BYTES.items()
                }
                for gpus in GPUS
            }
            for stage, sharded in SHARDED.items()
        }
    }


def draw_held(data: Data) -> Drawing:
    """Draw bars for eight GPUs."""
    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    with axes(7, 2.9) as ax:
        for row, by_gpus in enumerate(data["bytes"].values()):
            left = 0.0
            for colour, (kind, size) in zip(
                (COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[4]), by_gpus["8"].items(), strict=True
            ):
                ax.barh(row, size, left=left, height=0.6, color=colour)
                if row == 0:
                    name, _, number = kind.partition(", ")
                    ax.text(
                        left + size / 2,
                        -0.42,
                        f"{name.replace(' ', chr(10))}\n{number}",
                        ha="center",
                        va="bottom",
                        fontsize=9,
                        color=colour,
                    )
                left += size
            ax.text(left + 0.15, row, f"{left:g} bytes", va="center", fontsize=9, color=TEXT)
        ax.set_yticks(range(len(data["bytes"])), list(data["bytes"]))
        ax.set_ylim(3.5, -1.7)
        ax.set_xlim(0, 18.5)
        ax.tick_params(length=0, labelbottom=False)
        ax.grid(visible=False)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        return cast("Drawing", ax.figure)


def table_of_held(data: Data) -> str:
    """Return a row for each stage, with the bytes for a model of 7 billion parameters."""
    lines = [
        "| | divided among the ranks | "
        + " | ".join(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS)
        + " | 7 billion parameters, 8 GPUs |",
        "|---|---|" + "---|" * (len(GPUS) + 1),
    ]
    for stage, by_gpus in data["bytes"].items():
        sums = {gpus: sum(kinds.values()) for gpus, kinds in by_gpus.items()}
        cells = " | ".join(f"{size:.2f}".rstrip("0").rstrip(".") for size in sums.values())
        divided = {0: "nothing", 2: "optimizer state", 3: "and gradients", 4: "and parameters"}
        lines.append(
            f"| {stage} | {divided[len(SHARDED[stage])]} | {cells} | {7 * sums['8']:.0f} GB |"
        )
    return "\n".join(lines)


# Threads or processes.


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


FIGURES = (
    Figure(
        name="pipeline-schedules",
        page="several-devices",
        title="Four schedules of a pipeline with four ranks and eight micro-batches",
        measure=schedules,
        draw=draw_schedules,
    ),
    Figure(
        name="pipeline-waiting",
        page="several-devices",
        title="Idle share of a pipeline over the number of micro-batches, measured and by formula",
        measure=waiting,
        draw=draw_waiting,
        table=table_of_waiting,
    ),
    Figure(
        name="tensor-parallel",
        page="several-devices",
        title="A feed-forward layer cut by columns and then by rows, on two ranks",
        measure=cut_matrices,
        draw=draw_cut,
    ),
    Figure(
        name="sharded-state",
        page="several-devices",
        title="Bytes of each parameter that one of eight ranks holds, by stage of ZeRO",
        measure=held,
        draw=draw_held,
        table=table_of_held,
    ),
    Figure(
        name="threads-or-processes",
        page="several-devices",
        title="Two threads of one process beside two processes",
        measure=threads_or_processes,
        table=table_of_threads,
    ),
)
