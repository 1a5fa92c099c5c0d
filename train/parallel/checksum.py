"""A number for what a tensor holds, computed where the tensor lies.

A wrapping sum over its memory, of elements or of 64-bit words: any number of changed bits of one
element changes it. Large tensors take one pass at the speed of memory each; of small ones, which
cost a call more than a pass, many are summed up at once.
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
SMALL = 2**13
"""Elements up to which a copy takes less time than calls for each tensor."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element, what it is summed up as."""


def checksum(tensor: Tensor) -> Tensor:
    """Sum up this rank's part of a tensor. Scalar, int64; equal contents give equal sums."""
    return checksums([tensor], tensor.device)[0]


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum up each of some tensors. Shape [tensors], int64, on the device."""
    together: dict[tuple[torch.device, int], list[tuple[int, Tensor]]] = {}
    places: list[int] = []
    sums: list[Tensor] = []
    for place, tensor in enumerate(tensors):
        own = tensor.detach()
        if isinstance(own, DTensor):
            own = own.to_local()
        if own.is_complex():
            own = own.resolve_conj()
        flat = own.resolve_neg().reshape(-1)
        if flat.stride() != (1,):
            # Of one element, torch takes any stride for contiguous.
            flat = flat.clone(memory_format=torch.contiguous_format)
        if len(flat) <= SMALL:
            together.setdefault((flat.device, flat.itemsize), []).append((place, flat))
        else:
            places.append(place)
            sums.append(_of_words(flat).to(device).reshape(1))
    for (at, size), group in together.items():
        places += [place for place, _ in group]
        sums.append(_of_elements([flat for _, flat in group], INTEGERS[size], at).to(device))
    if not sums:
        return torch.zeros(0, dtype=torch.int64, device=device)
    order = sorted(range(len(places)), key=places.__getitem__)
    return torch.cat(sums)[torch.tensor(order, device=device)]


def _of_words(flat: Tensor) -> Tensor:
    """Sum up a tensor without a copy. Scalar, int64."""
    # A word begins where a word may.
    if flat.storage_offset() * flat.itemsize % WORD:
        flat = flat.clone()
    content = bytes_of(flat)
    whole = content.numel() // WORD * WORD
    total = content[:whole].view(torch.int64).sum()
    if whole < content.numel():
        total = total + content[whole:].sum(dtype=torch.int64) * REST
    return total


def _of_elements(flats: list[Tensor], integer: torch.dtype, device: torch.device) -> Tensor:
    """Sum up tensors of elements of one size. Shape [tensors], int64."""
    parts = [flat.view(integer) for flat in flats]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    # The differences of running sums, which begin with nothing.
    running = torch.cat([parts[0].new_zeros(1), *parts]).cumsum(0, dtype=torch.int64)
    return running[torch.tensor(ends, device=device)].diff()
