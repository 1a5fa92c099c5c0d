"""A copy of the tensors as they are now, so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from train.checkpoints.safetensors_file import TensorPart


class Staging:
    """Buffers in the host's memory, used again for each checkpoint.

    New memory must first be got from the system page by page, which takes longer than the copy. For
    a GPU it is pinned, so that the copy goes at the speed of the bus.
    """

    def __init__(self) -> None:
        """Nothing is allocated before the first copy."""
        self._buffers: dict[TensorPart, Tensor] = {}

    def copy(self, parts: Sequence[TensorPart], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Copy this rank's part of each tensor; valid until the next call."""
        sources = [_local(tensors[part.name]) for part in parts]
        if self._buffers.keys() != set(parts):
            self._buffers = {}
            self._buffers = {p: _buffer(s) for p, s in zip(parts, sources, strict=True)}
        buffers = [self._buffers[part] for part in parts]
        if buffers:
            torch._foreach_copy_(buffers, sources, non_blocking=True)
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return buffers


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _buffer(source: Tensor) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
