"""The figures of docs/learn/pipelines.md."""

from __future__ import annotations

import statistics
import time
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


FIGURES = (
    Figure(
        name="pipeline-schedules",
        page="pipelines",
        title="Four schedules of a pipeline with four ranks and eight micro-batches",
        measure=schedules,
        draw=draw_schedules,
    ),
    Figure(
        name="pipeline-waiting",
        page="pipelines",
        title="Idle share of a pipeline over the number of micro-batches, measured and by formula",
        measure=waiting,
        draw=draw_waiting,
        table=table_of_waiting,
    ),
)
