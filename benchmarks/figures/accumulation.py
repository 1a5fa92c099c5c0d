"""The figures of docs/learn/accumulation.md."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures.figure import Data, Figure, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing
from benchmarks.figures.gradients import MIB, on_ranks

MICRO_BATCHES = (1, 2, 4, 8)
ROUNDS = 9


def no_sync() -> Data:
    """Measure the time of a step with and without `no_sync`, in ms, by micro-batches per step."""
    return {**on_ranks(_no_sync), "machine": machine()}


def _no_sync() -> Data:
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())))
    model = DistributedDataParallel(net)
    exchanges = 0

    def counting(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        nonlocal exchanges
        exchanges += 1
        return allreduce_hook(state, bucket)

    counting.__annotations__.clear()  # DDP compares these with types, and they are strings
    model.register_comm_hook(None, counting)
    inputs = torch.randn(8, 1024)

    def step(count: int, *, quiet: bool) -> tuple[float, int]:
        nonlocal exchanges
        exchanges = 0
        model.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        for number in range(count):
            with model.no_sync() if quiet and number < count - 1 else nullcontext():
                model(inputs).sum().backward()
        return 1000 * (time.perf_counter() - started), exchanges

    times: dict[tuple[int, bool], list[float]] = {}
    counts: dict[tuple[int, bool], int] = {}
    for number in range(ROUNDS + 2):
        for count in MICRO_BATCHES:
            for quiet in (False, True):
                taken, counts[count, quiet] = step(count, quiet=quiet)
                if number >= 2:  # buckets are made anew, memory is fetched
                    times.setdefault((count, quiet), []).append(taken)
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "micro_batches": list(MICRO_BATCHES),
        "plain_ms": [round(statistics.median(times[c, False]), 1) for c in MICRO_BATCHES],
        "no_sync_ms": [round(statistics.median(times[c, True]), 1) for c in MICRO_BATCHES],
        "plain_exchanges": [counts[c, False] for c in MICRO_BATCHES],
        "no_sync_exchanges": [counts[c, True] for c in MICRO_BATCHES],
    }


def draw_no_sync(data: Data) -> Drawing:
    """Draw the time of a step against its micro-batches."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes(height=3.2) as ax:
        for form, label, colour in (
            ("plain", "exchange in\neach micro-batch", COLOURS[1]),
            ("no_sync", "no_sync: one\nexchange per step", COLOURS[0]),
        ):
            times = data[f"{form}_ms"]
            ax.plot(data["micro_batches"], times, "o-", color=colour)
            ax.text(8.15, times[-1], label, color=colour, va="center")
        ax.set_xlim(0.7, 10.6)
        ax.set_ylim(bottom=0)
        ax.set_xticks(data["micro_batches"])
        ax.set_xlabel("micro-batches per step")
        ax.set_ylabel("ms per step")
        return ax.figure  # type: ignore[return-value]


def table_no_sync(data: Data) -> str:
    """Write times and numbers of exchanges."""
    rows = [
        "| micro-batches | exchanges, plain | exchanges, `no_sync` "
        "| ms, plain | ms, `no_sync` | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for i, count in enumerate(data["micro_batches"]):
        plain, quiet = data["plain_ms"][i], data["no_sync_ms"][i]
        rows.append(
            f"| {count} | {data['plain_exchanges'][i]} | {data['no_sync_exchanges'][i]} "
            f"| {plain:.0f} | {quiet:.0f} | {plain / quiet:.2f} |"
        )
    return "\n".join(rows)


LAYERS, WIDTH, STEPS = 8, 1024, 9


def ddp_timeline() -> Data:
    """Measure when a step computes and when it exchanges, in ms from its beginning."""
    return {**on_ranks(_ddp_timeline), "machine": machine()}


def _ddp_timeline() -> Data:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = DistributedDataParallel(net, bucket_cap_mb=8.1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    buckets: list[dict[str, float]] = []

    def noting(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        noted = {"start": time.perf_counter(), "mib": bucket.buffer().nbytes / MIB}
        buckets.append(noted)

        def end(future: torch.futures.Future[Tensor]) -> Tensor:
            noted["end"] = time.perf_counter()
            return future.value()

        return allreduce_hook(state, bucket).then(end)

    noting.__annotations__.clear()
    model.register_comm_hook(None, noting)
    inputs = torch.randn(256, WIDTH)
    steps = []
    for _ in range(STEPS):
        buckets.clear()
        optimizer.zero_grad()
        dist.barrier()
        times = [time.perf_counter()]
        loss = model(inputs).square().mean()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        parts = [[b["start"], b["end"], b["mib"]] for b in buckets]
        steps.append((times[-1] - times[0], times, parts))
    # Of the later steps, the one in the middle: buckets are made anew in the second.
    _, times, parts = sorted(steps[2:])[(STEPS - 2) // 2]
    start = times[0]
    return {
        "forward_ms": [0.0, round(1000 * (times[1] - start), 2)],
        "backward_ms": [round(1000 * (t - start), 2) for t in (times[1], parts[-1][0])],
        "wait_ms": [round(1000 * (t - start), 2) for t in (parts[-1][0], times[2])],
        "optimizer_ms": [round(1000 * (t - start), 2) for t in times[2:]],
        "buckets_ms": [[round(1000 * (t - start), 2) for t in part[:2]] for part in parts],
        "buckets_mib": [round(part[2], 1) for part in parts],
    }


def draw_ddp_timeline(data: Data) -> Drawing:
    """Draw a row of computation, and a row for each bucket."""
    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    rows = len(data["buckets_ms"])
    with axes(height=1.5 + 0.4 * rows) as ax:
        end = data["optimizer_ms"][1]
        for name, colour in (
            ("forward", COLOURS[0]),
            ("backward", COLOURS[2]),
            ("wait", FAINT),
            ("optimizer", COLOURS[3]),
        ):
            left, right = data[f"{name}_ms"]
            ax.barh(0, right - left, left=left, color=colour, height=0.6)
            if right - left > 0.035 * len(name) * end / 2:
                ax.text((left + right) / 2, -0.45, name, ha="center", va="bottom", color=TEXT)
        for number, (left, right) in enumerate(data["buckets_ms"]):
            ax.barh(number + 1, right - left, left=left, color=COLOURS[1], height=0.6)
        ax.axvline(data["wait_ms"][0], color=TEXT, linewidth=1, linestyle=":")
        labels = [f"bucket {n}, {s:.0f} MiB" for n, s in enumerate(data["buckets_mib"])]
        ax.set_yticks(range(rows + 1), ["computation", *labels])
        ax.set_ylim(rows + 0.6, -1.0)
        ax.set_xlim(0, end * 1.02)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("ms from the beginning of the step, rank 0 of 2")
        return ax.figure  # type: ignore[return-value]


def table_ddp_timeline(data: Data) -> str:
    """Write the phases, and how much of the exchange lies within the backward pass."""
    end = data["wait_ms"][0]
    inside = sum(max(min(right, end) - left, 0) for left, right in data["buckets_ms"])
    whole = sum(right - left for left, right in data["buckets_ms"])
    cells = [
        data[f"{n}_ms"][1] - data[f"{n}_ms"][0]
        for n in ("forward", "backward", "wait", "optimizer")
    ]
    shown = " | ".join(f"{cell:.0f}" for cell in cells)
    return (
        "| ms forward | ms backward, until the last bucket leaves | ms wait for exchanges "
        "| ms optimizer | share of the exchange during the backward pass |\n"
        f"|---|---|---|---|---|\n| {shown} | {100 * inside / whole:.0f} % |"
    )


FIGURES = (
    Figure(
        name="no_sync",
        page="accumulation",
        title="The time of a step with and without no_sync, by micro-batches",
        measure=no_sync,
        draw=draw_no_sync,
        table=table_no_sync,
    ),
    Figure(
        name="ddp_timeline",
        page="accumulation",
        title="When a step of DistributedDataParallel computes and when it exchanges",
        measure=ddp_timeline,
        draw=draw_ddp_timeline,
        table=table_ddp_timeline,
    ),
)
