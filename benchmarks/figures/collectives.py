"""The figures of docs/learn/collectives.md."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.figures.figure import Data, Figure, machine

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure as Drawing

RANKS = 3
ARRIVALS_S = (0.3, 0.0, 0.9)
"""When the ranks of the drawing come to the barrier."""

LETTERS = "ABC"
SIZES_BYTES = tuple(4**power for power in range(4, 13))
WORLDS = (2, 4)
ROUNDS = 5
LARGE_BYTES = 6 << 20


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on each rank of a gloo group, and return what each of them returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        tasks = [(rank, ranks, folder, function, arguments) for rank in range(ranks)]
        # One task for each process: they wait for each other.
        return pool.starmap(_on_rank, tasks, chunksize=1)


def _on_rank(
    rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    result = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result


# What each collective does.


def what_each_does() -> Data:
    """Call each collective on three ranks; say of each cell which ranks' parts are summed in it.

    Part p of rank r is the power of two of the number 3 r + p: a sum shows what it was made of.
    """
    found = on_ranks(RANKS, _call_each)
    names = list(found[0]["cells"])
    return {
        "ranks": RANKS,
        "cells": {
            name: [
                {
                    when: [_origin(value) for value in rank["cells"][name][when]]
                    for when in rank["cells"][name]
                }
                for rank in found
            ]
            for name in names
        },
        "barrier_s": [rank["barrier_s"] for rank in found],
    }


def _origin(value: int) -> str:
    """Name the parts in a cell: 'A0' is part 0 of rank 0, 'Σ1' the sum of all parts 1.

    >>> _origin(2**4), _origin(2**1 + 2**4 + 2**7), _origin(0)
    ('B1', 'Σ1', '')
    """
    parts = [(bit // RANKS, bit % RANKS) for bit in range(RANKS * RANKS) if value >> bit & 1]
    numbers = {part for _, part in parts}
    if not parts:
        return ""
    if len(numbers) == 1 and len(parts) == RANKS:
        return f"Σ{numbers.pop()}"
    ((rank, part),) = parts
    return f"{LETTERS[rank]}{part}"


def _call_each() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    cells: dict[str, dict[str, list[int]]] = {}

    def own() -> torch.Tensor:
        return torch.tensor([2 ** (n * rank + part) for part in range(n)])

    def note(name: str, before: torch.Tensor | None, after: torch.Tensor | None) -> None:
        cells[name] = {
            "before": [] if before is None else before.tolist(),
            "after": [] if after is None else after.tolist(),
        }

    root = rank == 0
    x = own() if root else torch.zeros(n, dtype=torch.int64)
    dist.broadcast(x, src=0)
    note("broadcast", own() if root else None, x)

    part = torch.zeros(1, dtype=torch.int64)
    dist.scatter(part, list(own().chunk(n)) if root else None, src=0)
    note("scatter", own() if root else None, part)

    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(n)] if root else None
    dist.gather(own()[:1], parts, dst=0)
    note("gather", own()[:1], torch.cat(parts) if parts else None)

    whole = torch.zeros(n, dtype=torch.int64)
    dist.all_gather_single(whole, own()[:1])
    note("all_gather", own()[:1], whole)

    x = own()
    dist.reduce(x, dst=0)
    note("reduce", own(), x if root else None)

    x = own()
    dist.all_reduce(x)
    note("all_reduce", own(), x)

    dist.reduce_scatter_single(part, own())
    note("reduce_scatter", own(), part)

    dist.all_to_all_single(whole, own())
    note("all_to_all", own(), whole)

    pairs = [
        dist.P2POp(dist.isend, own(), (rank + 1) % n),
        dist.P2POp(dist.irecv, x, (rank - 1) % n),
    ]
    for request in dist.batch_isend_irecv(pairs):
        request.wait()
    note("send and recv, in a ring", own(), x)

    dist.barrier()
    started = time.monotonic()
    time.sleep(ARRIVALS_S[rank])
    came = time.monotonic()
    dist.barrier()
    return {"cells": cells, "barrier_s": [came - started, time.monotonic() - started]}


RING: dict[str, tuple[str, Callable[[int], float]]] = {
    "broadcast": ("S", lambda n: 1),
    "scatter": ("(n-1)/n S, by rank 0", lambda n: (n - 1) / n),
    "gather": ("S/n", lambda n: 1 / n),
    "all_gather": ("(n-1)/n S", lambda n: (n - 1) / n),
    "reduce": ("S", lambda n: 1),
    "all_reduce": ("2 (n-1)/n S", lambda n: 2 * (n - 1) / n),
    "reduce_scatter": ("(n-1)/n S", lambda n: (n - 1) / n),
    "all_to_all": ("(n-1)/n S", lambda n: (n - 1) / n),
    "send and recv, in a ring": ("S", lambda n: 1),
}
"""Bytes that the busiest of n ranks sends, of a whole tensor of S bytes: in words, as a share of S.

Scatter, gather and all_to_all go straight to their receivers; the others go round a ring.
"""


def draw_each(data: Data) -> Drawing:
    """Draw the ranks' cells before and after."""
    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    with axes(7, 6.9, nrows=5, ncols=2) as grid:
        panels = cast("Any", grid).flat
        for panel, (name, ranks) in zip(panels, data["cells"].items(), strict=False):
            panel.set_title(name, fontsize=10, loc="left", fontweight="bold")
            panel.set_xlim(-1.1, 12.2)
            panel.set_ylim(2.95, -0.15)
            for row, cells in enumerate(ranks):
                panel.text(-0.25, row + 0.45, f"{row}", ha="right", va="center", color=TEXT)
                for left, when in ((0, "before"), (4.3, "after")):
                    for column, label in enumerate(cells[when]):
                        # Where it came from is its colour; a sum has none of the ranks'.
                        owner = LETTERS.find(label[0]) if label else -1
                        colour = COLOURS[owner] if owner >= 0 else COLOURS[4]
                        panel.add_patch(_cell(left + column, row, colour, filled=label != ""))
                        panel.text(
                            left + column + 0.46,
                            row + 0.45,
                            label,
                            ha="center",
                            va="center",
                            fontsize=9,
                            color="#ffffff",
                        )
            panel.annotate(
                "", (4.1, 1.45), (3.2, 1.45), arrowprops={"arrowstyle": "->", "color": TEXT}
            )
            panel.text(
                7.7, 1.45, f"sends\n{RING[name][0]}", ha="left", va="center", fontsize=9, color=TEXT
            )
            panel.axis("off")
        panel = cast("Any", grid).flat[-1]
        panel.set_title("barrier (time →)", fontsize=10, loc="left", fontweight="bold")
        end = max(stop for _, stop in data["barrier_s"])
        for row, (start, stop) in enumerate(data["barrier_s"]):
            panel.text(-0.25, row + 0.45, f"{row}", ha="right", va="center", color=TEXT)
            panel.barh(row + 0.45, start / end * 7, height=0.5, color=COLOURS[row])
            panel.barh(
                row + 0.45, (stop - start) / end * 7, left=start / end * 7, height=0.5, color=FAINT
            )
        panel.text(7.7, 1.45, "grey: waits for\nthe last rank", ha="left", va="center", fontsize=9)
        panel.set_xlim(-1.1, 12.2)
        panel.set_ylim(2.95, -0.15)
        panel.axis("off")
        return cast("Drawing", panel.figure)


def _cell(left: float, top: float, colour: str, *, filled: bool) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), 0.92, 0.9, facecolor=colour if filled else "none", linewidth=0)


# What they cost.


def costs() -> Data:
    """Measure a barrier and all_reduce, for two and four ranks on loopback."""
    rounds: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in WORLDS}
    for _ in range(ROUNDS):
        for ranks in WORLDS:
            by_rank = on_ranks(ranks, _time_calls)
            # A call is over when it is over for all ranks.
            rounds[ranks].append({key: max(r[key] for r in by_rank) for key in by_rank[0]})
    median = {
        str(ranks): {
            key: statistics.median(measured[key] for measured in found) for key in found[0]
        }
        for ranks, found in rounds.items()
    }
    return {"machine": machine(), "sizes_bytes": list(SIZES_BYTES), "median_s": median}


def _time_calls() -> dict[str, float]:
    """Return the median seconds of a barrier, and of all_reduce by the bytes of its tensor."""
    import torch
    import torch.distributed as dist

    def timed(call: Callable[[], object], repeats: int) -> float:
        times = []
        for _ in range(repeats + 2):
            dist.barrier()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    found = {"barrier": timed(dist.barrier, 30)}
    for size in SIZES_BYTES:
        x = torch.zeros(size // 4)

        def call(x: torch.Tensor = x) -> object:
            return dist.all_reduce(x)

        found[str(size)] = timed(call, 30 if size <= 1 << 18 else 5)
    return found


def draw_costs(data: Data) -> Drawing:
    """Draw the time over the size, both logarithmic."""
    from benchmarks.figures.drawing import COLOURS, axes

    with axes() as ax:
        sizes = data["sizes_bytes"]
        for colour, (ranks, times) in zip(COLOURS, data["median_s"].items(), strict=False):
            values = [times[str(size)] for size in sizes]
            ax.plot(sizes, values, "o-", color=colour)
            ax.text(sizes[-1] * 1.3, values[-1], f"{ranks} ranks", color=colour, va="center")
            ax.plot([sizes[0], sizes[-1]], [times["barrier"]] * 2, ":", color=colour, linewidth=1.2)
            ax.text(
                sizes[-1] * 1.3, times["barrier"], "barrier", color=colour, va="center", fontsize=9
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlim(sizes[0] / 1.5, sizes[-1] * 12)
        ax.set_xticks(sizes, [_size(size) for size in sizes], fontsize=9)
        ax.minorticks_off()
        ax.set_yticks([1e-4, 1e-3, 1e-2, 1e-1], ["0.1 ms", "1 ms", "10 ms", "100 ms"])
        ax.set_title("all_reduce: a floor for small tensors, then bytes", loc="left", fontsize=11)
        return cast("Drawing", ax.figure)


def _size(size_bytes: int) -> str:
    """Write a size in bytes.

    >>> _size(256), _size(4096), _size(16 << 20)
    ('256 B', '4 KiB', '16 MiB')
    """
    for unit, each in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= each:
            return f"{size_bytes // each} {unit}"
    return f"{size_bytes} B"


def table_of_costs(data: Data) -> str:
    """Return a row for the barrier and for each size of all_reduce."""
    worlds = list(data["median_s"])
    lines = [
        "| | " + " | ".join(f"{ranks} ranks" for ranks in worlds) + " |",
        "|---|" + "---|" * len(worlds),
    ]
    rows = [("barrier", "barrier")]
    rows += [(f"all_reduce of {_size(size)}", str(size)) for size in data["sizes_bytes"]]
    for label, key in rows:
        times = [f"{data['median_s'][ranks][key] * 1e3:.2f} ms" for ranks in worlds]
        lines.append(f"| {label} | " + " | ".join(times) + " |")
    return "\n".join(lines)


# What gloo really sends.


def sent() -> Data:
    """Count the bytes that the ranks' sockets send, for each collective on two and four ranks."""
    found = {str(ranks): on_ranks(ranks, _count_sent) for ranks in WORLDS}
    return {
        "bytes": LARGE_BYTES,
        "most_sent_bytes": {
            name: {ranks: max(r[name] for r in by_rank) for ranks, by_rank in found.items()}
            for name in found[str(WORLDS[0])][0]
        },
    }


def _sent_so_far() -> int:
    """Return the bytes that this process has sent on its TCP connections.

    Source: struct tcp_info of linux/tcp.h, whose tcpi_bytes_sent is at byte 200 (Linux 4.19).
    """
    import socket

    total = 0
    for opened in Path("/proc/self/fd").iterdir():
        try:
            if not str(opened.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(opened.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += int.from_bytes(info[200:208], "little")
        except OSError:
            continue  # closed meanwhile, or no TCP
    return total


def _count_sent() -> dict[str, int]:
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    whole, part = torch.zeros(LARGE_BYTES // 4), torch.zeros(LARGE_BYTES // 4 // n)
    other = torch.zeros_like(whole)
    parts = list(other.chunk(n))
    root = rank == 0
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "scatter": lambda: dist.scatter(part, parts if root else None, src=0),
        "gather": lambda: dist.gather(part, parts if root else None, dst=0),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce": lambda: dist.reduce(whole, dst=0),
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    found = {}
    for name, call in calls.items():
        call()  # opens connections
        dist.barrier()
        before = _sent_so_far()
        call()
        dist.barrier()
        found[name] = _sent_so_far() - before
    return found


def table_of_sent(data: Data) -> str:
    """Return a row for each collective: by a ring, and what the busiest rank of gloo sent."""
    lines = [
        "| | ring, n ranks | ring, 4 ranks | gloo, 2 ranks | gloo, 4 ranks |",
        "|---|---|---|---|---|",
    ]
    for name, by_ranks in data["most_sent_bytes"].items():
        formula, share = RING[name]
        shares = " | ".join(f"{sent / data['bytes']:.2f} S" for sent in by_ranks.values())
        lines.append(f"| {name} | {formula} | {share(4):.2f} S | {shares} |")
    return "\n".join(lines)


FIGURES = (
    Figure(
        name="collectives",
        page="collectives",
        title="What three ranks hold before and after each collective",
        measure=what_each_does,
        draw=draw_each,
    ),
    Figure(
        name="all-reduce-cost",
        page="collectives",
        title="Time of all_reduce over its size, and of a barrier, for two and four ranks",
        measure=costs,
        draw=draw_costs,
        table=table_of_costs,
    ),
    Figure(
        name="collectives-sent",
        page="collectives",
        title="Bytes that the busiest rank sends in each collective, by formula and by gloo",
        measure=sent,
        table=table_of_sent,
    ),
)
