"""Data held as tensors, and the order in which it is drawn.

The training data is one endless stream: epoch 0's permutation, then epoch 1's, and so on. Step k
takes positions `k * global_batch` up to `(k + 1) * global_batch` of it, each rank one slice of
them. So the whole state of the order is one integer, `samples_seen`: it does not depend on the
number of ranks, no batch is ever short or padded, and within every epoch each sample is drawn
exactly once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and targets of some samples, first dimension: the sample."""

    inputs: Tensor
    """What the model is given."""
    targets: Tensor
    """What the loss compares the model's output with."""

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.inputs)

    def take(self, indices: Tensor) -> Batch:
        """Pick samples by number."""
        return Batch(inputs=self.inputs[indices], targets=self.targets[indices])

    def part(self, start: int, stop: int) -> Batch:
        """Pick a range of samples, without copying."""
        return Batch(inputs=self.inputs[start:stop], targets=self.targets[start:stop])

    def split(self, size: int) -> list[Batch]:
        """Cut into micro-batches of `size` samples; the last may be smaller."""
        return [self.part(i, min(i + size, len(self))) for i in range(0, len(self), size)]

    def to(self, device: torch.device) -> Batch:
        """Move to a device."""
        return Batch(inputs=self.inputs.to(device), targets=self.targets.to(device))

    def zeros(self) -> Batch:
        """Make a batch of the same shape and types that holds only zeros."""
        return Batch(inputs=torch.zeros_like(self.inputs), targets=torch.zeros_like(self.targets))


def seed_of(*parts: int | str) -> int:
    """Mix numbers and words into a 63-bit seed, so that neighbouring seeds share nothing."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Order the samples of one epoch: a pure function of its arguments. Shape [size], int64."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(size, generator=generator)


class Order:
    """The endless stream of sample numbers."""

    def __init__(self, *, size: int, seed: int) -> None:
        """Order a data set of `size` samples by `seed`."""
        self._size = size
        self._seed = seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def positions(self, start: int, stop: int) -> Tensor:
        """Sample numbers at positions [start, stop) of the stream, which may cross epochs."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self._size)
            if epoch != self._epoch:
                self._permutation = permutation(self._size, self._seed, epoch)
                self._epoch = epoch
            count = min(stop - start, self._size - offset)
            parts.append(self._permutation[offset : offset + count])
            start += count
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def share(self, samples_seen: int, global_batch: int, *, shard: int, shards: int) -> Tensor:
        """Sample numbers of one rank's slice of the next global batch."""
        start, stop = share_of(global_batch, shard=shard, shards=shards)
        return self.positions(samples_seen + start, samples_seen + stop)


def share_of(count: int, *, shard: int, shards: int) -> tuple[int, int]:
    """Range of `count` items that belongs to a shard: contiguous, unpadded, sizes differ by one."""
    return count * shard // shards, count * (shard + 1) // shards
