"""Sources of batches: samples in memory, or a Dataset that worker processes read ahead."""

import atexit
import multiprocessing
import random
import signal
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import count, repeat
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ..errors import UsageError
from ..model import trees
from ..model.trees import Tree
from ..runtime.signals import SIGNALS
from .order import (
    Batch,
    Chance,
    SampleOrder,
    Samples,
    Source,
    mixed,
    seed_generators,
    seed_of,
    share_of,
)

Draw = tuple[list[int], Chance | None]
"""Sample numbers, and the source of their random numbers."""
_CPU = torch.device("cpu")


def source_of(samples: Batch | Samples, *, workers: int = 0, task: str = "") -> Source:
    """Make the samples of a task readable in batches; `workers` processes, if any, read ahead.

    Raises:
        UsageError: the samples are neither a `Batch` nor a data set with a length, or a leaf of the
            batch is not a tensor, or has another number of samples.
    """
    if isinstance(samples, Batch):
        trees.check(samples.inputs, samples.targets, task=task)
        return samples
    return DatasetReader(samples, workers=workers, task=task)


def resident(samples: Source, device: torch.device, *, task: str) -> Source:
    """Provide samples on a device: a `Batch` is copied there as a whole, once.

    Raises:
        UsageError: the samples exceed the device's free memory.
    """
    if isinstance(samples, Batch) and device.type == "cuda":
        tensors = (*trees.tensors_of(samples.inputs), *trees.tensors_of(samples.targets))
        size, (free, _) = sum(t.nbytes for t in tensors), torch.cuda.mem_get_info(device)
        if size > free:
            raise UsageError(
                f"task {task!r}: the samples in its Batch have {size / 2**30:.1f} GiB. Each GPU "
                f"gets a copy, but one has only {free / 2**30:.1f} GiB free: return a Dataset, "
                "which is read batch by batch (--workers reads ahead)"
            )
    return samples.to(device)


class DatasetReader:
    """Batches of a map-style Dataset.

    Its samples may be random, such as randomly mirrored pictures. The generators are seeded for
    each sample by its position in the whole run's stream of samples. So the sample is the same for
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
        """Read by `workers` processes, or in this one; for a device (default: the CPU)."""
        numbered = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
        if not numbered or isinstance(samples, IterableDataset):
            raise UsageError(
                f"the task's data is of type {type(samples).__name__}, which has no numbered "
                "samples: give a Batch, or a Dataset with __len__() and __getitem__()"
            )
        self._samples, self._workers, self._task = samples, workers, task
        self._device = device or torch.device("cpu")
        # Whether a sample has been seen to draw random numbers.
        self._drawing, self._detector = False, RandomDrawDetector()
        # The structure of the first batch, which all others must have.
        self._form: object = None

    def __len__(self) -> int:
        return len(self._samples)

    def to(self, device: torch.device) -> "DatasetReader":
        """Read the same samples, in batches on a device."""
        return DatasetReader(self._samples, workers=self._workers, device=device, task=self._task)

    def take(self, indices: Tensor, chance: Chance | None = None, /) -> Batch:
        """Pick samples by number, in this process."""
        numbers = indices.tolist()
        self._detector.start()
        samples = None if self._drawing else self._unseeded(numbers)
        if samples is None:
            try:
                samples = _SeededSamples(self._samples)[numbers, chance]
            finally:
                self._detector.put_back()
        return self._batch(*self._collate(samples))

    def read(
        self, draws: Iterable[Tensor], chances: Iterable[Chance] | None = None, /
    ) -> Iterator[Batch]:
        """Yield one batch per draw; each worker prepares up to two of them ahead.

        Workers get lists of samples to read, so nothing depends on their number or speed.
        """
        both = zip(draws, repeat(None) if chances is None else chances, strict=False)
        if not self._workers:
            for numbers, chance in both:
                yield self.take(numbers, chance)
            return
        loader: DataLoader[Any] = DataLoader(
            _SeededSamples(self._samples),  # type: ignore[arg-type]  # its numbers are whole draws
            # A DataLoader passes lists of numbers on.
            sampler=((numbers.tolist(), chance) for numbers, chance in both),
            batch_size=None,
            num_workers=self._workers,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            # A forked process has the data set already; a spawned one would have to import the
            # module of the user's task, which is not on the import path.
            multiprocessing_context="fork",
            # Without this, the loader would draw from the global generator, which the model uses:
            # the first step after each start would differ.
            generator=torch.Generator(),
            worker_init_fn=_ignore_stops,
        )
        others = set(multiprocessing.active_children())
        batches = iter(loader)
        _readers.update(set(multiprocessing.active_children()) - others)
        for inputs, targets in batches:
            yield self._batch(inputs, targets)

    def _unseeded(self, numbers: list[int]) -> list[tuple[Any, Any]] | None:
        """Read samples without seeding, which would often take longer than reading the sample.

        Returns None if they draw random numbers or cannot be read: read them with seeding then.
        """
        try:
            samples = [self._samples[number] for number in numbers]
        except Exception:
            return None  # reading with seeding names the sample
        self._drawing = self._detector.drawn()
        return None if self._drawing else samples

    def _batch(self, inputs: Tree, targets: Tree) -> Batch:
        batch = Batch(inputs=inputs, targets=targets)
        if self._device.type == "cpu":
            return batch
        return batch.mapped(lambda tensor: tensor.to(self._device, non_blocking=True))

    def _collate(self, samples: list[tuple[Any, Any]]) -> tuple[Tree, Tree]:
        if samples:
            return self._pair(samples)
        # An empty share still needs the shape and type of the others.
        inputs, targets = self._pair([self._samples[0]])
        return trees.mapped(lambda t: t[:0], inputs), trees.mapped(lambda t: t[:0], targets)

    def _pair(self, samples: list[tuple[Any, Any]]) -> tuple[Tree, Tree]:
        """Collate samples; the first ones determine the structure of all later ones.

        Raises:
            UsageError: the samples are not pairs, or contain something that is not a tensor.
            ValueError: the samples differ in structure from the first ones.
        """
        first = samples[0]
        owner = f"task {self._task!r}" if self._task else "the task"
        if self._form is None and not (isinstance(first, tuple | list) and len(first) == 2):
            shown = type(first).__name__
            if isinstance(first, Sized):
                shown = f"{shown} of {len(first)}"
            raise UsageError(
                f"{owner}: a sample of its data is a {shown}, but must be a pair (input, target); "
                "several inputs are one dict, list or tuple in it"
            )
        try:
            inputs, targets = default_collate(samples)
        except TypeError as error:
            if self._form is not None:
                raise
            raise UsageError(f"{owner}: samples of its data make no batch: {error}") from error
        form = trees.form_of((inputs, targets))
        if self._form is None:
            trees.check(inputs, targets, task=self._task)
            self._form = form
        if form != self._form:
            shown = f"{trees.described('inputs', inputs)}; {trees.described('targets', targets)}"
            raise ValueError(f"samples are of another form than the first one was: {shown}")
        return inputs, targets


class _SeededSamples:
    """Samples by draw; every sample has its own random seed."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, draw: Draw) -> list[tuple[Any, Any]]:
        numbers, chance = draw
        positions: Sequence[int]
        if chance is None:
            # Without a chance, as for a test set, a sample is always the same.
            seed, positions = seed_of("sample"), numbers
        else:
            seed = seed_of("sample", chance.seed)
            positions = range(chance.place, chance.place + len(numbers))
        samples = []
        for number, position in zip(numbers, positions, strict=True):
            seed_generators(mixed(seed, position), _CPU)
            try:
                samples.append(self._samples[number])
            except Exception as error:
                # The traceback that a reading process sends contains the note.
                error.add_note(f"in sample {number}")
                raise
        return samples


_readers: WeakSet[BaseProcess] = WeakSet()
"""The processes that read ahead."""


def _ignore_stops(worker: int) -> None:
    """Leave stop signals to the training process: torchrun and Slurm signal all its processes."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_readers() -> None:
    """Kill the reading processes: at exit Python sends SIGTERM, which they ignore, and waits."""
    # torch's handler would report the kill as a failure.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in _readers:
        process.kill()


class RandomDrawDetector:
    """Detects whether random numbers were drawn since `start()` from the generators of a sample.

    It seeds the generators of `random` and numpy, and copies of them, which is cheaper than
    comparing their states of thousands of bytes. The loop seeds them again before each pass.
    """

    def __init__(self) -> None:
        self._random, self._numpy = random.Random(), np.random.RandomState()
        self._state = torch.default_generator.get_state()

    def start(self) -> None:
        """Synchronise the copies with the generators."""
        random.seed(0)
        self._random.seed(0)
        np.random.seed(0)
        self._numpy.seed(0)
        self._state = torch.default_generator.get_state()

    def drawn(self) -> bool:
        """Whether random numbers were drawn since `start()`."""
        return (
            random.random() != self._random.random()
            or np.random.random_sample() != self._numpy.random_sample()
            or not torch.equal(torch.default_generator.get_state(), self._state)
        )

    def put_back(self) -> None:
        """Restore the state of torch's generator, which the model's dropout uses."""
        torch.default_generator.set_state(self._state)


class Feed:
    """One rank's slices of the global batches, starting at any point of the order."""

    def __init__(
        self, source: Source, order: SampleOrder, *, global_batch: int, shard: int, shards: int
    ) -> None:
        self._source, self._order = source, order
        self._global_batch = global_batch
        self._first, self._last = share_of(global_batch, shard=shard, shards=shards)
        self._stream: Iterator[Batch] | None = None
        self._next = 0

    def numbers(self, samples_seen: int) -> Tensor:
        """Return the sample numbers of the slice that begins there."""
        return self._order.positions(samples_seen + self._first, samples_seen + self._last)

    def everyone(self, samples_seen: int) -> Tensor:
        """Return the sample numbers of the whole global batch that begins there."""
        return self._order.share(samples_seen, self._global_batch, shard=0, shards=1)

    def batch(self, samples_seen: int) -> Batch:
        """Return this rank's slice of the global batch that begins there.

        The slice has been read ahead if it follows that of the previous call.
        """
        if self._stream is None or samples_seen != self._next:
            # Generators: reading never ends, and samples in memory need no chances.
            self._stream = self._source.read(
                (self.numbers(seen) for seen in count(samples_seen, self._global_batch)),
                (self._chance(seen) for seen in count(samples_seen, self._global_batch)),
            )
        self._next = samples_seen + self._global_batch
        return next(self._stream)

    def lone_batch(self, samples_seen: int) -> Batch:
        """Return one batch, read in this process, for a caller that needs no further batches."""
        return self._source.take(self.numbers(samples_seen), self._chance(samples_seen))

    def close(self) -> None:
        """End the processes that read ahead."""
        self._stream = None

    def _chance(self, samples_seen: int) -> Chance:
        return Chance(self._order.seed, samples_seen + self._first)
