"""The cost of a step on each kind of rank: the real strategy makes it with fake tensors.

And the bubble of a pipeline: the share of the time that its ranks wait, by schedule.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from .. import parallel
from ..cli.config import Config, ScheduleName
from ..data.loader import source_of
from ..data.order import Batch
from ..model import evaluation
from ..model.gradients import clip, total_norm
from ..model.optimizer import NamedOptimizer
from ..parallel.base import Parts, Strategy, WholeModel
from ..parallel.fsdp import GradientSync
from ..parallel.local_sgd import LocalSgd
from ..parallel.pipeline import split, stages
from ..parallel.pipeline.schedule import Pipelined
from ..runtime.rank import RankInfo
from ..tasks.base import Task
from .counters import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STATE,
    Exchange,
    Flops,
    Memory,
    Traffic,
)
from .fake_group import StageInputs, fake_world, keep_buckets

ENOUGH = 2
"""The last micro-batch, which exchanges gradients, is different; those before it are all alike."""
TRAINING, EVALUATION = "training", "evaluation"

_TIME = {"FORWARD": 1.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": 1.0, "FULL_BACKWARD": 2.0}
"""In units of a forward pass: the gradients of inputs take as long, and those of weights too."""
_Action = tuple[str, int, int]
"""A pass of a micro-batch through a stage: (kind, stage, number of the micro-batch)."""


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """The cost of one optimizer step on one rank."""

    rank: int
    """Number of the rank."""
    micro_batches: int
    """Number of parts in which the rank processes its share."""
    micro_batch: int
    """Samples of the largest part."""
    eval_batch: int
    """Samples in an evaluation batch."""
    gradient_sync: GradientSync | None
    """When gradients are reduced, if parameters are sharded."""
    peak: str
    """When device memory peaks: in `training` or `evaluation`."""
    memory: Mapping[str, int]
    """Bytes of device memory at that peak by kind, see `counters`."""
    host_memory: Mapping[str, int]
    """Bytes of host memory at that peak, with `--cpu-offload`."""
    flops: float
    """Floating-point operations of matrix products and attention."""
    traffic: Mapping[Exchange, float]
    """Calls per step; a fraction for work that is not done in every step."""

    @property
    def total(self) -> int:
        """Bytes of the device at its peak."""
        return sum(self.memory.values())


class Rehearsal:
    """Rehearses the ranks of a plan, one after the other."""

    def __init__(self, config: Config, task: Task, rank_info: RankInfo) -> None:
        """Describe the plan; `rank_info` holds the number of ranks, and the size of the nodes."""
        self.layout = config.layout_on(rank_info)
        # The first two only change how a run starts, and the first needs the plan's devices.
        self._config = dataclasses.replace(config, meta_init=False, compile=False, dry_run=True)
        self._task, self._rank_info = task, rank_info
        self._sample = source_of(task.train()).take(torch.zeros(1, dtype=torch.int64))
        self._test_samples = len(source_of(task.test()))
        self._stage_inputs: StageInputs = {}

    def run(self) -> list[RankCost]:
        """Rehearse the rank with the most work in each stage.

        With `--cp-method allgather` that is the rank with the last part of a sequence.
        """
        layout = self.layout
        if layout.pp > 1 and self._config.pp_schedule not in split.ONE_STAGE:
            self._find_stage_inputs()
        last_part = (layout.cp - 1) * layout.tp
        stage_size = layout.world_size // layout.pp
        return [self._cost(stage * stage_size + last_part) for stage in range(layout.pp)]

    def _cost(self, rank: int) -> RankCost:
        share = max(1, math.ceil(self._config.global_batch / self.layout.shards))
        rank_info = dataclasses.replace(self._rank_info, rank=rank)
        memory, traffic, flops = Memory(), dict[Exchange, float](), 0.0
        with fake_world(rank_info, self._stage_inputs) as group, memory:
            parts = Parts(task=self._task, config=self._config, layout=self.layout, group=group)
            step = _Step(parts, memory)
            strategy = step.strategy
            count = strategy.micro_batches()
            size = math.ceil(share / count)
            steps = list(self._steps(strategy, count))
            # First run the one-time work: the optimizer's state, schedules, caches. PowerSGD starts
            # after some steps.
            once = 12 if self._config.comm_hook == "powersgd" else 1
            for batches, number, _ in steps[:1] * once:
                step.make(self._batch(size * batches), batches, number)
            memory.reset_peak()
            for batches, number, weight in steps:
                with Flops() as step_flops, Traffic() as step_traffic:
                    step.make(self._batch(size * batches), batches, number)
                flops += weight * step_flops.total
                for exchange, calls in step_traffic.calls.items():
                    traffic[exchange] = traffic.get(exchange, 0.0) + weight * calls
            on_host = STATE if self._config.cpu_offload else ()
            peaks = {TRAINING: memory.peak(without=on_host)}
            memory.reset_peak()
            eval_batch = self._eval_batch(strategy)
            strategy.evaluate(self._batch(eval_batch))
            peaks[EVALUATION] = memory.peak(without=on_host)
            gradient_sync = strategy.gradient_sync
            del step, strategy
        on_device = {
            when: {kind: size for kind, size in peak.items() if kind not in on_host}
            for when, peak in peaks.items()
        }
        when = max(peaks, key=lambda when: sum(on_device[when].values()))
        return RankCost(
            rank=rank,
            micro_batches=count,
            micro_batch=size,
            eval_batch=eval_batch,
            gradient_sync=gradient_sync,
            peak=when,
            memory=on_device[when],
            host_memory={kind: peaks[when][kind] for kind in on_host},
            traffic={exchange: calls for exchange, calls in traffic.items() if calls},
            flops=flops,
        )

    def _steps(self, strategy: Strategy, count: int) -> Iterator[tuple[int, int, float]]:
        """Choose the steps to rehearse: micro-batches, number of the step, and its weight.

        Each micro-batch after the first costs as much as a second one adds to a single one.
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

    def _find_stage_inputs(self) -> None:
        """Find the inputs of each stage, for ranks with several stages.

        Such a rank needs the results of other ranks before they are computed. So the same stages
        are first run once with one stage per rank.
        """
        with fake_world(self._rank_info, self._stage_inputs) as group:
            parts = Parts(task=self._task, config=self._config, layout=self.layout, group=group)
            stages.plan(self._task.model(), parts)  # refuses by the flags that were given
        config, count = self._config, split.stage_count(self._config.pp_schedule, self.layout.pp)
        micro_batches = split.micro_batches(config, self.layout)
        size = config.global_batch // self.layout.shards // micro_batches
        layout = dataclasses.replace(self.layout, pp=count)
        config = dataclasses.replace(config, pp=count, pp_schedule="GPipe", micro_batch=size)
        world_size = layout.world_size
        for stage in range(count):
            rank = stage * (world_size // count)
            rank_info = dataclasses.replace(self._rank_info, rank=rank, world_size=world_size)
            with fake_world(rank_info, self._stage_inputs) as group:
                parts = Parts(task=self._task, config=config, layout=layout, group=group)
                strategy = parallel.build(config.strategy_on(rank_info), parts)
                assert isinstance(strategy, Pipelined), "a layout with stages is a pipeline's"
                for samples in (size, self._eval_batch(strategy)):
                    strategy.passed(strategy._slice.of(self._batch(samples)).inputs)
                del strategy

    def _eval_batch(self, strategy: Strategy) -> int:
        share = math.ceil(self._test_samples / strategy.shards)
        return min(evaluation.batch_size(self._config, strategy), share)

    def _batch(self, size: int) -> Batch:
        return self._sample.mapped(
            lambda tensor: torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)
        )


class _Step:
    """The part of a training step that affects other ranks or memory."""

    def __init__(self, parts: Parts, memory: Memory) -> None:
        self._parts, self._memory = parts, memory
        self.strategy = parallel.build(parts.config.strategy_on(parts.group.rank_info), parts)
        if isinstance(self.strategy, WholeModel):
            keep_buckets(self.strategy.run)
        self._optimizer = NamedOptimizer(self.strategy.named_parameters(), parts.config)
        if parts.config.optimizer == "adamw" and not parts.config.cpu_offload:
            # Use one kernel for all, without temporary tensors, as for parameters on a GPU.
            for group in self._optimizer._optimizer.param_groups:
                group["fused"] = True
        self.strategy.bind(self._optimizer)
        memory.mark(self.strategy.model_state().values(), PARAMETERS)
        memory.mark(self._parameters(), PARAMETERS)

    def make(self, share: Batch, batches: int, number: int) -> None:
        strategy, config = self.strategy, self._parts.config
        strategy.begin_step(number)
        # Not 1, which would skip a multiplication that every real step makes.
        strategy.accumulate(share.split_into(batches), 0.5)
        # Loss, count, stop requests, whether other parameters than before are left out or written.
        self._parts.group.sum([0.0] * 5)
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


def bubbles(pp: int, micro_batches: int) -> dict[str, float]:
    """Return the bubble of each schedule that takes so many micro-batches."""
    return {
        name: bubble(name, pp, micro_batches)
        for name in get_args(ScheduleName)
        if split.accepts(name, pp, micro_batches)
    }


def bubble(schedule: str, pp: int, micro_batches: int) -> float:
    """Simulate torch's schedule, assuming equal stages and instant messages.

    >>> round(bubble("1F1B", 4, 12), 2)  # (4 - 1) / (12 + 4 - 1)
    0.2
    """
    queues = _actions(schedule, pp, micro_batches)
    clocks, work = [0.0] * pp, 0.0
    last = split.stage_count(schedule, pp) - 1
    # End time of a pass, by ("forward" or "backward", stage, number of the micro-batch).
    ends: dict[_Action, float] = {}

    def start_of(action: _Action) -> float | None:
        """Return the earliest start time of an action, if it is known."""
        kind, stage, number = action
        if kind == "FORWARD":
            return 0.0 if stage == 0 else ends.get(("forward", stage - 1, number))
        if kind == "BACKWARD_WEIGHT":
            return ends.get(("backward", stage, number))
        if stage == last:
            return ends.get(("forward", stage, number))
        return ends.get(("backward", stage + 1, number))

    while any(queues):
        before = work
        for rank, actions in enumerate(queues):
            while actions and (start := start_of(actions[0])) is not None:
                kind, stage, number = actions.pop(0)
                clocks[rank] = max(clocks[rank], start) + _TIME[kind]
                work += _TIME[kind]
                if kind != "BACKWARD_WEIGHT":
                    direction = "forward" if kind == "FORWARD" else "backward"
                    ends[direction, stage, number] = clocks[rank]
        assert before != work, f"schedule {schedule} waits for itself"
    return 1 - work / (pp * max(clocks))


def _actions(schedule: str, pp: int, micro_batches: int) -> list[list[_Action]]:
    if schedule not in split.ONE_STAGE:
        ranks = get_schedule_ops(schedule, pp, micro_batches)
        return [[flat for action in actions for flat in _flat(action)] for actions in ranks]
    # Not torch's list: for 1F1B, it misnumbers micro-batches on all ranks except the first.
    orders = []
    for rank in range(pp):
        forward = [("FORWARD", rank, number) for number in range(micro_batches)]
        # Run ahead by some forward passes, then alternate backward and forward.
        ahead = micro_batches if schedule == "GPipe" else pp - rank
        order = forward[:ahead]
        for number in range(micro_batches):
            order += [("FULL_BACKWARD", rank, number), *forward[ahead + number :][:1]]
        orders.append(order)
    return orders


def _flat(action: Any) -> Iterator[_Action]:
    """Put overlapping actions one after the other. Sums over ranks take no time."""
    if action is None:
        return
    if action.sub_actions:
        for part in action.sub_actions:
            yield from _flat(part)
    elif (kind := action.computation_type.name) in _TIME:
        yield kind, action.stage_index, action.microbatch_index
