"""The figures of docs/learn/context-parallel.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

RANKS = 4


def count_scores() -> Data:
    """Return the rank of each part of a sequence, and each rank's share of the causal scores.

    The sequence has two parts per rank, in the orders of the page.
    """
    import torch

    parts, size = 2 * RANKS, 64
    mask = torch.ones(parts * size, parts * size).tril()
    owners = {
        "contiguous": [part // 2 for part in range(parts)],
        "zig-zag": [min(part, parts - 1 - part) for part in range(parts)],
    }
    orders = {}
    for name, ranks in owners.items():
        rows = torch.tensor(ranks).repeat_interleave(size)
        shares = [(mask[rows == rank].sum() / mask.sum()).item() for rank in range(RANKS)]
        orders[name] = {"ranks": ranks, "shares": shares}
    return {"orders": orders}


def draw_orders(data: Data) -> Drawing:
    """Draw the causal mask for each order, with the rows of a rank in its colour."""
    from matplotlib.patches import Polygon, Rectangle

    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    with axes(7, 3.9) as ax:
        for number, (name, order) in enumerate(data["orders"].items()):
            parts, left = len(order["ranks"]), 11.5 * number
            for query, rank in enumerate(order["ranks"]):
                ax.text(
                    left - 0.2,
                    query + 0.5,
                    f"rank {rank}",
                    ha="right",
                    va="center",
                    fontsize=8,
                    color=COLOURS[rank],
                )
                ax.add_patch(
                    Rectangle((left, query), query, 1, facecolor=COLOURS[rank], linewidth=0)
                )
                corners = [(left + query, query), (left + query, query + 1)]
                corners.append((left + query + 1, query + 1))
                ax.add_patch(Polygon(corners, facecolor=COLOURS[rank], linewidth=0))
            for line in range(parts + 1):
                ax.plot([left, left + parts], [line, line], color=FAINT, linewidth=0.5)
                ax.plot([left + line, left + line], [0, parts], color=FAINT, linewidth=0.5)
            ax.text(left + parts / 2, -0.35, name, ha="center", color=TEXT)
            shares = " · ".join(f"{100 * share:.0f} %" for share in order["shares"])
            ax.text(left + parts / 2, parts + 0.85, "keys and values", ha="center", fontsize=8)
            ax.text(
                left + parts / 2, parts + 1.75, f"ranks 0 to 3: {shares}", ha="center", fontsize=9
            )
        ax.set_xlim(-2.4, 20)
        ax.set_ylim(10, -1)
        ax.set_aspect("equal")
        ax.axis("off")
        return cast("Drawing", ax.figure)


FIGURES = (
    Figure(
        name="causal-shares",
        page="context-parallel",
        title="Each rank's share of the causal attention scores, in contiguous and zig-zag order",
        measure=count_scores,
        draw=draw_orders,
    ),
)
