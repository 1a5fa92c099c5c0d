"""The figure of docs/learn/links.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

RANKS = 4


def steps() -> Data:
    """Play a ring all-reduce: after each step, of how many ranks each part is the sum."""
    held = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]
    found = [{"name": "start", "ranks": _counts(held), "received": []}]
    for step in range(2 * (RANKS - 1)):
        sums = step < RANKS - 1
        received, sent = [], [[set(part) for part in rank] for rank in held]
        for rank in range(RANKS):
            left = (rank - 1) % RANKS
            part = (left - step) % RANKS if sums else (rank - step + RANKS - 1) % RANKS
            held[rank][part] = sent[left][part] | (sent[rank][part] if sums else set())
            received.append([rank, part])
        name = f"reduce-scatter {step + 1}" if sums else f"all-gather {step + 2 - RANKS}"
        found.append({"name": name, "ranks": _counts(held), "received": received})
    return {"steps": found}


def _counts(held: list[list[set[int]]]) -> list[list[int]]:
    return [[len(part) for part in rank] for rank in held]


def draw(data: Data) -> Drawing:
    """Draw a grid for each step; a frame marks the part that a rank has just received."""
    from benchmarks.figures.drawing import COLOURS, GROUND, TEXT, axes

    shades = {1: 0.12, 2: 0.35, 3: 0.6, 4: 1.0}
    width = RANKS + 1
    with axes(9, 2.1) as ax:
        for number, step in enumerate(data["steps"]):
            left = number * width
            ax.text(left + RANKS / 2, -0.35, step["name"], ha="center", fontsize=8.5, color=TEXT)
            for rank, parts in enumerate(step["ranks"]):
                for part, count in enumerate(parts):
                    new = [rank, part] in step["received"]
                    ax.add_patch(
                        _cell(left + part, rank, COLOURS[0], shades[count], TEXT if new else GROUND)
                    )
                    ax.text(
                        left + part + 0.5,
                        rank + 0.54,
                        str(count),
                        ha="center",
                        va="center",
                        fontsize=9,
                        color=GROUND if count == RANKS else TEXT,
                    )
        ax.set_yticks([rank + 0.5 for rank in range(RANKS)], [f"rank {r}" for r in range(RANKS)])
        ax.set_xlim(-0.1, len(data["steps"]) * width - 0.9)
        ax.set_ylim(RANKS + 0.1, -1)
        ax.tick_params(length=0, labelbottom=False)
        ax.grid(visible=False)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        return cast("Drawing", ax.figure)


def _cell(left: float, top: float, colour: str, shade: float, edge: str) -> object:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    return Rectangle(
        (left + 0.06, top + 0.06),
        0.88,
        0.88,
        facecolor=to_rgba(colour, shade),
        edgecolor=edge,
        lw=1.6,
    )


FIGURES = (
    Figure(
        name="ring-steps",
        page="links",
        title="A ring all-reduce of four ranks: after each step, how many ranks are in each sum",
        measure=steps,
        draw=draw,
    ),
)
