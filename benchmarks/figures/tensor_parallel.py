"""The figures of docs/learn/tensor-parallel.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchmarks.figures.collectives import on_ranks
from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


def cut_matrices() -> Data:
    """Return the shapes of a feed-forward layer on two ranks, as torch cuts it."""
    return {"ranks": on_ranks(2, _cut_shapes)}


def _cut_shapes() -> dict[str, list[int]]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(mlp, init_device_mesh("cpu", (2,)), plan)
    hidden: list[list[int]] = []
    mlp[1].register_forward_hook(lambda layer, inputs, output: hidden.append(list(output.shape)))
    x = torch.ones(3, 4)
    y = mlp(x)

    def transposed(name: str) -> list[int]:
        # torch keeps [outputs, inputs]; drawn as x @ a matrix of [inputs, outputs].
        weight = mlp.get_parameter(name)
        assert isinstance(weight, DTensor)
        return list(weight.to_local().shape)[::-1]

    return {
        "x": list(x.shape),
        "up": transposed("0.weight"),
        "hidden": hidden[0],
        "down": transposed("2.weight"),
        "y": list(y.shape),
    }


def draw_cut(data: Data) -> Drawing:
    """Draw the matrices of both ranks as rectangles, one rank below the other."""
    from matplotlib.patches import Rectangle

    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    unit, gap = 0.25, 0.55
    with axes(7, 3.3) as ax:
        for rank, shapes in enumerate(data["ranks"]):
            middle, left = 1.15 + 2.5 * rank, 0.9
            ax.text(0, middle, f"rank {rank}", va="center", color=COLOURS[rank])
            for name, label, sign in (
                ("x", "x", "@"),
                ("up", "half of the\ncolumns", "→"),
                ("hidden", "half of\nhidden", "@"),
                ("down", "half of\nthe rows", "→"),
                ("y", "partial\nsum", ""),
            ):
                rows, columns = (size * unit for size in shapes[name])
                colour = FAINT if name == "x" else COLOURS[rank]
                top = middle - rows / 2
                ax.add_patch(Rectangle((left, top), columns, rows, facecolor=colour, linewidth=0))
                for number in range(1, shapes[name][1]):
                    at = left + number * unit
                    ax.plot([at, at], [top, top + rows], color="#ffffff", linewidth=0.6)
                for number in range(1, shapes[name][0]):
                    at = top + number * unit
                    ax.plot([left, left + columns], [at, at], color="#ffffff", linewidth=0.6)
                ax.text(
                    left + columns / 2,
                    top + rows + 0.08,
                    label,
                    ha="center",
                    va="top",
                    fontsize=9,
                    color=TEXT,
                )
                left += columns + gap
                ax.text(left - gap / 2, middle, sign, ha="center", va="center", color=TEXT)
        ax.annotate(
            "",
            (left - 0.2, 3.5),
            (left - 0.2, 1.3),
            arrowprops={"arrowstyle": "<->", "color": TEXT},
        )
        ax.text(left, 2.4, "all_reduce", va="center", color=TEXT)
        ax.set_xlim(-0.05, left + 1.35)
        ax.set_ylim(4.9, 0.45)
        ax.axis("off")
        return cast("Drawing", ax.figure)


FIGURES = (
    Figure(
        name="tensor-parallel",
        page="tensor-parallel",
        title="A feed-forward layer cut by columns and then by rows, on two ranks",
        measure=cut_matrices,
        draw=draw_cut,
    ),
)
