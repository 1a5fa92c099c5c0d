"""A number for what a tensor holds, computed where the tensor lies.

A wrapping sum over its memory as 64-bit integers: in one pass at the speed of memory, and any
number of changed bits of one element changes it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..runtime.process_group import bytes_of

WORD = 8
"""Bytes of an integer."""
REST = 0x9E3779B1
"""Odd: what is left over after the last whole word must not be mistaken for a part of one."""


def checksum(tensor: Tensor) -> Tensor:
    """Sum up this rank's part of a tensor. Scalar, int64; equal contents give equal sums."""
    own = tensor.detach()
    if isinstance(own, DTensor):
        own = own.to_local()
    flat = own.resolve_conj().resolve_neg().reshape(-1)
    # A word begins where a word may; and of one element, torch takes any stride for contiguous.
    if flat.stride() != (1,) or flat.storage_offset() * flat.element_size() % WORD:
        flat = flat.clone(memory_format=torch.contiguous_format)
    content = bytes_of(flat)
    whole = content.numel() // WORD * WORD
    total = content[:whole].view(torch.int64).sum()
    if whole < content.numel():
        total = total + content[whole:].sum(dtype=torch.int64) * REST
    return total


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum up each of some tensors. Shape [tensors], int64, on the device."""
    sums = [checksum(tensor).to(device) for tensor in tensors]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)
