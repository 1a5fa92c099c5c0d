"""The figure of docs/learn/profile.md: where the time of a step goes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures.figure import PAGES, ROOT, Data, Figure, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing
from benchmarks.figures.scaling import _whole

# The commands of the page, and what it says to change; samples of a global batch, ranks, flags.
PROFILES = {
    "slow data": (64, 1, ("--task", "slow_data.py:SlowDigits")),
    "slow data, `--workers 4`": (64, 1, ("--task", "slow_data.py:SlowDigits", "--workers", "4")),
    "large gradients, batch of 8": (8, 2, ("--task", "wide.py:Wide", "--optimizer", "sgd")),
    "large gradients, batch of 64": (64, 2, ("--task", "wide.py:Wide", "--optimizer", "sgd")),
    "much compute, 1 rank": (512, 1, ("--task", "wide.py:Wide")),
    "much compute, 2 ranks": (512, 2, ("--task", "wide.py:Wide")),
}
PARTS = ("compute", "communication", "data", "idle")
PER_SAMPLES = 64


def scripts_of_page() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the page's files."""
    text = (PAGES / "profile.md").read_text(encoding="utf-8")
    for found in re.finditer(r'^```python title="([^"]+)"\n(.*?)^```$', text, re.M | re.S):
        yield found[1], found[2]


def measure_profiles() -> Data:
    """Run the page's profiles, and split the steps of rank 0 as `train` does."""
    from train.profiling.timeline import split

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in scripts_of_page():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        for number, (name, (batch, ranks, flags)) in enumerate(PROFILES.items()):
            words = [sys.executable, "-m", "train", *flags, "--global-batch", str(batch)]
            words += ["--steps", "22", "--profile", "3:20", "--run-dir", f"runs/{number}"]
            words += ["--checkpoint-every", "0", *(("--spawn", str(ranks)) if ranks > 1 else ())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
            trace = Path(folder) / f"runs/{number}/profile/attempt-0/rank-0.json"
            parts = split(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
            scale = 1e3 / parts.steps * PER_SAMPLES / batch
            runs.append({"name": name, **{p: getattr(parts, p) * scale for p in PARTS}})
    return {"machine": machine(), "samples": PER_SAMPLES, "runs": runs}


def draw_profiles(data: Data) -> Drawing:
    """Draw where the time of 64 samples goes, before and after each change."""
    from benchmarks.figures.drawing import COLOURS, FAINT, GROUND, axes

    colours = (COLOURS[0], COLOURS[1], COLOURS[2], FAINT)
    with axes(height=3.3) as ax:
        places = [-0.0, -0.9, -2.4, -3.3, -4.8, -5.7]
        for place, run in zip(places, data["runs"], strict=True):
            start, total = 0.0, sum(run[part] for part in PARTS)
            for part, colour in zip(PARTS, colours, strict=True):
                share = 100 * run[part] / total
                ax.barh(place, share, left=start, color=colour, edgecolor=GROUND, height=0.75)
                start += share
            ax.text(101, place, f"{total:.0f} ms", va="center")
        for number, (part, colour) in enumerate(zip(PARTS, colours, strict=True)):
            ax.text((0, 23, 60, 80)[number], 0.75, part, color=colour if number < 3 else None)
        ax.set_yticks(places, [run["name"].replace("`", "") for run in data["runs"]])
        ax.set_xlim(0, 114)
        ax.set_ylim(-6.3, 1.3)
        ax.set_xticks([0, 25, 50, 75, 100])
        ax.grid(visible=False)
        ax.set_xlabel(f"share of the step, %; right: time of {data['samples']} samples")
        return _whole(ax.figure)


def table_profiles(data: Data) -> str:
    """Return the parts of the time of 64 samples."""
    lines = [
        f"| ms for {data['samples']} samples | {' | '.join(PARTS)} | together |",
        f"|---{'|---' * (len(PARTS) + 1)}|",
    ]
    for run in data["runs"]:
        cells = " | ".join(f"{run[part]:.1f}" for part in PARTS)
        lines.append(f"| {run['name']} | {cells} | {sum(run[p] for p in PARTS):.0f} |")
    return "\n".join(lines)


FIGURES = (
    Figure(
        name="profile-parts",
        page="profile",
        title="Where the time of a step goes for three tasks, before and after a change",
        measure=measure_profiles,
        draw=draw_profiles,
        table=table_profiles,
    ),
)
