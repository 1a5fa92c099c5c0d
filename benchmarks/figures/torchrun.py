"""What torchrun starts on two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures.figure import Data, Figure
from tests.support.ports import free_port

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

NODES, RANKS = 2, 4
MEANING = {
    "RANK": "the number of the process in the whole run",
    "LOCAL_RANK": "its number on its node: the number of its GPU",
    "WORLD_SIZE": "how many ranks the run has",
    "LOCAL_WORLD_SIZE": "how many of them are on this node",
    "GROUP_RANK": "the number of the node",
    "TORCHELASTIC_RESTART_COUNT": (
        "how often this agent has restarted its ranks after one of them failed; failures on other "
        "nodes do not count"
    ),
}
"""Variables that are numbers, and what they say."""

SCRIPT = """
import json, os, pathlib, sys
there = pathlib.Path(sys.argv[1], os.environ["RANK"])
there.write_text(json.dumps({name: os.environ[name] for name in sys.argv[2:]}))
"""


def measure() -> Data:
    """Return the variables of each rank, in the order of the ranks, as two torchruns set them."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={NODES}", f"--nproc-per-node={RANKS}", "--rdzv-id=figure"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"),
            *(str(script), folder, *MEANING, "MASTER_ADDR", "MASTER_PORT"),
        ]
        agents = [subprocess.Popen(command) for _ in range(NODES)]
        if any([agent.wait() for agent in agents]):
            raise RuntimeError("a torchrun has failed")
        ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(NODES * RANKS)]
    addresses = {(rank.pop("MASTER_ADDR"), rank.pop("MASTER_PORT")) for rank in ranks}
    return {
        "ranks": [{name: int(value) for name, value in rank.items()} for rank in ranks],
        "addresses": len(addresses),
    }


def by_node(data: Data) -> list[list[dict[str, int]]]:
    """Return the ranks of each node."""
    nodes: list[list[dict[str, int]]] = [[] for _ in range(NODES)]
    for rank in data["ranks"]:
        nodes[rank["GROUP_RANK"]].append(rank)
    return nodes


def table(data: Data) -> str:
    """Return each variable with its values."""
    nodes = by_node(data)
    head = " | ".join(f"ranks of node {number}" for number in range(NODES))
    lines = [f"| variable | what it says | {head} |", "|---|---|" + "---|" * NODES]
    for name, meaning in MEANING.items():
        each = [[str(rank[name]) for rank in ranks] for ranks in nodes]
        values = [", ".join(v if len(set(v)) > 1 else v[:1]) for v in each]
        lines.append(f"| `{name}` | {meaning} | {' | '.join(values)} |")
    assert data["addresses"] == 1
    where = "`MASTER_ADDR`, `MASTER_PORT` | where the ranks meet"
    lines.append(f"| {where} | " + " | ".join(["a host, a free port", "the same"]))
    return "\n".join([*lines[:-1], f"{lines[-1]} |"])


def draw(data: Data) -> Drawing:
    """Draw the nodes, their agents and their ranks."""
    from benchmarks.figures.drawing import COLOURS, TEXT, axes

    with axes(7.0, 3.9) as ax:
        ax.set(xlim=(0, 17), ylim=(0, 9.4))
        ax.axis("off")
        _box(ax, 5.0, 8.2, 7.0, 1.0, "rendezvous: --rdzv-endpoint", COLOURS[1])
        for number, ranks in enumerate(by_node(data)):
            left = 0.2 + 8.6 * number
            _box(ax, left, 0.2, 8.0, 6.9, "", TEXT)
            ax.text(left + 0.3, 6.35, f"node {number}", weight="bold", va="center")
            _box(ax, left + 2.6, 4.9, 4.9, 1.0, "torchrun (agent)", COLOURS[1])
            ax.annotate(
                "",
                (7.0 + 3.0 * number, 8.2),
                (left + 5.0, 5.9),
                arrowprops={"arrowstyle": "<->", "color": COLOURS[1]},
            )
            for place, rank in enumerate(ranks):
                x = left + 0.25 + 1.93 * place
                label = f"RANK\n{rank['RANK']}\n\nLOCAL_\nRANK\n{rank['LOCAL_RANK']}"
                _box(ax, x, 0.5, 1.75, 3.4, label, COLOURS[0])
                ax.annotate(
                    "",
                    (x + 0.87, 3.9),
                    (left + 5.0, 4.9),
                    arrowprops={"arrowstyle": "->", "color": TEXT},
                )
        return ax.figure  # type: ignore[return-value]


def _box(ax: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    from benchmarks.figures.drawing import GROUND

    shape = FancyBboxPatch(
        (x, y), width, height, "round,pad=0,rounding_size=0.2", ec=colour, fc=GROUND, lw=1.5
    )
    ax.add_patch(shape)
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center")


FIGURES = (
    Figure(
        name="first-script-ranks",
        page="torchrun",
        title="What torchrun starts on two nodes with four ranks each",
        measure=measure,
        draw=draw,
        table=table,
    ),
)
