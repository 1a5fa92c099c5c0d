"""The figures of docs/learn/fsdp.md."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from benchmarks.figures.collectives import on_ranks
from benchmarks.figures.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

GPUS = (1, 8, 64)

# What each rank holds.

BYTES = {"weights, bf16": 2, "gradients, bf16": 2, "weights, fp32": 4, "Adam's averages, fp32": 8}
"""Bytes per parameter in mixed precision. Source: ZeRO, arXiv 1910.02054, section 3.1."""

SHARDED = {
    "DDP": (),
    "ZeRO 1": ("weights, fp32", "Adam's averages, fp32"),
    "ZeRO 2": ("weights, fp32", "Adam's averages, fp32", "gradients, bf16"),
    "ZeRO 3": tuple(BYTES),
}
"""What each stage divides among the ranks."""


def held() -> Data:
    """Compute the bytes of each parameter that a rank holds from step to step."""
    return {
        "bytes": {
            stage: {
                str(gpus): {
                    kind: size / gpus if kind in sharded else size for kind, size in BYTES.items()
                }
                for gpus in GPUS
            }
            for stage, sharded in SHARDED.items()
        }
    }


def draw_held(data: Data) -> Drawing:
    """Draw bars for eight GPUs."""
    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    with axes(7, 2.9) as ax:
        for row, by_gpus in enumerate(data["bytes"].values()):
            left = 0.0
            for colour, (kind, size) in zip(
                (COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[4]), by_gpus["8"].items(), strict=True
            ):
                ax.barh(row, size, left=left, height=0.6, color=colour)
                if row == 0:
                    name, _, number = kind.partition(", ")
                    ax.text(
                        left + size / 2,
                        -0.42,
                        f"{name.replace(' ', chr(10))}\n{number}",
                        ha="center",
                        va="bottom",
                        fontsize=9,
                        color=colour,
                    )
                left += size
            ax.text(left + 0.15, row, f"{left:g} bytes", va="center", fontsize=9, color=TEXT)
        ax.set_yticks(range(len(data["bytes"])), list(data["bytes"]))
        ax.set_ylim(3.5, -1.7)
        ax.set_xlim(0, 18.5)
        ax.tick_params(length=0, labelbottom=False)
        ax.grid(visible=False)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        return cast("Drawing", ax.figure)


def table_of_held(data: Data) -> str:
    """Return a row for each stage, with the bytes for a model of 7 billion parameters."""
    lines = [
        "| | divided among the ranks | "
        + " | ".join(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS)
        + " | 7 billion parameters, 8 GPUs |",
        "|---|---|" + "---|" * (len(GPUS) + 1),
    ]
    for stage, by_gpus in data["bytes"].items():
        sums = {gpus: sum(kinds.values()) for gpus, kinds in by_gpus.items()}
        cells = " | ".join(f"{size:.2f}".rstrip("0").rstrip(".") for size in sums.values())
        divided = {0: "nothing", 2: "optimizer state", 3: "and gradients", 4: "and parameters"}
        lines.append(
            f"| {stage} | {divided[len(SHARDED[stage])]} | {cells} | {7 * sums['8']:.3g} GB |"
        )
    return "\n".join(lines)


# A step.

BLOCKS = 3
ROOT = "root"
DURATION = {"gather": 1.0, "forward": 1.5, "backward": 3.0, "scatter": 1.0}
"""Assumed, in units of a gather; a unit of the root computes as long as a block."""


def step() -> Data:
    """Log the gathers, computations and reduce-scatters of a step on two ranks."""
    first, second = on_ranks(2, _events)
    assert first == second
    return {"events": first}


def _events() -> list[list[str]]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    layers = [nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(BLOCKS)), nn.Linear(64, 1)]
    model = nn.Sequential(*layers)
    for block in layers[1:-1]:
        fully_shard(block)
    fully_shard(model)
    events: list[list[str]] = []

    class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(  # type: ignore[no-untyped-def]
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ):
            if op.namespace == "c10d":
                kind = "gather" if "allgather" in op.__name__ else "scatter"
                events.append([kind, "?"])
            return op(*args, **(kwargs or {}))

    def named(number: int) -> str:
        return str(number) if 0 < number <= BLOCKS else ROOT

    def note(kind: str, number: int) -> None:
        assert not isinstance(layers[number].weight, DTensor)  # it is whole
        events.append([f"{kind} {number}", named(number)])

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, x, n=number: note("forward", n))

        def hook(_: Any, x: Any, y: torch.Tensor, n: int = number) -> None:
            y.register_hook(lambda _: note("backward", n))  # type: ignore[no-untyped-call]

        layer.register_forward_hook(hook)
    with Collectives():  # type: ignore[no-untyped-call]
        torch.autograd.backward(model(torch.randn(4, 8)).square().mean())
    # Gathers are those of the root and of each block, and of the blocks in the reverse order.
    names = [str(n) for n in range(1, BLOCKS + 1)]
    gathers, scatters = iter([ROOT, *names, *names[::-1]]), iter([*names[::-1], ROOT])
    for event in events:
        if event[1] == "?":
            event[1] = next(gathers if event[0] == "gather" else scatters)
    assert not [*gathers, *scatters]
    return events


def _timed(events: list[list[str]]) -> list[tuple[str, str, float, float]]:
    """Return kind, unit, start and end; each kind of work has a stream of its own.

    A gather starts when the work logged before it has started, as the CPU runs ahead.
    """
    free = dict.fromkeys(("gather", "compute", "scatter"), 0.0)
    whole: dict[str, float] = {}
    computed = started = 0.0
    found = []
    for kind, unit in events:
        work = kind.split()[0]
        lane = work if work in free else "compute"
        begin = free[lane]
        if lane == "gather":
            begin = max(begin, started)
        elif lane == "compute":
            begin = max(begin, whole[unit])
            started = begin
        else:
            begin = max(begin, computed)
        free[lane] = end = begin + DURATION[work]
        if lane == "gather":
            whole[unit] = end
        elif lane == "compute":
            computed = end
        found.append((kind, unit, begin, end))
    return found


def draw_step(data: Data) -> Drawing:
    """Draw the lanes of the step above, and when each unit is whole below."""
    from benchmarks.figures.drawing import COLOURS, FAINT, TEXT, axes

    timed = _timed(data["events"])
    lanes = ["all-gather", "compute", "reduce-scatter"]
    rows = {"gather": 0, "forward": 1, "backward": 1, "scatter": 2}
    colours = {"gather": COLOURS[0], "forward": COLOURS[2], "backward": COLOURS[1]}
    units = [ROOT, *(str(n) for n in range(1, BLOCKS + 1))]
    with axes(7.4, 3.6) as ax:
        for kind, unit, begin, end in timed:
            work = kind.split()[0]
            row, colour = rows[work], colours.get(work, COLOURS[3])
            ax.barh(row, end - begin - 0.08, left=begin + 0.04, height=0.8, color=colour)
            label = kind.split()[1] if row == 1 else unit.replace(ROOT, "r")
            middle = (begin + end) / 2
            ax.text(middle, row, label, ha="center", va="center", color="#ffffff", fontsize=9)
        for row, unit in enumerate(units, 4):
            for begin, end in _whole(timed, unit):
                ax.barh(row, end - begin, left=begin, height=0.7, color=FAINT)
        names = ["root whole", *(f"block {unit} whole" for unit in units[1:])]
        ax.set_yticks([0, 1, 2, *range(4, 4 + len(units))], [*lanes, *names], fontsize=9)
        forward = max(end for kind, _, _, end in timed if kind.startswith("forward"))
        ax.plot([forward, forward], [-0.6, 7.6], ":", color=TEXT, linewidth=1)
        ax.text(forward - 0.15, 3, "forward", ha="right", va="center", fontsize=9, color=TEXT)
        ax.text(forward + 0.15, 3, "backward", va="center", fontsize=9, color=TEXT)
        ax.set_ylim(3.6 + len(units), -0.6)
        ax.set_xlim(0, max(end for *_, end in timed) + 0.2)
        ax.tick_params(length=0, labelbottom=False)
        ax.grid(visible=False)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        ax.set_xlabel("time →", color=TEXT)
        return cast("Drawing", ax.figure)


def _whole(timed: list[tuple[str, str, float, float]], unit: str) -> list[tuple[float, float]]:
    """Return from when to when a unit is whole: from each gather to the computation after it."""
    mine = [one for one in timed if one[1] == unit and not one[0].startswith("scatter")]
    starts = [index for index, one in enumerate(mine) if one[0] == "gather"]
    return [
        (mine[first][2], max(end for *_, end in mine[first:last]))
        for first, last in pairwise([*starts, len(mine)])
    ]


FIGURES = (
    Figure(
        name="sharded-state",
        page="fsdp",
        title="Bytes of each parameter that one of eight ranks holds, by stage of ZeRO",
        measure=held,
        draw=draw_held,
        table=table_of_held,
    ),
    Figure(
        name="fsdp-step",
        page="fsdp",
        title="A step of FSDP on a time line: gathers, computation, reduce-scatters, whole units",
        measure=step,
        draw=draw_step,
    ),
)
