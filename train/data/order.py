"""Batches, the order in which samples are drawn, and the seeds of random numbers.

The training data is one endless stream: epoch 0's permutation, then epoch 1's, and so on. Step k
takes positions `k * global_batch` up to `(k + 1) * global_batch` of it; each rank takes a slice
of these. So the whole state of the order is one integer, `samples_seen`: it does not depend on the
number of ranks, no batch is ever short or padded, and within every epoch each sample is drawn
exactly once. With weights, an epoch consists of as many draws with replacement, the same for all
ranks; each rank takes its slice.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..model import trees
from ..model.trees import Tree

MOST_WEIGHTS = 2**24
"""How many samples torch.multinomial can choose from."""
_WORD = (1 << 64) - 1


class Chance(NamedTuple):
    """The source of the random numbers of samples that are drawn together."""

    seed: int
    """Seed of the run."""
    place: int
    """Samples that the whole run has drawn before the first of these."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and targets of some samples, first dimension: the sample."""

    inputs: Tree
    """The model's only argument."""
    targets: Tree
    """Targets for the loss, to compare with the model's output."""

    def __len__(self) -> int:
        return trees.sample_count(self.inputs)

    def take(self, indices: Tensor, chance: Chance | None = None, /) -> "Batch":
        """Pick samples by number; samples in memory need no `chance`."""
        first = trees.tensors_of(self.inputs)[0]
        if first.is_cuda and not indices.is_cuda:
            # A copy from unpinned memory would wait for all queued work of the GPU.
            indices = indices.pin_memory().to(first.device, non_blocking=True)
        # `index_select` takes half the time of `tensor[indices]`.
        return self.mapped(lambda tensor: tensor.index_select(0, indices))

    def part(self, start: int, stop: int) -> "Batch":
        """Pick a range of samples, without copying."""
        return self.mapped(lambda tensor: tensor[start:stop])

    def split_into(self, count: int) -> "list[Batch]":
        """Cut into `count` micro-batches of sizes that differ by at most one.

        A rank may have fewer samples than the passes that all ranks must make: its first
        micro-batches are then empty. The summed loss of an empty batch is 0, and so are its
        gradients.
        """
        if count == 1:
            return [self]
        size = len(self)
        return [self.part(*share_of(size, shard=i, shards=count)) for i in range(count)]

    def read(
        self, draws: Iterable[Tensor], chances: Iterable[Chance] | None = None, /
    ) -> "Iterator[Batch]":
        """Yield one batch per draw of sample numbers; in memory, there is nothing to read ahead."""
        return (self.take(numbers) for numbers in draws)

    def to(self, device: torch.device) -> "Batch":
        """Move to a device."""
        return self.mapped(lambda tensor: tensor.to(device))

    def zeros(self) -> "Batch":
        """Make a batch of the same shape and types that holds only zeros."""
        return self.mapped(torch.zeros_like)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to each tensor."""
        return Batch(
            inputs=trees.mapped(function, self.inputs), targets=trees.mapped(function, self.targets)
        )


class Samples(Protocol):
    """A map-style `torch.utils.data.Dataset`: (input, target) by number."""

    def __len__(self) -> int:
        """Count the samples."""

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Return one sample: tensors, arrays or numbers, of the same shape for each sample.

        Dicts, lists and tuples of them are allowed, with the same structure for each sample.
        """


class Source(Protocol):
    """Samples in batches; a `Batch` of all samples is the fastest source."""

    def __len__(self) -> int:
        """Count the samples."""

    def take(self, indices: Tensor, chance: Chance | None = None, /) -> Batch:
        """Pick samples by number.

        Random samples are a function of `chance`; without it, of their numbers alone.
        """

    def read(
        self, draws: Iterable[Tensor], chances: Iterable[Chance] | None = None, /
    ) -> Iterator[Batch]:
        """Yield one batch per draw of sample numbers, and chance; some are prepared ahead."""

    def to(self, device: torch.device, /) -> "Source":
        """Return the same samples in batches on a device."""


def targets_of(samples: Batch | Samples) -> Tensor:
    """Return all targets, from `.targets` if it exists, else by reading every sample.

    Raises:
        UsageError: the targets are not one number per sample.
    """
    if hasattr(samples, "targets"):
        targets = samples.targets
    else:
        targets = [samples[number][1] for number in range(len(samples))]
    with suppress(TypeError, ValueError, RuntimeError):
        return torch.as_tensor(targets)
    raise UsageError(
        "the targets of the training data are not one class number per sample: define "
        "weights() in the task, or leave out --sampling balanced"
    )


def seed_of(*parts: int | str) -> int:
    """Mix numbers and words into a 63-bit seed, so that neighbouring seeds share nothing."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def mixed(seed: int, number: int) -> int:
    """Make a 64-bit seed of a seed and a number, so that neighbouring numbers share nothing.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), which is a bijection: no two numbers give the same seed.
    """
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return word ^ word >> 31


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators for a sample, a model or a loss with 64 bits, in 8 µs.

    These are torch's generators of the CPU and of one device, and those of `random` and numpy.

    `torch.manual_seed()` would also store the seed for unused backends, and format the call stack
    for each: 0.1 ms per step.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # Use the upper bits: torch uses the lower 32, and numpy would make the same numbers of them.
    np.random.seed(seed >> 32)
    if device.type == "cuda":
        # Seed all GPUs: `manual` and `dataparallel` use several.
        torch.cuda.manual_seed_all(seed)


def permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Order the samples of one epoch: a pure function of its arguments. Shape [size], int64."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(size, generator=generator)


def weighted_draws(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """Draw as many samples as there are weights, with replacement. Shape [samples], int64.

    A pure function of its arguments, with one draw for all ranks: a generator per rank would either
    draw the same samples everywhere or add state to the checkpoint.
    """
    generator = torch.Generator().manual_seed(seed_of("draws", seed, epoch))
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)


class SampleOrder:
    """The endless stream of sample numbers."""

    def __init__(self, *, size: int, seed: int, weights: Tensor | None = None) -> None:
        """Order a data set of `size` samples by `seed`.

        Raises:
            UsageError: the data set is empty, or the weights are not one probability per sample.
        """
        if size < 1:
            raise UsageError("the training data is empty: there is nothing to draw")
        self._size = size
        self.seed = seed
        if weights is not None:
            if weights.shape != (size,):
                shape = list(weights.shape)
                raise UsageError(f"{shape} weights for {size} samples: give one for each")
            if size > MOST_WEIGHTS:
                raise UsageError(
                    f"weighted sampling chooses from at most {MOST_WEIGHTS} samples, not {size}"
                )
            weights = weights.detach().cpu().double()
            if not (weights.isfinite().all() and (weights >= 0).all() and weights.sum() > 0):
                raise UsageError(
                    "the weights of the samples must be finite, 0 or more, and not all 0"
                )
        self._weights = weights
        self._epoch = -1
        self._numbers = torch.empty(0, dtype=torch.int64)

    def positions(self, start: int, stop: int) -> Tensor:
        """Sample numbers at positions [start, stop) of the stream, which may cross epochs."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self._size)
            if epoch != self._epoch:
                self._numbers = (
                    permutation(self._size, self.seed, epoch)
                    if self._weights is None
                    else weighted_draws(self._weights, self.seed, epoch)
                )
                self._epoch = epoch
            count = min(stop - start, self._size - offset)
            parts.append(self._numbers[offset : offset + count])
            start += count
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def share(self, samples_seen: int, global_batch: int, *, shard: int, shards: int) -> Tensor:
        """Sample numbers of one rank's slice of the next global batch."""
        start, stop = share_of(global_batch, shard=shard, shards=shards)
        return self.positions(samples_seen + start, samples_seen + stop)


def share_of(count: int, *, shard: int, shards: int) -> tuple[int, int]:
    """Range of `count` items that belongs to a shard: contiguous, unpadded, sizes differ by one."""
    return count * shard // shards, count * (shard + 1) // shards
