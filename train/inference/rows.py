"""Predictions per sample: forward passes over batches, and their outputs as lines of JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.order import Batch, Source, mixed, seed_generators, seed_of
from ..errors import UsageError
from ..model.trees import Tree, mapped, tensors_of
from ..parallel.base import Strategy
from ..rundir.jsonl import dump
from ..tasks.base import Task
from .parts import Partition

INDEX = "index"
"""The number of the sample, the first name of each line."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass of this rank."""

    part: int | None
    """The part that this rank writes; None: there are fewer parts than ranks."""
    batch: int
    """The number of its batch."""
    samples: range
    """The numbers of its samples."""
    counts: bool
    """Whether its outputs are used: other ranks may still have batches when this one has none."""
    closes: bool
    """Whether this pass completes the parts of all ranks."""


def passes(
    partition: Partition, missing: Sequence[int], *, shard: int, shards: int
) -> Iterator[Pass]:
    """Yield one rank's passes over the missing parts; all ranks get the same number of passes.

    Sharded models communicate in each pass, so all ranks must make the same number. Every batch is
    the same for any number of ranks. So are the bits of its outputs, if computed in the same way.
    """
    for start in range(0, len(missing), shards):
        together = missing[start : start + shards]
        mine = together[shard] if shard < len(together) else None
        batches = range(0) if mine is None else partition.batches_of(mine)
        # The last part may have fewer.
        longest = max(len(partition.batches_of(part)) for part in together)
        for number in range(longest):
            counts = number < len(batches)
            batch = batches[number] if counts else 0
            yield Pass(
                part=mine,
                batch=batch,
                samples=partition.samples_of(range(batch, batch + 1)) if counts else range(1),
                counts=counts,
                closes=number == longest - 1,
            )


def predict(
    task: Task, strategy: Strategy, test: Source, plan: Sequence[Pass], *, seed: int
) -> Iterator[tuple[Pass, list[str] | None]]:
    """Make passes; yield each with the lines of its samples, or None if this rank needs none.

    Raises:
        UsageError: the task's predictions cannot be written per sample.
    """
    device = strategy.parts.group.device
    seed = seed_of("predict", seed)
    numbers = (torch.arange(one.samples.start, one.samples.stop) for one in plan)
    for one, batch in zip(plan, test.read(numbers), strict=True):
        # A model may draw random numbers even now.
        seed_generators(mixed(seed, one.batch), device)
        outputs = strategy.predict(batch)
        wanted = one.counts and outputs is not None
        yield one, lines(task, outputs, batch, one.samples) if wanted else None


def lines(task: Task, outputs: Tree, batch: Batch, samples: range) -> list[str]:
    """Format the predictions for a batch, one line of JSON per sample.

    Raises:
        UsageError: the predictions are not a mapping of names to one value per sample.
    """
    tensors = tensors_of(outputs)
    targets = batch.targets
    if tensors:
        # `manual` has them on the last of several devices.
        targets = mapped(lambda tensor: tensor.to(tensors[0].device), targets)
    with torch.no_grad():
        columns = task.predictions(outputs, targets)
    if not isinstance(columns, Mapping) or INDEX in columns:
        given = f"{INDEX!r}, which every line already has"
        if not isinstance(columns, Mapping):
            given = f"{type(columns).__name__}, not values by name"
        raise UsageError(f"task {task.name!r}: predictions() gave {given}")
    rows = [
        _rows(value, len(samples), f"task {task.name!r}: predictions() gave {str(name)!r}")
        for name, value in columns.items()
    ]
    names = [str(name) for name in columns]
    try:
        return [
            dump({INDEX: index, **dict(zip(names, row, strict=True))})
            for index, row in zip(samples, zip(*rows, strict=True), strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"task {task.name!r}: predictions() gave what JSON cannot hold: {error}"
        ) from error


def _rows(value: object, count: int, what: str) -> list[object]:
    """Split a tree of tensors, or a list with one entry per sample, by sample."""
    if isinstance(value, Tensor):
        if value.dim() == 0 or len(value) != count:
            raise UsageError(
                f"{what} of shape {list(value.shape)} for {count} samples: the first dimension "
                "must be the sample (docs/how-to/own-task.md)"
            )
        return _numbers(value)
    if isinstance(value, Mapping):
        each = [_rows(one, count, f"{what}[{str(name)!r}]") for name, one in value.items()]
        names = [str(name) for name in value]
        return [dict(zip(names, row, strict=True)) for row in zip(*each, strict=True)]
    if isinstance(value, list | tuple):
        if any(isinstance(one, Tensor | Mapping | list | tuple) for one in value) and tensors_of(
            value
        ):
            each = [_rows(one, count, f"{what}[{n}]") for n, one in enumerate(value)]
            return [list(row) for row in zip(*each, strict=True)]
        if len(value) == count:
            return list(value)
        raise UsageError(f"{what} with {len(value)} entries for {count} samples: give one for each")
    raise UsageError(
        f"{what} of type {type(value).__name__}: give a tensor or a list with an entry for each "
        "sample (docs/how-to/own-task.md)"
    )


def _numbers(tensor: Tensor) -> list[object]:
    """Turn a tensor into lists of numbers; format float32 as briefly as possible.

    0.1 in float32 is 0.10000000149011612 in float64. The shortest text that is read back as the
    same number is half as long.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    if tensor.dtype != torch.float32:
        return list(tensor.tolist())
    array = tensor.numpy()
    shortest = np.array([float(str(number)) for number in array.ravel()], dtype=np.float64)
    numbers: list[object] = shortest.reshape(array.shape).tolist()  # type: ignore[assignment]
    return numbers
