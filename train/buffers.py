"""Running statistics under data parallelism.

Each rank's batch normalisation has seen its own samples only, so its running statistics drift
apart from the others'; whoever saves rank 0's, or evaluates on each rank, gets one rank's view.
Averaging after each step gives all ranks those of the whole batch. That is no approximation: a
running statistic is r <- (1 - m) r + m x with the same r and m on every rank, so the mean of the
results is the result for the mean of the x. (The mean of the ranks' variances is what they
normalise by; that of the whole batch in one piece is what `--sync-batch-norm` computes.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.batchnorm import is_synchronised

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def moving(model: nn.Module) -> list[Tensor]:
    """List the buffers that training may move differently on each rank."""
    return [
        buffer
        for module in model.modules()
        if not is_synchronised(module)
        for name, buffer in module.named_buffers(recurse=False)
        # What is not saved, such as a table of angles, is a constant.
        if buffer.is_floating_point() and name not in module._non_persistent_buffers_set
    ]


def average(buffers: Sequence[Tensor], groups: Sequence[ProcessGroup | None] = (None,)) -> None:
    """Replace buffers by their mean over ranks, in one exchange per group.

    Args:
        buffers: what `moving()` found in the model, or in this rank's stage of it.
        groups: ranks that work on different samples, one group per data axis; None: all ranks.
    """
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    for group in groups:
        # A sum, then a division: gloo has no mean. Every rank gets the same bits.
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
    means = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean.view_as(buffer))


@contextmanager
def standing_still(model: nn.Module) -> Iterator[None]:
    """Let the model move copies of its buffers meanwhile, which are then forgotten.

    For a forward pass that is made a second time: running statistics must move once.
    """
    buffers = [module._buffers for module in model.modules()]
    kept = [dict(own) for own in buffers]
    try:
        for own in buffers:
            own.update({name: b if b is None else b.clone() for name, b in own.items()})
        yield
    finally:
        for own, old in zip(buffers, kept, strict=True):
            own.update(old)
