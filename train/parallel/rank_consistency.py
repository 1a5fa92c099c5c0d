"""Compares what all ranks must have in common: initial weights, data, counters in buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.data.order import Batch, Source
from train.errors import UsageError
from train.model.trees import tensors_of
from train.runtime.process_group import RankGroup

if TYPE_CHECKING:
    from train.parallel.base import Strategy

# Elements of a tensor that are compared: random numbers differ in each of them.
LOOKED_AT = 32


def fingerprint(tensor: Tensor) -> str:
    """Give a text that two tensors have in common if they are likely to hold the same.

    Of a tensor on the device `meta`, which holds nothing, only shape and type count.
    """
    digest = hashlib.sha256(f"{list(tensor.shape)} {tensor.dtype}".encode())
    # What torch packs into types of its own (quantised, sparse) is left alone.
    with suppress(RuntimeError):
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            # As bytes: not every type can be indexed.
            rows = flat.view(torch.uint8).view(len(flat), -1)
            count = min(LOOKED_AT, len(rows))
            numbers = torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long()
            digest.update(rows[numbers.to(rows.device)].cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def differing(mine: Mapping[str, str], group: RankGroup) -> list[str]:
    """Name what this rank and rank 0 do not have in common; all ranks call this."""
    joint = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len({*group.gather(joint)}) == 1:
        return []
    first = group.broadcast(dict(mine))
    names = [n for n in sorted({*mine, *first}) if mine.get(n) != first.get(n)]
    return sorted({name for rank in group.gather(names) for name in rank})


def check_data(train: Source, test: Source, group: RankGroup, *, task: str) -> None:
    """Make sure that all ranks have the same data: each rank takes slices of all of it.

    Only data in memory are compared: a Dataset may draw its samples anew each time.

    Raises:
        UsageError: on all ranks; the data differ.
    """
    mine = {"the number of test samples": str(len(test))}
    for name, data in (("training", train), ("test", test)):
        if isinstance(data, Batch):
            for place, tensor in enumerate(tensors_of((data.inputs, data.targets))):
                mine[f"the {name} data (tensor {place})"] = fingerprint(tensor)
    if names := differing(mine, group):
        raise UsageError(
            f"task {task!r}: the ranks were given different data: {names[0]}; every rank must be "
            "given all of it, and random data come from a generator with a fixed seed"
        )


def check_counters(strategy: Strategy, group: RankGroup, *, task: str) -> None:
    """Make sure that buffers of whole numbers have moved alike on all ranks.

    Running statistics are floats, and the ranks take their mean. A buffer that counts a rank's own
    samples has no mean, and a checkpoint would hold one rank's count only.

    Raises:
        UsageError: on all ranks; names the buffer.
    """
    parameters = {name for name, _ in strategy.named_parameters()}
    mine = {}
    for name, tensor in strategy.model_state().items():
        if name not in parameters and not (tensor.is_floating_point() or tensor.is_complex()):
            # Tensor parallelism gives each rank a whole copy of a buffer.
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            mine[name] = f"{fingerprint(held)} {int(held.sum())}"
    seen: dict[str, str] = {}
    for rank in group.gather(mine):
        for name, value in rank.items():
            if seen.setdefault(name, value) != value:
                raise UsageError(
                    f"task {task!r}: buffer {name!r} holds whole numbers that differ from rank to "
                    "rank, each of its own samples; nothing says how they belong together: make it "
                    "a buffer of floats, of which ranks take the mean after each step, or one that "
                    "is not saved (persistent=False), or count in one process"
                )
