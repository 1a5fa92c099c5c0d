"""One rank's step, made by the real strategy with tensors that have no memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from train import parallel
from train.cli.config import Config
from train.data.loader import source_of
from train.data.order import Batch
from train.dryrun.fake_group import Boundaries, pretend, rehearsable
from train.dryrun.flops import Flops
from train.dryrun.memory import GRADIENTS, OPTIMIZER, PARAMETERS, STATE, Memory
from train.dryrun.traffic import Exchange, Traffic
from train.model import evaluation
from train.model.gradients import clip, total_norm
from train.model.optimizer import NamedOptimizer
from train.parallel.base import Parts, Strategy, WholeModel
from train.parallel.fsdp import GradientSync
from train.parallel.hybrid import Composed
from train.parallel.local_sgd import LocalSgd
from train.parallel.pipeline import split
from train.parallel.pipeline.schedule import Pipelined
from train.runtime.rank import RankInfo
from train.tasks.base import Task

# The last micro-batch, which exchanges gradients, is different; those before it are all alike.
ENOUGH = 2
TRAINING, EVALUATION = "training", "evaluation"
# Strategies that reduce gradients into shards.
SHARDING = (Composed, Pipelined)


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The cost of one optimizer step on one rank."""

    rank: int
    """Which."""
    micro_batches: int
    """In how many parts the rank works on its share."""
    micro_batch: int
    """Samples of the largest of them."""
    evaluated: int
    """Samples of a batch of an evaluation."""
    gradient_sync: GradientSync | None
    """When gradients are reduced, if parameters are sharded."""
    peak: str
    """When the device holds most: `training` or `evaluation`."""
    memory: Mapping[str, int]
    """Bytes of the device by kind then, see memory.py."""
    host_memory: Mapping[str, int]
    """Bytes of the host then, with `--cpu-offload`."""
    traffic: Mapping[Exchange, float]
    """Calls per step; a fraction for work that is not done in every step."""
    flops: float
    """Floating-point operations of matrix products and attention."""


class Rehearsal:
    """A plan whose ranks are rehearsed, one after the other."""

    def __init__(self, config: Config, task: Task, rank_info: RankInfo) -> None:
        """Describe the plan; `rank_info` holds the number of ranks, and the size of the nodes."""
        self.layout = config.layout_on(rank_info)
        # The first two are about how a run starts. The devices of the plan are not here.
        self._config = dataclasses.replace(config, meta_init=False, compile=False, dry_run=True)
        self._task, self._rank_info = task, rank_info
        self._sample = source_of(task.train()).take(torch.zeros(1, dtype=torch.int64))
        self._test_samples = len(source_of(task.test()))
        self._boundaries: Boundaries = {}

    def ranks(self) -> list[int]:
        """Choose the ranks to look at: one of each stage, the one with the most to do.

        With `--cp-method allgather` it is the one with the last part of a sequence.
        """
        last_part = (self.layout.cp - 1) * self.layout.tp
        each = self.layout.world_size // self.layout.pp
        return [stage * each + last_part for stage in range(self.layout.pp)]

    def all(self) -> list[Rehearsed]:
        """Rehearse them."""
        if self.layout.pp > 1 and self._config.pp_schedule not in split.ONE_STAGE:
            self._find_boundaries()
        return [self._run(rank) for rank in self.ranks()]

    def _run(self, rank: int) -> Rehearsed:
        share = max(1, math.ceil(self._config.global_batch / self.layout.shards))
        memory, traffic, flops = Memory(), dict[Exchange, float](), 0.0
        with pretend(self._at(rank), self._boundaries) as group, memory:
            parts = Parts(task=self._task, config=self._config, layout=self.layout, group=group)
            step = _Step(parts, memory)
            count = step.strategy.micro_batches()
            size = math.ceil(share / count)
            steps = list(self._steps(step.strategy, count))
            # First of all what happens only once: the optimizer's state, schedules, caches.
            # PowerSGD begins after some steps.
            once = 12 if self._config.comm_hook == "powersgd" else 1
            for batches, number, _ in steps[:1] * once:
                step.make(self._batch(size * batches), batches, number)
            memory.forget_the_past()
            for batches, number, weight in steps:
                with Flops() as counted, Traffic() as seen:
                    step.make(self._batch(size * batches), batches, number)
                flops += weight * counted.total
                for exchange, calls in seen.calls.items():
                    traffic[exchange] = traffic.get(exchange, 0.0) + weight * calls
            kept = STATE if self._config.cpu_offload else ()
            peaks = {TRAINING: memory.peak(without=kept)}
            memory.forget_the_past()
            evaluated = self._evaluated_at_a_time(step.strategy)
            step.strategy.evaluate(self._batch(evaluated))
            peaks[EVALUATION] = memory.peak(without=kept)
            chosen = step.strategy.gradient_sync if isinstance(step.strategy, SHARDING) else None
            del step
        when = max(peaks, key=lambda when: on_device(peaks[when], kept))
        peak = peaks[when]
        return Rehearsed(
            rank=rank,
            micro_batches=count,
            micro_batch=size,
            evaluated=evaluated,
            gradient_sync=chosen,
            peak=when,
            memory={kind: size for kind, size in peak.items() if kind not in kept},
            host_memory={kind: size for kind, size in peak.items() if kind in kept},
            traffic={exchange: calls for exchange, calls in traffic.items() if calls},
            flops=flops,
        )

    def _steps(self, strategy: Strategy, count: int) -> Iterator[tuple[int, int, float]]:
        """Choose steps to make: numbers of micro-batches and of the step, and how much it counts.

        Many micro-batches are one, and as often as need be what a second adds to it.
        """
        sizes = [(count, 1.0)]
        if count > ENOUGH and isinstance(strategy, WholeModel) and self._config.reduce == "fast":
            sizes = [(ENOUGH, count - ENOUGH + 1.0), (ENOUGH - 1, float(ENOUGH - count))]
        numbers = [(1, 1.0)]
        if isinstance(strategy, LocalSgd):
            every = self._config.local_steps
            averages = every * (self._config.local_start + 1)
            numbers = [(averages, 1 / every), (averages + 1, 1 - 1 / every)]
        for batches, weight in sizes:
            for number, part in numbers:
                yield batches, number, weight * part

    def _find_boundaries(self) -> None:
        """Find the inputs of each stage, for ranks with several stages.

        Such a rank needs the results of others before they are computed. So the
        same stages are run once, each on a rank of its own.
        """
        size = self._micro_batch_of_a_pipeline()
        count = split.stage_count(self._config.pp_schedule, self.layout.pp)
        layout = dataclasses.replace(self.layout, pp=count)
        config = dataclasses.replace(
            self._config,
            pp=count,
            pp_schedule="GPipe",
            micro_batch=size,
        )
        each = layout.world_size // count
        for stage in range(count):
            rank_info = self._at(stage * each, layout.world_size)
            with pretend(rank_info, self._boundaries) as group:
                parts = Parts(task=self._task, config=config, layout=layout, group=group)
                strategy = parallel.build(config.strategy_on(rank_info), parts)
                assert isinstance(strategy, Pipelined), "a layout with stages is a pipeline's"
                for samples in (size, self._evaluated_at_a_time(strategy)):
                    strategy.passed(strategy._slice.of(self._batch(samples)).inputs)
                del strategy

    def _evaluated_at_a_time(self, strategy: Strategy) -> int:
        """Count the samples of a rank's largest batch of an evaluation."""
        share = math.ceil(self._test_samples / strategy.shards)
        return min(evaluation.batch_size(self._config, strategy), share)

    def _micro_batch_of_a_pipeline(self) -> int:
        count = split.micro_batches(self._config, self.layout)
        return self._config.global_batch // self.layout.shards // count

    def _at(self, rank: int, world_size: int | None = None) -> RankInfo:
        return dataclasses.replace(
            self._rank_info, rank=rank, world_size=world_size or self._rank_info.world_size
        )

    def _batch(self, size: int) -> Batch:
        def outline(tensor: Tensor) -> Tensor:
            return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)

        return self._sample.mapped(outline)


def on_device(peak: Mapping[str, int], elsewhere: Iterable[str]) -> int:
    """Add up the kinds that are not kept elsewhere."""
    return sum(peak.values()) - sum(peak[kind] for kind in elsewhere)


class _Step:
    """What the training loop does in a step, as far as other ranks or memory are concerned."""

    def __init__(self, parts: Parts, memory: Memory) -> None:
        """Build the strategy and its optimizer."""
        self._parts, self._memory = parts, memory
        self.strategy = parallel.build(parts.config.strategy_on(parts.group.rank_info), parts)
        if isinstance(self.strategy, WholeModel):
            rehearsable(self.strategy.run)
        self._optimizer = NamedOptimizer(self.strategy.named_parameters(), parts.config)
        if parts.config.optimizer == "adamw" and not parts.config.cpu_offload:
            # One kernel for all, without tensors in between, as where parameters are on a GPU.
            for group in self._optimizer._optimizer.param_groups:
                group["fused"] = True
        self.strategy.bind(self._optimizer)
        memory.mark(self.strategy.model_state().values(), PARAMETERS)
        memory.mark(self._parameters(), PARAMETERS)

    def make(self, share: Batch, batches: int, number: int) -> None:
        """Make step `number` with a share in so many micro-batches."""
        strategy, config = self.strategy, self._parts.config
        strategy.begin_step(number)
        # Not 1, which would save a multiplication that no real step is spared.
        strategy.accumulate(share.split_into(batches), 0.5)
        # Loss, count, stop requests, whether other parameters than before are left out.
        self._parts.group.sum([0.0] * 4)
        strategy.scale_gradients(0.5)
        if config.clip_norm is not None or config.precision == "fp16":
            norm = total_norm(strategy)
            if config.clip_norm is not None:
                clip(strategy, norm, 0.5)
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        self._memory.mark(gradients, GRADIENTS)
        del gradients
        self._optimizer.step()
        self._memory.mark(self._optimizer.tensors().values(), OPTIMIZER)
        strategy.after_step(number)

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for _, parameter in self.strategy.named_parameters())
