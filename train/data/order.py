"""Batches, and the order in which samples are drawn.

The training data is one endless stream: epoch 0's permutation, then epoch 1's, and so on. Step k
takes positions `k * global_batch` up to `(k + 1) * global_batch` of it, each rank one slice of
them. So the whole state of the order is one integer, `samples_seen`: it does not depend on the
number of ranks, no batch is ever short or padded, and within every epoch each sample is drawn
exactly once. With weights, an epoch is as many draws with replacement instead: made once for all
ranks; each takes its slice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from train.errors import UsageError
from train.model import trees
from train.model.trees import Tree

# What torch.multinomial can choose from.
MOST_WEIGHTS = 2**24


class Chance(NamedTuple):
    """All that the random numbers of samples that are drawn together depend on."""

    seed: int
    """The run's."""
    place: int
    """How many samples of the whole run were drawn before the first of them."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and targets of some samples, first dimension: the sample."""

    inputs: Tree
    """What the model is given, as its one argument."""
    targets: Tree
    """What the loss compares the model's output with."""

    def __len__(self) -> int:
        """Count the samples."""
        return trees.sample_count(self.inputs)

    def take(self, indices: Tensor, chance: Chance | None = None, /) -> Batch:
        """Pick samples by number; in memory, nothing is left to chance."""
        inputs, targets = self.inputs, self.targets
        first = inputs if isinstance(inputs, Tensor) else trees.tensors_of(inputs)[0]
        if first.is_cuda and not indices.is_cuda:
            # From other memory, a copy would wait until the GPU has finished all queued work.
            indices = indices.pin_memory().to(first.device, non_blocking=True)
        # Not `inputs[indices]`: the same in half the time.
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return Batch(
                inputs=inputs.index_select(0, indices), targets=targets.index_select(0, indices)
            )
        return self.mapped(lambda tensor: tensor.index_select(0, indices))

    def part(self, start: int, stop: int) -> Batch:
        """Pick a range of samples, without copying."""
        return self.mapped(lambda tensor: tensor[start:stop])

    def split_into(self, count: int) -> list[Batch]:
        """Cut into `count` micro-batches whose sizes differ by at most one.

        Ranks that must make the same number of passes may have fewer samples than that: the first
        parts are then empty. The summed loss of an empty batch is 0, and so are its gradients.
        """
        if count == 1:
            return [self]
        size = len(self)
        return [self.part(*share_of(size, shard=i, shards=count)) for i in range(count)]

    def read(
        self, draws: Iterable[Tensor], chances: Iterable[Chance] | None = None, /
    ) -> Iterator[Batch]:
        """Give one batch per draw of sample numbers; in memory, there is nothing to read ahead."""
        return (self.take(numbers) for numbers in draws)

    def to(self, device: torch.device) -> Batch:
        """Move to a device."""
        return self.mapped(lambda tensor: tensor.to(device))

    def zeros(self) -> Batch:
        """Make a batch of the same shape and types that holds only zeros."""
        return self.mapped(torch.zeros_like)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Make a batch of what a function gives for each tensor."""
        return Batch(
            inputs=trees.mapped(function, self.inputs), targets=trees.mapped(function, self.targets)
        )


class Samples(Protocol):
    """What a map-style `torch.utils.data.Dataset` is: (input, target) by number."""

    def __len__(self) -> int:
        """Count the samples."""

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Give one sample: tensors, arrays or numbers, each sample's of the same shape.

        Or dicts, lists and tuples of them, of the same form for each sample.
        """


class Source(Protocol):
    """Samples in batches. A `Batch` of all of them is one, the fastest."""

    def __len__(self) -> int:
        """Count the samples."""

    def take(self, indices: Tensor, chance: Chance | None = None, /) -> Batch:
        """Pick samples by number.

        Where samples are random, they are a function of `chance`, or of their numbers alone.
        """

    def read(
        self, draws: Iterable[Tensor], chances: Iterable[Chance] | None = None, /
    ) -> Iterator[Batch]:
        """Give one batch per draw of sample numbers, and chance; some are prepared ahead."""

    def to(self, device: torch.device, /) -> Source:
        """Give batches on a device."""


def source_of(samples: Batch | Samples, *, workers: int = 0, task: str = "") -> Source:
    """Make what `Task.train()` gave readable in batches; `workers` processes read ahead.

    Args:
        samples: what the task gave.
        workers: how many processes; none: this one reads.
        task: what messages call it.

    Raises:
        UsageError: it is neither a `Batch` nor a data set with a length, or a leaf of the batch is
            no tensor, or has another number of samples.
    """
    if isinstance(samples, Batch):
        trees.check(samples.inputs, samples.targets, task=task)
        return samples
    # Only here, as few need it.
    from train.data.loader import DatasetReader

    return DatasetReader(samples, workers=workers, task=task)


def resident(samples: Source, device: torch.device, *, task: str) -> Source:
    """Have samples given on a device: those of a `Batch` are all brought there, once.

    Raises:
        UsageError: they are larger than its free memory.
    """
    if isinstance(samples, Batch) and device.type == "cuda":
        tensors = (*trees.tensors_of(samples.inputs), *trees.tensors_of(samples.targets))
        size, (free, _) = sum(t.nbytes for t in tensors), torch.cuda.mem_get_info(device)
        if size > free:
            raise UsageError(
                f"task {task!r}: the samples in its Batch have {size / 2**30:.1f} GiB, of which "
                f"each GPU gets a copy, but one has {free / 2**30:.1f} GiB free; give a Dataset, "
                "of which a batch at a time is read (--workers reads ahead)"
            )
    return samples.to(device)


def targets_of(samples: Batch | Samples) -> Tensor:
    """Give all targets, from `.targets` where there is one, else by reading every sample.

    Raises:
        UsageError: they are not one number per sample.
    """
    if hasattr(samples, "targets"):
        targets = samples.targets
    else:
        targets = [samples[number][1] for number in range(len(samples))]
    with suppress(TypeError, ValueError, RuntimeError):
        return torch.as_tensor(targets)
    raise UsageError(
        "the targets of the training data are not one class number per sample: give the task a "
        "weights() of its own, or leave out --sampling balanced"
    )


def seed_of(*parts: int | str) -> int:
    """Mix numbers and words into a 63-bit seed, so that neighbouring seeds share nothing."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Order the samples of one epoch: a pure function of its arguments. Shape [size], int64."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    return torch.randperm(size, generator=generator)


def weighted_draws(weights: Tensor, seed: int, epoch: int) -> Tensor:
    """Draw as many samples as there are weights, with replacement. Shape [samples], int64.

    A pure function of its arguments, and one draw for all ranks: a generator per rank would either
    draw the same samples everywhere or need a state of its own.
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
        self._weights = None if weights is None else _checked(weights, size)
        self._epoch = -1
        self._numbers = torch.empty(0, dtype=torch.int64)

    def positions(self, start: int, stop: int) -> Tensor:
        """Sample numbers at positions [start, stop) of the stream, which may cross epochs."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self._size)
            if epoch != self._epoch:
                self._numbers = self._draw(epoch)
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

    def _draw(self, epoch: int) -> Tensor:
        if self._weights is None:
            return permutation(self._size, self.seed, epoch)
        return weighted_draws(self._weights, self.seed, epoch)


def share_of(count: int, *, shard: int, shards: int) -> tuple[int, int]:
    """Range of `count` items that belongs to a shard: contiguous, unpadded, sizes differ by one."""
    return count * shard // shards, count * (shard + 1) // shards


def _checked(weights: Tensor, size: int) -> Tensor:
    """Bring weights to the CPU, in double precision; refuse what multinomial would trip over."""
    if weights.shape != (size,):
        raise UsageError(f"{list(weights.shape)} weights for {size} samples: give one for each")
    if size > MOST_WEIGHTS:
        raise UsageError(
            f"weighted sampling chooses from at most {MOST_WEIGHTS} samples, not {size}"
        )
    weights = weights.detach().cpu().double()
    if not (weights.isfinite().all() and (weights >= 0).all() and weights.sum() > 0):
        raise UsageError("the weights of the samples must be finite, 0 or more, and not all 0")
    return weights
