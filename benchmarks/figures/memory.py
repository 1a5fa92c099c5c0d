"""The figures of docs/learn/memory.md."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.figures.figure import PAGES, Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

KINDS = ("parameters", "optimizer state", "gradients", "activations, temporary")
TITLES = {"kept": "all activations kept", "checkpointed": "each layer checkpointed"}
POINTS = {"forward": 24, "backward": 48, "optimizer": 14}
"""Points of the drawing for each phase; each shows the largest of several operations."""


def counted() -> Data:
    """Count the bytes that live in two steps, by the scripts of the page."""
    text = (PAGES / "memory.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        shutil.copytree(PAGES / "memory", folder / "memory")
        for title in ("live.py", "step.py"):
            block = re.search(rf'^```python title="{title}"\n(.*?)^```$', text, re.M | re.S)
            assert block, title
            (folder / title).write_text(block[1], encoding="utf-8")
        sys.path.insert(0, os.fspath(folder))
        traces: dict[str, list[Sequence[Any]]] = runpy.run_path("step.py")["traces"]
    return {"kib": {how: _thinned(rows) for how, rows in traces.items()}}


def _thinned(rows: list[Sequence[Any]]) -> dict[str, list[list[int]]]:
    """Return KiB of each kind, at some points of each phase."""
    found: dict[str, list[list[int]]] = {}
    for phase in dict.fromkeys(row[0] for row in rows):
        mine = [row[1:] for row in rows if row[0] == phase]
        points = POINTS[phase.split()[0]]
        cuts = [round(i * len(mine) / points) for i in range(points + 1)]
        found[phase] = [
            [round(value / 1024) for value in max(mine[a:b], key=sum)]
            for a, b in itertools.pairwise(cuts)
        ]
    return found


def draw(data: Data) -> Drawing:
    """Draw one stack for each way, over the operations of two steps."""
    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    with axes(7.4, 3.6, ncols=2, sharey=True) as found:
        panels = cast("Sequence[Any]", found)
        for ax, (how, trace) in zip(panels, data["kib"].items(), strict=True):
            rows = [[value / 1024 for value in row] for phase in trace.values() for row in phase]
            ax.stackplot(
                range(len(rows)),
                *zip(*rows, strict=True),
                labels=KINDS,
                colors=(COLOURS[0], COLOURS[2], COLOURS[1], COLOURS[5]),
                linewidth=0,
            )
            ax.set_title(TITLES[how], fontsize=10)
            ax.set_xlim(0, len(rows) - 1)
            ax.set_xlabel("operations, in their order")
            start = 0
            for phase, part in trace.items():
                ax.axvline(start, color=FAINT, linewidth=0.8)
                ax.text(
                    start + 1,
                    14.7,
                    phase.replace(" ", "\n").replace("optimizer", "step"),
                    fontsize=8,
                    va="top",
                    color=TEXT,
                )
                start += len(part)
            ax.set_xticks([])
        panels[0].set_ylim(0, 15)
        panels[0].set_ylabel("MiB")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(
            handles, labels, loc="outside lower center", ncols=len(KINDS), fontsize=9
        )
        return cast("Drawing", panels[0].figure)


FIGURES = (
    Figure(
        name="step-memory",
        page="memory",
        title="Bytes that a rank holds over two training steps, with and without checkpointing",
        measure=counted,
        draw=draw,
    ),
)
