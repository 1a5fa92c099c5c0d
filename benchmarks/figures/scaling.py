"""The figures of scaling: when more ranks are slower, where a step's time goes, and what helps.

All contenders of a figure run in the same processes and take turns; medians over the rounds count.
Subgroups of eight ranks stand for runs of one, two and four: the other ranks wait, without
computing, at a barrier.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures.figure import Data, Figure, machine
from tests.train.support.ranks import on_ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


RANKS = (1, 2, 4, 8)
ROUNDS = 4
FEATURES, CLASSES = 256, 10
SIZES = {"small": (64, 16), "large": (1024, 1024)}
"""Of a perceptron: its width, and the samples of a global batch."""


def perceptron(width: int) -> nn.Sequential:
    """Make one with two hidden layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def gradient_bytes(width: int) -> int:
    """Return how many bytes the gradients of a perceptron have."""
    return sum(4 * parameter.numel() for parameter in perceptron(width).parameters())


def _step(model: nn.Module, samples: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(samples, FEATURES), torch.randint(CLASSES, (samples,))

    def step() -> None:
        torch.autograd.backward(functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(call: Callable[[], object], group: Any, calls: int) -> float:
    dist.barrier(group)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    dist.barrier(group)
    return (time.perf_counter() - started) / calls


def _curves(rank: int) -> list[dict[str, Any]]:
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    contenders: list[tuple[str, str, int, Callable[[], object]]] = []
    for size, (width, batch) in SIZES.items():
        for ranks in RANKS:
            if rank >= ranks:
                continue
            for kind, samples in (("strong", batch // ranks), ("weak", batch)):
                if kind == "weak" and ranks != 2:
                    continue
                model = DistributedDataParallel(
                    perceptron(width), process_group=groups[ranks], gradient_as_bucket_view=True
                )
                contenders.append((size, kind, ranks, _step(model, samples)))
            flat = torch.zeros(gradient_bytes(width) // 4)
            exchange = partial(dist.all_reduce, flat, group=groups[ranks])
            contenders.append((size, "exchange", ranks, exchange))
    times: dict[tuple[str, str, int], list[float]] = {}
    for count in range(ROUNDS + 1):
        for ranks in RANKS:
            for size, kind, wanted, call in contenders:
                if wanted == ranks:
                    calls = 20 if size == "small" else 1
                    seconds = _timed(call, groups[ranks], calls)
                    if count:
                        times.setdefault((size, kind, ranks), []).append(seconds)
            dist.barrier()
    return [
        {"size": size, "kind": kind, "ranks": ranks, "seconds": min(values)}
        for (size, kind, ranks), values in times.items()
    ]


def measure_curves() -> Data:
    """Time steps of DDP on 1 to 8 ranks, and their exchange alone."""
    sizes = {
        name: {"width": width, "batch": batch, "bytes": gradient_bytes(width)}
        for name, (width, batch) in SIZES.items()
    }
    return {"machine": machine(), "sizes": sizes, "times": on_ranks(max(RANKS), _curves)[0]}


def seconds(data: Data, size: str, kind: str, ranks: int) -> float:
    """Return the measured time of a step or an exchange."""
    return next(
        float(each["seconds"])
        for each in data["times"]
        if (each["size"], each["kind"], each["ranks"]) == (size, kind, ranks)
    )


def predicted(data: Data, size: str, ranks: int) -> float:
    """Return the seconds of a step: the compute of one rank shared by cores, plus the exchange."""
    cores = int(data["machine"]["cores"])
    alone = seconds(data, size, "strong", 1)
    exchange = seconds(data, size, "exchange", ranks) if ranks > 1 else 0.0
    return alone / min(ranks, cores) + exchange


def _whole(found: object) -> Drawing:
    from matplotlib.figure import Figure as Whole

    assert isinstance(found, Whole)
    return found


def draw_curves(data: Data) -> Drawing:
    """Draw the speed-up against the number of ranks."""
    from benchmarks.figures.drawing import COLOURS, FAINT, axes

    with axes(height=3.3) as ax:
        cores = int(data["machine"]["cores"])
        ax.plot(RANKS, [min(n, cores) for n in RANKS], color=FAINT)
        ax.text(8, cores + 0.03, f"{cores} cores", ha="right", va="bottom")
        for number, size in enumerate(SIZES):
            alone = seconds(data, size, "strong", 1)
            seen = [alone / seconds(data, size, "strong", n) for n in RANKS]
            wanted = [alone / predicted(data, size, n) for n in RANKS]
            ax.plot(RANKS, seen, "o-", color=COLOURS[number])
            ax.plot(RANKS, wanted, ":", color=COLOURS[number])
            ax.annotate(
                f"{size} model",
                (2, seen[1]),
                xytext=(8, -14 if size == "large" else 8),
                textcoords="offset points",
                color=COLOURS[number],
            )
        ax.axhline(1, color=FAINT)
        ax.set_xscale("log")
        ax.set_xticks(RANKS, [str(n) for n in RANKS])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.set_xlabel("ranks (dotted: predicted from one rank and the exchange alone)")
        ax.set_ylabel("speed-up, same global batch")
        return _whole(ax.figure)


def table_curves(data: Data) -> str:
    """Return step, samples per second, efficiency, and what was predicted."""
    lines = [
        "| model | ranks | ms a step | of which exchange, alone | predicted ms | samples per s | "
        "speed-up | efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, facts in data["sizes"].items():
        alone = seconds(data, size, "strong", 1)
        for ranks in RANKS:
            step = seconds(data, size, "strong", ranks)
            exchange = seconds(data, size, "exchange", ranks) * 1e3 if ranks > 1 else 0.0
            lines.append(
                f"| {size} | {ranks} | {step * 1e3:.3g} | {exchange:.2g} "
                f"| {predicted(data, size, ranks) * 1e3:.3g} | {facts['batch'] / step:.3g} "
                f"| {alone / step:.2f} | {100 * alone / step / ranks:.0f} % |"
            )
    return "\n".join(lines)


REMEDY_WIDTH, REMEDY_BATCH, MICRO = 1024, 16, 4


def _remedies(rank: int) -> list[dict[str, Any]]:
    """Make each contender a function for the same number of samples; count the bytes sent."""

    def ddp(**options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(perceptron(REMEDY_WIDTH), **options)

    def accumulating(model: DistributedDataParallel, *, sync: bool) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(REMEDY_BATCH, FEATURES)
        targets = torch.randint(CLASSES, (REMEDY_BATCH,))

        def steps() -> None:
            for number in range(MICRO):
                last = number == MICRO - 1
                with nullcontext() if sync or last else model.no_sync():
                    loss = functional.cross_entropy(model(inputs), targets) / MICRO
                    torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        return steps

    def times(count: int, call: Callable[[], None]) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(count):
                call()

        return repeated

    half = ddp(gradient_as_bucket_view=True)
    # One bucket: this hook starts exchanges from callbacks. On gloo those of two buckets may begin
    # in another order on another rank, which then receives what it does not expect.
    low_rank = ddp(gradient_as_bucket_view=True, bucket_cap_mb=100)
    half.register_comm_hook(None, default_hooks.fp16_compress_hook)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    plain = times(MICRO, _step(ddp(), REMEDY_BATCH))
    contenders = {
        "DDP as it is": plain,
        "`gradient_as_bucket_view=True`": times(
            MICRO, _step(ddp(gradient_as_bucket_view=True), REMEDY_BATCH)
        ),
        "… and `bucket_cap_mb=1`": times(
            MICRO, _step(ddp(gradient_as_bucket_view=True, bucket_cap_mb=1), REMEDY_BATCH)
        ),
        "… and `fp16_compress_hook`": times(MICRO, _step(half, REMEDY_BATCH)),
        "… and `powerSGD_hook`, rank 4": times(MICRO, _step(low_rank, REMEDY_BATCH)),
        "accumulation without `no_sync`": accumulating(
            ddp(gradient_as_bucket_view=True), sync=True
        ),
        "accumulation with `no_sync`": accumulating(ddp(gradient_as_bucket_view=True), sync=False),
        "a batch of four times the size": _step(
            ddp(gradient_as_bucket_view=True), REMEDY_BATCH * MICRO
        ),
    }
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for count in range(ROUNDS + 3):
        for name, call in contenders.items():
            value = _timed(call, None, 2)
            if count > 1:
                seen[name].append(value)
    return [{"name": name, "seconds": values} for name, values in seen.items()]


def measure_remedies() -> Data:
    """Time what is said to help where two ranks wait for the exchange; 64 samples each."""
    return {
        "machine": machine(),
        "samples": MICRO * REMEDY_BATCH,
        "bytes": gradient_bytes(REMEDY_WIDTH),
        "contenders": on_ranks(2, _remedies)[0],
    }


def ratios(data: Data) -> Iterator[tuple[str, float]]:
    """Yield each contender's time relative to the first one's, round by round, the median."""
    base = data["contenders"][0]["seconds"]
    for each in data["contenders"]:
        yield (
            each["name"],
            statistics.median(a / b for a, b in zip(each["seconds"], base, strict=True)),
        )


def draw_remedies(data: Data) -> Drawing:
    """Draw the time for the same samples, relative to plain DDP."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes(height=3.2) as ax:
        rows = list(ratios(data))
        for place, (_, ratio) in enumerate(rows):
            # The same exchange, a rounded one, fewer.
            colour = COLOURS[0 if place < 3 else 1 if place < 5 else 2]
            ax.barh(-place, ratio, color=colour)
            ax.text(ratio + 0.02, -place, f"{ratio:.2f}", va="center")
        ax.set_yticks([-n for n in range(len(rows))], [n.replace("`", "") for n, _ in rows])
        ax.set_xlim(0, max(ratio for _, ratio in rows) * 1.12)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("time for the same samples, relative to DDP as it is")
        return _whole(ax.figure)


THREADS = (1, 2, 4)


def _threads(rank: int) -> dict[str, float]:
    ranks = dist.get_world_size()
    step = _step(DistributedDataParallel(perceptron(512)), 256 // ranks)
    seen: dict[int, list[float]] = {threads: [] for threads in THREADS}
    for count in range(ROUNDS + 1):
        for threads in THREADS:
            torch.set_num_threads(threads)
            value = _timed(step, None, 4)
            if count:
                seen[threads].append(value)
    return {str(threads): statistics.median(values) for threads, values in seen.items()}


def measure_threads() -> Data:
    """Time a step of one and of two ranks with one, two and four threads each."""
    times = {str(ranks): on_ranks(ranks, _threads)[0] for ranks in (1, 2)}
    return {"machine": machine(), "seconds": times}


def table_threads(data: Data) -> str:
    """Return milliseconds by ranks and threads."""
    names = ["1 thread a rank", *(f"{number} threads a rank" for number in THREADS[1:])]
    lines = [
        f"| ms a step | {' | '.join(names)} |",
        f"|---{'|---' * len(THREADS)}|",
    ]
    for ranks, row in data["seconds"].items():
        cells = " | ".join(f"{row[str(threads)] * 1e3:.3g}" for threads in THREADS)
        lines.append(f"| {ranks} rank{'s' * (ranks != '1')} | {cells} |")
    return "\n".join(lines)


def table_remedies(data: Data) -> str:
    """Return each contender's time in milliseconds, with the shortest and longest, and relative."""
    rounds = {each["name"]: sorted(1e3 * s for s in each["seconds"]) for each in data["contenders"]}
    shown = {
        name: f"{statistics.median(times):.3g} ({times[0]:.0f} to {times[-1]:.0f})"
        for name, times in rounds.items()
    }
    return "\n".join(
        (
            f"| two ranks, {data['samples']} samples each, {data['bytes'] / 1e6:.1f} MB of "
            "gradients | ms, median (range) | relative, median of the rounds |",
            "|---|---|---|",
            *(f"| {name} | {shown[name]} | {each:.2f} |" for name, each in ratios(data)),
        )
    )


FIGURES = (
    Figure(
        name="speed-up",
        page="scaling",
        title="Speed-up on 1 to 8 ranks with the same global batch, for a small and a large model",
        measure=measure_curves,
        draw=draw_curves,
        table=table_curves,
    ),
    Figure(
        name="threads",
        page="scaling",
        title="Milliseconds of a step by ranks and threads of each rank",
        measure=measure_threads,
        table=table_threads,
    ),
    Figure(
        name="cheaper-exchange",
        page="scaling",
        title="Time for the same samples with less or cheaper exchange, relative to plain DDP",
        measure=measure_remedies,
        draw=draw_remedies,
        table=table_remedies,
    ),
)
