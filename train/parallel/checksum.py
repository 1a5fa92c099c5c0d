"""Checksums of tensors, computed on their devices.

A checksum is a wrapping sum over 64-bit words of memory, each multiplied by an odd factor for its
position: any changed bits of one element change the checksum, and so does another order. Each large
tensor takes one pass at memory speed. Small tensors, for which a call of torch costs more than the
pass, are copied together. For small tensors in host memory, `Summands` uses CRC-32 instead, which
needs no copy: it detects any change within 32 adjacent bits, and misses one of 2**32 other changes.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..runtime.process_group import bytes_of

WORD = 8
"""Bytes of a word."""
FACTORS = 2**12
"""Words with different factors; then the factors repeat."""
ODD = 0x1E3779B97F4A7C15
SMALL_BYTES = 2**17
"""Largest tensor that is faster to copy than to sum up in a separate call."""


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor's local part. Scalar, int64; equal for equal contents."""
    return checksums([tensor], tensor.device)[0]


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the checksum of each tensor. Shape [tensors], int64, on the device."""
    flats = [_flat(_own(tensor)) for tensor in tensors]
    factors = {at: _factors(at) for at in {flat.device for flat in flats}}
    sums = [_sum(flat, factors[flat.device]).to(device) for flat in flats]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


class Summands:
    """Computes a joint checksum of the same tensors repeatedly."""

    def __init__(self, *, by_crc: bool = True) -> None:
        """Prepare nothing yet.

        Args:
            by_crc: whether to use CRC-32 for small tensors in host memory.
        """
        self._by_crc = by_crc
        self._addresses: list[int] | None = None
        self._flats: list[Tensor] = []
        # Tensors that need a copy, as their elements are not contiguous or not aligned.
        self._scattered: list[int] = []
        # Small tensors in host memory as arrays of bytes, and their CRCs; small tensors of devices;
        # checksums of large tensors.
        self._arrays: dict[int, Any] = {}
        self._crcs: list[int] = []
        self._copies: list[_Copy] = []
        self._large: dict[int, int] = {}

    def sum(self, tensors: Sequence[Tensor]) -> int:
        """Return the joint checksum of 64 bits; waits for the devices."""
        owns = [_own(tensor) for tensor in tensors]
        addresses = [own.data_ptr() for own in owns]
        if addresses != self._addresses:
            self._prepare(owns)
            self._addresses = addresses
        for number in self._scattered:
            self._flats[number] = _flat(owns[number])
            if number in self._arrays:
                self._arrays[number] = self._flats[number].numpy()
        self._crcs = [zlib.crc32(array) for array in self._arrays.values()]
        total = hash(tuple(self._crcs))  # the same in each process: hashes of numbers have no seed
        for copy in self._copies:
            torch.cat([self._flats[n] for n in copy.numbers], out=copy.used)
            total += int(copy.sum())
        if self._large:
            flats = [self._flats[number] for number in self._large]
            sums = checksums(flats, flats[0].device).tolist()
            self._large = dict(zip(self._large, sums, strict=True))
            total += sum((2 * number + 1) * one for number, one in self._large.items())
        return total % 2**64

    def each(self) -> list[int]:
        """Return a checksum of each tensor at the time of the last `sum()`."""
        found = dict(self._large) | dict(zip(self._arrays, self._crcs, strict=True))
        for copy in self._copies:
            parts = torch.split(copy.used, [self._flats[n].numel() for n in copy.numbers])
            found |= zip(copy.numbers, checksums(parts, copy.used.device).tolist(), strict=True)
        return [found[number] for number in range(len(found))]

    def _prepare(self, owns: Sequence[Tensor]) -> None:
        """Prepare for other tensors. References keep their memory, so no address is used again."""
        self._flats = [_flat(own) for own in owns]
        pairs = list(zip(owns, self._flats, strict=True))
        self._scattered = [n for n, (a, b) in enumerate(pairs) if a.data_ptr() != b.data_ptr()]
        self._large, self._arrays = {}, {}
        together: dict[torch.device, list[int]] = {}
        # With larger elements first, no element crosses a word boundary.
        for number in sorted(range(len(pairs)), key=lambda n: -owns[n].itemsize):
            flat = self._flats[number]
            if flat.numel() > SMALL_BYTES:
                self._large[number] = 0
            elif self._by_crc and flat.device.type == "cpu":
                self._arrays[number] = flat.numpy()
            else:
                together.setdefault(flat.device, []).append(number)
        self._copies = [
            _Copy(numbers, sum(self._flats[number].numel() for number in numbers), at)
            for at, numbers in together.items()
        ]


class _Copy:
    """A buffer on one device for small tensors, one after another."""

    def __init__(self, numbers: list[int], size: int, device: torch.device) -> None:
        self.numbers = numbers
        """Numbers of the tensors."""
        # Whole rows need the fewest calls.
        unit = WORD if size < WORD * FACTORS else WORD * FACTORS
        whole = torch.zeros(-(-size // unit) * unit, dtype=torch.uint8, device=device)
        self.used = whole[:size]
        """The part of the buffer with tensors."""
        self._words = whole.view(torch.int64)
        self._factors = _factors(device)

    def sum(self) -> Tensor:
        """Sum up the buffer. Scalar, int64."""
        return _sum_words(self._words, self._factors)


def _own(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else to_local() makes a copy
        return tensor.to_local()


def _flat(own: Tensor) -> Tensor:
    """Return a tensor's memory. Shape [bytes], uint8; a copy if not contiguous or aligned."""
    flat = own.detach().resolve_neg()
    if flat.is_complex():
        flat = flat.resolve_conj()
    flat = flat.reshape(-1)
    # Words must be aligned; for a single element, torch regards any stride as contiguous.
    if flat.stride() != (1,) or flat.storage_offset() * flat.itemsize % WORD:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return bytes_of(flat)


def _sum(content: Tensor, factors: Tensor) -> Tensor:
    """Sum up memory. Scalar, int64."""
    rest = content.numel() % WORD
    whole = content[: content.numel() - rest] if rest else content
    sum_ = _sum_words(whole.view(torch.int64), factors)
    if rest:
        places = torch.arange(0, 8 * rest, 8, device=content.device)
        sum_ = sum_ + ((content[-rest:].long() << places) * ODD).sum()
    return sum_


def _sum_words(words: Tensor, factors: Tensor) -> Tensor:
    """Sum up words, each multiplied by the factor for its position in the row. Scalar, int64."""
    rows = words.numel() // FACTORS
    rest = words[rows * FACTORS :] if rows else words
    sum_ = (rest * factors[: rest.numel()]).sum()
    return (
        sum_ + (words[: rows * FACTORS].view(rows, FACTORS).sum(0) * factors).sum()
        if rows
        else sum_
    )


def _factors(device: torch.device) -> Tensor:
    """Return odd factors without a pattern. Shape [FACTORS], int64."""
    places = torch.arange(1, FACTORS + 1, device=device) * ODD
    places = (places ^ places >> 29) * ODD
    return places ^ places >> 32 | 1
