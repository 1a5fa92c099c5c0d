"""Findings as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from train.dryrun.result import Findings
from train.dryrun.traffic import crosses_nodes
from train.runtime.devices import written

# Figures that are not measured on the strategy's own code, or differ on real devices.
NOTES = (
    "Counted while the real strategy made a step with tensors that have no memory, on one rank of "
    "each stage. By formula: sent (rings), waiting (equal stages, a backward pass twice a forward "
    "pass).",
    "Counted for CUDA GPUs, whatever this machine has: where autocast keeps float32, fused AdamW, "
    "attention without a matrix. Work: matrix products and attention, causal as if it were not: a "
    "full square, of which kernels leave out up to half.",
    "Not counted: what kernels use inside (cuBLAS, attention, NCCL), fragmentation, and the data "
    "set; allow some GiB on a GPU. "
    "Communication: what FSDP gathers, gradients until it shares them out, buffers of exchanges.",
)


def lines(findings: Findings) -> Iterator[str]:
    """Write findings."""
    yield from _plan(findings)
    yield ""
    yield from _memory(findings)
    yield ""
    yield from _traffic(findings)
    yield ""
    yield from _work(findings)
    yield ""
    yield from _verdict(findings)
    yield ""
    yield from NOTES


def _plan(findings: Findings) -> Iterator[str]:
    layout, size = findings.layout, findings.node_size
    nodes = "1 node" if findings.nodes == 1 else f"{findings.nodes} nodes of {size}"
    yield (
        f"{findings.task}: {findings.parameters:,} parameters, {findings.strategy} on "
        f"{_counted(layout.world_size, 'rank')} ({nodes})"
    )
    rows = [("axis", "ranks", "with rank 0", "")]
    for axis, ranks in layout.sizes().items():
        if ranks > 1:
            near = findings.neighbours(axis)
            where = "across nodes" if crosses_nodes(near, size) else "within a node"
            rows.append((axis, str(ranks), _few(near), where))
    if len(rows) > 1:
        yield from _table(rows)
    one = findings.ranks[0]
    yield (
        f"global batch: {findings.global_batch} samples = {_counted(layout.shards, 'shard')} x "
        f"{_counted(one.micro_batches, 'micro-batch')} of up to {one.micro_batch}; evaluation: up "
        f"to {one.evaluated} per rank at a time"
    )


def _memory(findings: Findings) -> Iterator[str]:
    kinds = list(findings.ranks[0].memory)
    rows = [("memory per rank at its peak", *kinds, "total", "")]
    rows += [
        (
            _who(findings, number),
            *(written(rank.memory[kind]) for kind in kinds),
            written(sum(rank.memory.values())),
            f"in {rank.peak}",
        )
        for number, rank in enumerate(findings.ranks)
    ]
    yield from _table(rows)
    if host := findings.ranks[0].host_memory:
        parts = ", ".join(f"{written(size)} {kind}" for kind, size in host.items())
        yield f"and in the host's memory: {parts}"
    if chosen := str(findings.ranks[0].gradient_sync or ""):
        yield chosen


def _traffic(findings: Findings) -> Iterator[str]:
    rows = [("on the wire per step", "along", "collective", "calls", "bytes", "sent by a rank", "")]
    for number, rank in enumerate(findings.ranks):
        for flow in findings.flows(rank):
            rows.append(
                (
                    _who(findings, number),
                    f"{flow.axes} ({flow.ranks})",
                    flow.kind,
                    f"{flow.calls:g}",
                    written(flow.payload),
                    written(flow.sent),
                    "crosses nodes" if flow.crosses_nodes else "within a node",
                )
            )
    yield from _table(rows) if len(rows) > 1 else ["on the wire: nothing"]


def _work(findings: Findings) -> Iterator[str]:
    for number, rank in enumerate(findings.ranks):
        yield f"work per step: {_who(findings, number)} {_flops(rank.flops)}"
    if findings.bubbles:
        chosen = findings.schedule or ""
        others = ", ".join(
            f"{name} {share:.1%}" for name, share in findings.bubbles.items() if name != chosen
        )
        yield (
            f"waiting: ranks of the pipeline are idle {findings.bubbles[chosen]:.1%} of the time "
            f"with {chosen}; {others}"
        )


def _verdict(findings: Findings) -> Iterator[str]:
    if findings.limit is None:
        yield "fits? say what a device has: --device-memory 80GiB"
    elif not findings.misfits:
        most = max(sum(rank.memory.values()) for rank in findings.ranks)
        yield f"fits: {written(most)} of {written(findings.limit)} ({most / findings.limit:.0%})"
    else:
        yield from (f"does not fit: {misfit}" for misfit in findings.misfits)


def _who(findings: Findings, number: int) -> str:
    rank = findings.ranks[number].rank
    return f"rank {rank}" if findings.layout.pp == 1 else f"pp {number} (rank {rank})"


def _counted(count: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{count} {what}{plural * (count != 1)}"


def _few(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[:4]))} … {ranks[-1]}"


def _flops(count: float) -> str:
    for unit, factor in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count / 1e6:,.2f} MFLOP"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Align columns: the first to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if _is_figure(rows[-1][column]) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _is_figure(cell: str) -> bool:
    """Say whether a column is of figures, by its last cell: `12`, `1.5 GiB`, but not `0 4 8`."""
    first, _, rest = cell.replace(",", "").partition(" ")
    return first.replace(".", "").isdigit() and not rest[:1].isdigit() and "…" not in rest
