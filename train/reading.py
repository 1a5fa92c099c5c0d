"""Samples of a Dataset, read ahead of their use by processes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from train.data import Batch, Order, Samples, Source
from train.errors import UsageError


class Reader:
    """Batches of a map-style Dataset."""

    def __init__(
        self, samples: Samples, *, workers: int = 0, device: torch.device | None = None
    ) -> None:
        """Read by `workers` processes, or in this one; for a device (default: the CPU).

        Raises:
            UsageError: this is no data set with numbered samples.
        """
        if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
            raise UsageError(
                f"the task's data is of type {type(samples).__name__}, which has no numbered "
                "samples: give a Batch, or a Dataset with __len__() and __getitem__()"
            )
        self._samples, self._workers = samples, workers
        self._device = device or torch.device("cpu")

    def __len__(self) -> int:
        """Count the samples."""
        return len(self._samples)

    def to(self, device: torch.device) -> Reader:
        """Give batches on a device."""
        return Reader(self._samples, workers=self._workers, device=device)

    def take(self, indices: Tensor) -> Batch:
        """Pick samples by number, in this process."""
        return self._batch(*self._collate([self._samples[number] for number in indices.tolist()]))

    def read(self, draws: Iterable[Tensor]) -> Iterator[Batch]:
        """Give one batch per draw; each worker prepares up to two of them ahead.

        Workers are told what to read, so nothing depends on how many they are or how fast.
        """
        if not self._workers:
            yield from map(self.take, draws)
            return
        loader: DataLoader[Any] = DataLoader(
            self._samples,  # type: ignore[arg-type]  # whatever is map-style will do
            batch_sampler=_Lists(draws),
            num_workers=self._workers,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            # A forked process has the data set as it is; any other would have to import the module
            # of a task of your own, which lies on no path.
            multiprocessing_context="fork",
            # Else it would draw from the global generator, which belongs to the model: the first
            # step after each start would differ.
            generator=torch.Generator(),
        )
        for inputs, targets in loader:
            yield self._batch(inputs, targets)

    def _batch(self, inputs: Tensor, targets: Tensor) -> Batch:
        return Batch(
            inputs=inputs.to(self._device, non_blocking=True),
            targets=targets.to(self._device, non_blocking=True),
        )

    def _collate(self, samples: list[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
        if samples:
            inputs, targets = default_collate(samples)
            return inputs, targets
        # A share may be empty, and still has the shape and type of the others.
        inputs, targets = default_collate([self._samples[0]])
        return inputs[:0], targets[:0]


class _Lists:
    """Hands draws over as the lists of numbers that a DataLoader expects."""

    def __init__(self, draws: Iterable[Tensor]) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[list[int]]:
        return (numbers.tolist() for numbers in self._draws)


class Feed:
    """One rank's slices of the global batches, from any point of the order on."""

    def __init__(
        self, source: Source, order: Order, *, global_batch: int, shard: int, shards: int
    ) -> None:
        """Prepare to read; nothing is read yet."""
        self._source, self._order = source, order
        self._global_batch, self._shard, self._shards = global_batch, shard, shards
        self._stream: Iterator[Batch] | None = None
        self._next = 0

    def numbers(self, samples_seen: int) -> Tensor:
        """Give the sample numbers of the slice that begins there."""
        return self._order.share(
            samples_seen, self._global_batch, shard=self._shard, shards=self._shards
        )

    def everyone(self, samples_seen: int) -> Tensor:
        """Give the sample numbers of the whole global batch that begins there."""
        return self._order.share(samples_seen, self._global_batch, shard=0, shards=1)

    def batch(self, samples_seen: int) -> Batch:
        """Give the slice of the global batch that begins there.

        It has been read ahead if this goes on where the call before it ended.
        """
        if self._stream is None or samples_seen != self._next:
            self._stream = self._source.read(self._draws(samples_seen))
        self._next = samples_seen + self._global_batch
        return next(self._stream)

    def close(self) -> None:
        """End the processes that read ahead."""
        self._stream = None

    def _draws(self, samples_seen: int) -> Iterator[Tensor]:
        while True:
            yield self.numbers(samples_seen)
            samples_seen += self._global_batch
