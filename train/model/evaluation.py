"""Evaluation of the whole test set, divided among the ranks without padding."""

import math
import time
from collections.abc import Callable, Iterator

import torch

from ..cli.config import Config
from ..data.order import Batch, Source, mixed, seed_generators, seed_of, share_of
from ..errors import UsageError
from ..parallel.base import Strategy
from ..runtime.process_group import RankGroup
from ..tasks.base import Task


def batch_size(config: Config, strategy: Strategy) -> int:
    """Return how many samples a rank evaluates at a time.

    The default is the size of a forward pass in training, which is known to fit in memory.
    """
    if config.eval_batch is not None:
        return config.eval_batch
    shards, passes = strategy.shards, strategy.micro_batches()
    if config.reduce == "exact":
        shards, passes = config.virtual_shards, config.micro_batches(config.virtual_shards)
    return math.ceil(math.ceil(config.global_batch / shards) / passes)


LOOK_EVERY_S = 1.0
"""How often the ranks agree during an evaluation on whether to end it."""


class EvaluationStopped(Exception):
    """A rank was asked to stop; raised on all ranks after the same batch."""


def measure(
    task: Task,
    strategy: Strategy,
    group: RankGroup,
    test: Source,
    *,
    batch: int,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Measure the mean loss and the task's metrics over the whole test set; none if it is empty.

    All ranks call this at once, and process at most `batch` samples at a time. They exchange sums,
    not means, as their parts differ in size. The sums are in double precision, which is exact for
    the counts of any test set.

    Raises:
        EvaluationStopped: `stop_requested` was true on a rank.
        UsageError: the task's metrics are not numbers by name.
    """
    if not len(test):
        return {}
    rows = []
    look_after, started = 1, time.monotonic()
    parts = parts_of(test, batch=batch, shard=strategy.shard, shards=strategy.shards)
    seed = seed_of("evaluation", *strategy.axes)
    for number, (part, counts) in enumerate(parts):
        if number == look_after:
            if group.sum([stop_requested()])[0]:
                raise EvaluationStopped
            # The number is the same on all ranks, whatever their speed. It at most doubles, as
            # later batches may be slower.
            seconds, ranks = group.sum([time.monotonic() - started, 1.0])
            pause = int(LOOK_EVERY_S * number * ranks / max(seconds, 1e-3))
            look_after += min(max(pause, 1), number)
        # A model or a loss may draw random numbers even now: make them the same in each evaluation.
        seed_generators(mixed(seed, number), group.device)
        sums = strategy.evaluate(part)
        if counts:
            count = sums.loss.new_tensor([sums.count], dtype=torch.float64)
            columns = (count, sums.loss.double().reshape(1), sums.score.double().reshape(-1))
            rows.append(torch.cat(columns))
    mine: list[float] = torch.stack(rows).sum(dim=0).tolist() if rows else []
    # A rank without results, such as a pipeline's first stage, need not know the number of scores.
    width = max(group.gather(len(mine)))
    total, loss, *score = group.sum(mine + [0.0] * (width - len(mine)))
    metrics = task.metrics(torch.tensor(score, dtype=torch.float64), int(total))
    try:
        named = {f"test_{name}": float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"task {task.name!r}: metrics() gave {metrics!r}; it must be a dict of numbers by name"
        ) from error
    return {**named, "test_loss": loss / max(total, 1.0)}


def parts_of(test: Source, *, batch: int, shard: int, shards: int) -> Iterator[tuple[Batch, bool]]:
    """Yield one rank's share of the test set in batches; all ranks get the same number of batches.

    Sharded models communicate in each batch, so a rank with one batch fewer would leave the others
    waiting. A rank without samples left gets one that does not count, since many models accept no
    empty batch.

    Yields:
        A batch of at most `batch` samples, and whether it counts.
    """
    size = len(test)
    start, stop = share_of(size, shard=shard, shards=shards)
    passes = max(math.ceil(size / (shards * batch)), 1)
    cuts = [share_of(stop - start, shard=number, shards=passes) for number in range(passes)]
    # An empty test set has no sample to give.
    counted = [first < last or not size for first, last in cuts]
    numbers = (
        torch.arange(start + first, start + last) if counts else torch.zeros(1, dtype=torch.int64)
        for (first, last), counts in zip(cuts, counted, strict=True)
    )
    return zip(test.read(numbers), counted, strict=True)
