"""Read a checkpoint back as whole tensors, with the safetensors library alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def whole(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: `model.<name>` and `optimizer.<name>/<slot>`."""
    pieces: dict[str, list[tuple[list[int], Tensor]]] = {}
    files = sorted(path.glob("*.safetensors"))
    assert files, f"no checkpoint at {path}"
    for file in files:
        with safe_open(file, framework="pt") as opened:
            offsets = json.loads(opened.metadata().get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118  # not a dictionary
                tensor = opened.get_tensor(name)
                at = offsets[name]["saved_offsets"] if offsets else [0] * tensor.dim()
                pieces.setdefault(name, []).append((at, tensor))
    return {name: _join(pieces[name]) for name in sorted(pieces)}


def _join(pieces: list[tuple[list[int], Tensor]]) -> Tensor:
    ends = [[o + s for o, s in zip(at, t.shape, strict=True)] for at, t in pieces]
    joined = torch.empty(
        [max(sizes) for sizes in zip(*ends, strict=True)], dtype=pieces[0][1].dtype
    )
    for (at, tensor), end in zip(pieces, ends, strict=True):
        joined[tuple(slice(a, b) for a, b in zip(at, end, strict=True))] = tensor
    return joined


def part(path: Path, prefix: str) -> dict[str, Tensor]:
    """Those under a prefix (`model.` or `optimizer.`), without it."""
    found = whole(path).items()
    return {n.removeprefix(prefix): t for n, t in found if n.startswith(prefix)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two checkpoints hold the same bits."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
