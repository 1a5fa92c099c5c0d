"""The figure of docs/learn/sharded-checkpoints.md."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures.figure import Data, Figure, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


STATE_MB, ROUNDS = 128, 5


def measure_stall() -> Data:
    """Return for how many seconds a loop stands still, and until the bytes are written."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as save_parts

    state = {f"weight{n}": torch.rand(STATE_MB * 2**20 // 4 // 8) for n in range(8)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
        )
        group = dist.new_group(backend="gloo")

        def whole(place: Path) -> None:
            with place.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        def parts(place: Path) -> None:
            save_parts(state, checkpoint_id=place)

        def later(place: Path) -> Callable[[], object]:
            saving = async_save(state, checkpoint_id=place, process_group=group)
            return saving.result  # type: ignore[union-attr]

        def copy(place: Path) -> None:
            for tensor in state.values():
                tensor.clone()

        ways: dict[str, Callable[[Path], Callable[[], object] | None]] = {
            "torch.save, fsync": whole,
            "dcp.save": parts,
            "dcp.async_save": later,
            "a copy in memory": copy,
        }
        stalls: dict[str, list[float]] = {way: [] for way in ways}
        totals: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS + 1):
            for number, (way, begin) in enumerate(ways.items()):
                place = folder / str(number)
                began = time.perf_counter()
                wait = begin(place)
                stalls[way].append(time.perf_counter() - began)
                if wait is not None:
                    wait()
                totals[way].append(time.perf_counter() - began)
                if place.is_dir():
                    shutil.rmtree(place)
        dist.destroy_process_group()
    return {
        "machine": machine(),
        "state_MiB": STATE_MB,
        "rounds": ROUNDS,
        "ways": {
            way: {
                "stall_s": round(statistics.median(stalls[way][1:]), 4),
                "total_s": round(statistics.median(totals[way][1:]), 4),
            }
            for way in ways
        },
    }


def table_stall(data: Data) -> str:
    """Return both times of each way to save."""
    lines = [
        f"| {data['state_MiB']} MiB | the loop stands still | complete after |",
        "|---|---|---|",
    ]
    for way, found in data["ways"].items():
        lines.append(f"| {way} | {found['stall_s']:.2f} s | {found['total_s']:.2f} s |")
    return "\n".join(lines)


def draw_stall(data: Data) -> Drawing:
    """Draw both times as bars."""
    from benchmarks.figures.drawing import COLOURS, FAINT, axes

    with axes(7.0, 2.6) as ax:
        ways = list(data["ways"])
        for place, way in enumerate(ways):
            found = data["ways"][way]
            ax.barh(place, found["total_s"], color=FAINT, height=0.6)
            ax.barh(place, found["stall_s"], color=COLOURS[1], height=0.6)
            label = f" {found['stall_s']:.2f} of {found['total_s']:.2f} s"
            ax.text(found["total_s"], place, label, va="center")
        ax.set_yticks(range(len(ways)), ways)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, 1.3 * max(found["total_s"] for found in data["ways"].values()))
        ax.set_xlabel("seconds: coloured while the loop stands still, grey while it goes on")
        return ax.figure  # type: ignore[return-value]


FIGURES = (
    Figure(
        name="checkpoint-stall",
        page="sharded-checkpoints",
        title="How long a training loop stands still for a checkpoint",
        measure=measure_stall,
        draw=draw_stall,
        table=table_stall,
    ),
)
