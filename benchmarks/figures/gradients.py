"""The figures of docs/learn/gradients.md."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures.figure import Data, Figure, machine

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


# The mean of means

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


# no_sync

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


# The timeline of a step

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


# The learning rate that a global batch bears

GLOBAL_BATCHES = (2, 8, 32, 128, 512)
SAMPLES, SEEDS = 12_288, 6
RATES = {
    "SGD": [0.08 * 2 ** (k / 2) for k in range(10)],
    "Adam": [0.001 * 2 ** (k / 2) for k in range(14)],
}


def batch_and_learning_rate() -> Data:
    """Find the learning rate of the lowest training loss after a fixed number of samples."""
    inputs, classes = digits()
    found: dict[str, Any] = {"global_batches": list(GLOBAL_BATCHES), "samples": SAMPLES}
    for optimizer, rates in RATES.items():
        best, lowest = [], []
        for batch in GLOBAL_BATCHES:
            losses = _losses(inputs.float(), classes, optimizer, rates, batch)
            number = int(losses.argmin())
            best.append(round(rates[number], 5))
            lowest.append(round(float(losses[number]), 4))
        found[optimizer] = {"best_rate": best, "loss": lowest}
    return found


def _losses(
    inputs: Tensor, classes: Tensor, optimizer: str, rates: list[float], batch: int
) -> Tensor:
    """Train a model for each rate and seed, all at once; return the loss by rate, [rates]."""
    generator = torch.Generator().manual_seed(0)
    many = len(rates) * SEEDS

    def weights(*shape: int) -> Tensor:
        # The same first weights for each rate.
        bound = shape[0] ** -0.5
        one = (torch.rand(SEEDS, *shape, generator=generator) * 2 - 1) * bound
        all_rates: Tensor = one.repeat(len(rates), 1, 1)
        return all_rates.requires_grad_()

    parameters = [weights(64, 32), weights(1, 32), weights(32, 10), weights(1, 10)]
    rate = torch.tensor(rates).repeat_interleave(SEEDS)[:, None, None]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        first, first_bias, second, second_bias = parameters
        scores = torch.tanh(x @ first + first_bias) @ second + second_bias
        found: Tensor = functional.cross_entropy(
            scores.flatten(0, 1), y.expand(many, -1).flatten(), reduction="none"
        )
        return found.view(many, -1).mean(dim=1)

    for step in range(1, SAMPLES // batch + 1):
        chosen = torch.randint(len(inputs), (batch,), generator=generator)
        gradients = torch.autograd.grad(loss(inputs[chosen], classes[chosen]).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient, (first, second) in zip(
                parameters, gradients, moments, strict=True
            ):
                if optimizer == "SGD":
                    parameter -= rate * gradient
                    continue
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient.square(), 0.001)
                size = (second / (1 - 0.999**step)).sqrt() + 1e-8
                parameter -= rate * first / (1 - 0.9**step) / size
    with torch.no_grad():
        losses: Tensor = loss(inputs, classes).view(len(rates), SEEDS).mean(dim=1)
        # What has diverged is no candidate.
        losses[losses.isnan()] = torch.inf
        return losses


def draw_batch_and_learning_rate(data: Data) -> Drawing:
    """Draw the best rates, with lines of both rules from the smallest batch on."""
    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    batches = data["global_batches"]
    with axes(height=3.8) as ax:
        for optimizer, colour, power, rule in (
            ("SGD", COLOURS[0], 1.0, "linear"),
            ("Adam", COLOURS[1], 0.5, "square root"),
        ):
            rates = data[optimizer]["best_rate"]
            ax.plot(batches, rates, "o-", color=colour)
            middle = len(batches) // 2
            factor, place = (1.3, "bottom") if optimizer == "Adam" else (0.75, "top")
            y = rates[middle] * factor
            ax.text(batches[middle], y, optimizer, color=colour, ha="center", va=place)
            line = [rates[0] * (batch / batches[0]) ** power for batch in batches]
            shown = [(b, r) for b, r in zip(batches, line, strict=True) if r < 30]
            ax.plot(*zip(*shown, strict=True), ":", color=TEXT, linewidth=1.2)
            x, y = shown[-1]
            ax.text(x * 1.1, y, rule, va="center")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlim(batches[0] * 0.85, batches[-1] * 2.6)
        ax.set_xticks(batches, [str(batch) for batch in batches])
        ax.set_xlabel("global batch")
        ax.set_ylabel("best learning rate")
        return ax.figure  # type: ignore[return-value]


def table_batch_and_learning_rate(data: Data) -> str:
    """Write the best rate and its loss by global batch."""
    head = " | ".join(map(str, data["global_batches"]))
    rows = [f"| global batch | {head} |", "|---" * (len(data["global_batches"]) + 1) + "|"]
    for optimizer in RATES:
        for key, label in (("best_rate", "best rate"), ("loss", "its loss")):
            cells = " | ".join(f"{value:.2g}" for value in data[optimizer][key])
            rows.append(f"| {optimizer}, {label} | {cells} |")
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
    Figure(
        name="no_sync",
        page="gradients",
        title="The time of a step with and without no_sync, by micro-batches",
        measure=no_sync,
        draw=draw_no_sync,
        table=table_no_sync,
    ),
    Figure(
        name="batch_and_learning_rate",
        page="gradients",
        title="The best learning rate by global batch, for SGD and for Adam",
        measure=batch_and_learning_rate,
        draw=draw_batch_and_learning_rate,
        table=table_batch_and_learning_rate,
    ),
    Figure(
        name="ddp_timeline",
        page="gradients",
        title="When a step of DistributedDataParallel computes and when it exchanges",
        measure=ddp_timeline,
        draw=draw_ddp_timeline,
        table=table_ddp_timeline,
    ),
)
