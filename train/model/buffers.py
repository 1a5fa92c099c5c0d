"""Running statistics under data parallelism.

Each rank's batch normalisation has seen its own samples only, so its running statistics drift
apart from the others'; saving rank 0's, or evaluating on each rank, gives one rank's view.
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

from train.model.batchnorm import is_synchronised

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Types that torch can subtract and add, and those that backends send.
NUMBERS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.complex128, torch.complex64, torch.complex32,
)  # fmt: skip
SENT = {*NUMBERS, torch.bool} - {torch.int16}


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """Give all buffers that one can calculate with; of complex ones, a view as real pairs."""
    named = model.named_buffers()
    return {name: _real(buffer) for name, buffer in named if buffer.dtype in NUMBERS}


def never_sent(model: nn.Module) -> list[str]:
    """Name what no backend sends: DDP must not try, as all ranks have made the same."""
    named = [*model.named_buffers(), *model.named_parameters()]
    return [name for name, tensor in named if tensor.dtype not in SENT]


def moving(model: nn.Module) -> list[Tensor]:
    """List the buffers that training may move differently on each rank.

    Of complex ones, a view of their memory as pairs of real numbers.
    """
    return [
        _real(buffer)
        for module in model.modules()
        if not is_synchronised(module)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() or buffer.is_complex()
        # A buffer that is not saved, such as a table of angles, is a constant.
        if name not in module._non_persistent_buffers_set
    ]


def _real(buffer: Tensor) -> Tensor:
    if not buffer.is_complex():
        return buffer
    # The mean of conjugates is the conjugate of the mean: tensors in memory may be averaged.
    return torch.view_as_real(buffer.conj() if buffer.is_conj() else buffer)


def average(buffers: Sequence[Tensor], groups: Sequence[ProcessGroup | None] = (None,)) -> None:
    """Replace buffers by their mean over ranks, in one exchange per group.

    Args:
        buffers: what `moving()` found in the model, or in this rank's stage of it.
        groups: ranks that work on different samples, one group per data axis; None: all ranks.
    """
    if not buffers:
        return
    # In double precision: the mean of equal values is the value itself.
    flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers])
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
