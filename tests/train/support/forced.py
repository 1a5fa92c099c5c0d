"""Importing this cuts the model of a lone rank too: all that sharded ranks do, without a peer.

So it can run, and be compared, on a machine with one GPU, through NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from train.layers import CausalAttention
from train.parallel import cp, fsdp, hybrid, tp
from train.parallel.base import Parts
from train.parallel.pipeline import split

_unforced = hybrid.parallelise


def _parallelise(
    model: nn.Module, pieces: Sequence[str], parts: Parts, mesh: DeviceMesh
) -> tuple[cp.SequenceSlice, fsdp.Units | None]:
    config, group = parts.config, mesh.get_group("fsdp")
    if config.strategy in ("tp", "hybrid"):
        tp.apply(model, parts.task, mesh["tp"], config)
    if config.strategy == "cp":
        ulysses = cp.HeadsForTime(group, parts.layout)
        for module in model.modules():
            if isinstance(module, CausalAttention):
                swaps = config.cp_method == "ulysses"
                module.context = ulysses if swaps else cp.GatheredKeys(group, 0)
    (sequence, units), name = _unforced(model, pieces, parts, mesh), parts.task.name
    if config.strategy == "hsdp":
        units = fsdp.apply(model, pieces, mesh["dp_replicate", "fsdp"], config, task=name)
    elif config.strategy in ("fsdp", "cp", "hybrid"):
        units = fsdp.apply(model, pieces, mesh["fsdp"], config, task=name)
    return sequence, units


hybrid.parallelise = _parallelise
# A pipeline of one rank is refused.
split.check = lambda config, layout: None
