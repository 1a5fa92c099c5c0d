"""Samples of a Dataset, read ahead of their use by processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from train.data.order import Batch, Chance, SampleOrder, Samples, Source, seed_of, share_of
from train.data.seeding import RandomDrawDetector, mixed, seed_sample
from train.errors import UsageError
from train.model import trees
from train.model.trees import Tree
from train.runtime.signals import SIGNALS

# Sample numbers, and what their random numbers depend on.
Draw = tuple[list[int], Chance | None]


class DatasetReader:
    """Batches of a map-style Dataset.

    Its samples may be random, such as pictures that are now and then mirrored. For each, the
    generators are seeded by its place in the whole run's stream of samples: so it is the same for
    any reader, any number of processes, and any start of the run.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        workers: int = 0,
        device: torch.device | None = None,
        task: str = "",
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
        self._samples, self._workers, self._task = samples, workers, task
        self._device = device or torch.device("cpu")
        # Whether a sample has been seen to draw random numbers.
        self._drawing, self._watch = False, RandomDrawDetector()
        # Of the first batch: what others must be like.
        self._form: object = None
        self._checked = False

    def __len__(self) -> int:
        """Count the samples."""
        return len(self._samples)

    def to(self, device: torch.device) -> DatasetReader:
        """Give batches on a device."""
        return DatasetReader(self._samples, workers=self._workers, device=device, task=self._task)

    def take(self, indices: Tensor, chance: Chance | None = None, /) -> Batch:
        """Pick samples by number, in this process."""
        numbers = indices.tolist()
        self._watch.start()
        samples = None if self._drawing else self._unseeded(numbers)
        if samples is None:
            try:
                samples = _Drawn(self._samples)[numbers, chance]
            finally:
                self._watch.put_back()
        return self._batch(*self._collate(samples))

    def read(
        self, draws: Iterable[Tensor], chances: Iterable[Chance] | None = None, /
    ) -> Iterator[Batch]:
        """Give one batch per draw; each worker prepares up to two of them ahead.

        Workers get lists of samples to read, so nothing depends on their number or speed.
        """
        both = zip(draws, repeat(None) if chances is None else chances, strict=False)
        if not self._workers:
            for numbers, chance in both:
                yield self.take(numbers, chance)
            return
        loader: DataLoader[Any] = DataLoader(
            _Drawn(self._samples),  # type: ignore[arg-type]  # its numbers are whole draws
            sampler=_Lists(both),
            batch_size=None,
            num_workers=self._workers,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            # A forked process has the data set as it is; any other would have to import the module
            # of a task of your own, which lies on no path.
            multiprocessing_context="fork",
            # Else it would draw from the global generator, which belongs to the model: the first
            # step after each start would differ.
            generator=torch.Generator(),
            worker_init_fn=_ignore_stops,
        )
        for inputs, targets in loader:
            yield self._batch(inputs, targets)

    def _unseeded(self, numbers: list[int]) -> list[tuple[Any, Any]] | None:
        """Read samples that draw no random numbers: to seed for each takes longer than many a one.

        None: they do draw, or cannot be read, and want to be read as if they did.
        """
        try:
            samples = [self._samples[number] for number in numbers]
        except Exception:
            return None  # the other way names the sample
        self._drawing = self._watch.drawn()
        return None if self._drawing else samples

    def _batch(self, inputs: Tree, targets: Tree) -> Batch:
        batch = Batch(inputs=inputs, targets=targets)
        if self._device.type == "cpu":
            return batch
        return batch.mapped(lambda tensor: tensor.to(self._device, non_blocking=True))

    def _collate(self, samples: list[tuple[Any, Any]]) -> tuple[Tree, Tree]:
        if samples:
            return self._pair(samples)
        # A share may be empty, and still has the shape and type of the others.
        inputs, targets = self._pair([self._samples[0]])
        return trees.mapped(_nothing_of, inputs), trees.mapped(_nothing_of, targets)

    def _pair(self, samples: list[tuple[Any, Any]]) -> tuple[Tree, Tree]:
        """Collate samples; what others later are like is decided by the first.

        Raises:
            UsageError: they are no pairs, or not all of them is tensors.
            ValueError: they are of another form than the first.
        """
        if not self._checked:
            self._check_sample(samples[0])
        inputs, targets = default_collate(samples)
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor) and self._form is None:
            self._checked = True
            return inputs, targets
        form = trees.form_of((inputs, targets))
        if not self._checked:
            trees.check(inputs, targets, task=self._task)
            self._form, self._checked = form, True
        if form != self._form:
            shown = f"{trees.described('inputs', inputs)}; {trees.described('targets', targets)}"
            raise ValueError(f"samples are of another form than the first one was: {shown}")
        return inputs, targets

    def _check_sample(self, sample: object) -> None:
        if isinstance(sample, tuple | list) and len(sample) == 2:
            return
        shown = type(sample).__name__
        if isinstance(sample, Sized):
            shown = f"{shown} of {len(sample)}"
        place = f"task {self._task!r}" if self._task else "the task"
        raise UsageError(
            f"{place}: a sample of its data is a {shown}, but must be a pair (input, target); "
            "several inputs are one dict, list or tuple in it"
        )


def _nothing_of(tensor: Tensor) -> Tensor:
    return tensor[:0]


class _Drawn:
    """Samples by draw: each with random numbers of its own."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, draw: Draw) -> list[tuple[Any, Any]]:
        numbers, chance = draw
        places: Sequence[int]
        if chance is None:
            # Where nobody says when it is drawn, as in a test set, a sample is always the same.
            seed, places = seed_of("sample"), numbers
        else:
            seed = seed_of("sample", chance.seed)
            places = range(chance.place, chance.place + len(numbers))
        drawn = []
        for number, place in zip(numbers, places, strict=True):
            seed_sample(mixed(seed, place))
            try:
                drawn.append(self._samples[number])
            except Exception as error:
                # In the traceback, too, that a process which reads ahead sends of it.
                error.add_note(f"in sample {number}")
                raise
        return drawn


def _ignore_stops(worker: int) -> None:
    """Leave it to the process that trains to stop: torchrun and Slurm signal all of a rank's."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Lists:
    """Hands draws over, as a DataLoader passes them on: numbers in a list."""

    def __init__(self, draws: Iterable[tuple[Tensor, Chance | None]]) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[Draw]:
        return ((numbers.tolist(), chance) for numbers, chance in self._draws)


class Feed:
    """One rank's slices of the global batches, from any point of the order on."""

    def __init__(
        self, source: Source, order: SampleOrder, *, global_batch: int, shard: int, shards: int
    ) -> None:
        """Prepare to read; nothing is read yet."""
        self._source, self._order = source, order
        self._global_batch = global_batch
        self._first, self._last = share_of(global_batch, shard=shard, shards=shards)
        self._stream: Iterator[Batch] | None = None
        self._next = 0

    def numbers(self, samples_seen: int) -> Tensor:
        """Give the sample numbers of the slice that begins there."""
        return self._order.positions(samples_seen + self._first, samples_seen + self._last)

    def everyone(self, samples_seen: int) -> Tensor:
        """Give the sample numbers of the whole global batch that begins there."""
        return self._order.share(samples_seen, self._global_batch, shard=0, shards=1)

    def batch(self, samples_seen: int) -> Batch:
        """Give the slice of the global batch that begins there.

        It has been read ahead if this goes on where the call before it ended.
        """
        if self._stream is None or samples_seen != self._next:
            # Beside the draws: in memory, the probabilities are not needed.
            self._stream = self._source.read(
                self._draws(samples_seen),
                (self._chance(seen) for seen in count(samples_seen, self._global_batch)),
            )
        self._next = samples_seen + self._global_batch
        return next(self._stream)

    def lone_batch(self, samples_seen: int) -> Batch:
        """Return one batch, read in this process, for a caller that does not read on."""
        return self._source.take(self.numbers(samples_seen), self._chance(samples_seen))

    def close(self) -> None:
        """End the processes that read ahead."""
        self._stream = None

    def _chance(self, samples_seen: int) -> Chance:
        return Chance(self._order.seed, samples_seen + self._first)

    def _draws(self, samples_seen: int) -> Iterator[Tensor]:
        while True:
            yield self.numbers(samples_seen)
            samples_seen += self._global_batch
