"""A few steps on a few samples: by the strategy of a run, and by one process on the whole batch.

Both sides make steps of the real `Trainer`. Neither side has side effects: each uses a copy of the
task, separate samples and no run directory.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import parallel
from ..cli.config import Config
from ..data.loader import source_of
from ..data.order import Batch, Chance, SampleOrder, mixed, seed_generators
from ..loop import Trainer
from ..model import batchnorm
from ..model.gradients import LossScaler
from ..model.optimizer import NamedOptimizer
from ..model.trees import joined
from ..parallel.base import Parts, Strategy, Sums, WholeModel, full, is_sharded
from ..parallel.layout import Layout
from ..parallel.pipeline import split
from ..profiling.capture import Profiler
from ..rundir.console import Console
from ..rundir.files import RunDirectory, TrainingProgress
from ..runtime.process_group import Alone
from ..runtime.rank import RankInfo
from ..runtime.signals import StopRequest
from ..tasks.base import Task
from .comparison import STEPS, State

if TYPE_CHECKING:
    from ..checkpoints.saver import Saver
    from ..parallel.parameter_server.strategy import Served

SAMPLES_PER_PASS = 2
"""Most samples in a pass of a trial: layers such as BatchNorm fail with one."""
MICRO_BATCHES = 2
"""Most micro-batches in a step of a trial; a pipeline has as many as in training."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a strategy cuts a batch."""

    shards: int
    """Slices for different ranks or virtual shards."""
    micro_batches: int
    """Passes per slice in a trial."""
    real_micro_batches: int
    """Passes per slice in the run."""
    per_pass: int
    """Samples per pass in a trial."""

    @property
    def batch(self) -> int:
        """Samples per step in a trial."""
        return self.shards * self.micro_batches * self.per_pass

    @property
    def parts(self) -> int:
        """Passes per batch in the run."""
        return self.shards * self.real_micro_batches

    @classmethod
    def of(cls, config: Config, layout: Layout, strategy: str) -> "Cut":
        """Return how a strategy cuts the batches of a configuration."""
        shards = layout.shards
        if config.reduce == "exact":
            shards = config.virtual_shards
        elif strategy == "ps":
            shards = layout.world_size - 1 if config.ps_mode == "sync" else 1
        if layout.pp > 1:
            real = split.micro_batches(config, layout)
            micro = real
        else:
            real = config.micro_batches(shards)
            micro = min(real, MICRO_BATCHES)
        each = math.ceil(config.global_batch / shards / real)
        return cls(
            shards=shards,
            micro_batches=micro,
            real_micro_batches=real,
            per_pass=min(each, SAMPLES_PER_PASS),
        )


def few_samples(task: Task, config: Config, count: int) -> tuple[Batch, Batch]:
    """Read the first samples of a run twice, on the CPU, with the run's random numbers."""
    source = source_of(task.train(), task=task.name)
    weights = task.weights() if config.sampling == "balanced" else None
    order = SampleOrder(size=len(source), seed=config.seed, weights=weights)
    numbers = order.positions(0, count)

    def read() -> Batch:
        # A Dataset may write its next sample into the same memory.
        first = source.take(numbers, Chance(config.seed, 0))
        return first.mapped(lambda tensor: tensor.detach().cpu().clone())

    return read(), read()


def copied(task: Task) -> Task:
    """Copy a task with its models, parameters and containers; other attributes are shared."""
    made, memo = copy.copy(task), dict[int, Any]()
    for name, value in vars(task).items():
        if isinstance(value, nn.Module | nn.Parameter | dict | list | set):
            # Attributes that cannot be copied are shared, such as files or locks.
            with suppress(Exception):
                setattr(made, name, copy.deepcopy(value, memo))
    return made


def with_samples(task: Task, samples: Batch) -> Task:
    """Copy a task, and give it only these samples, in torch's default type."""
    made = copied(task)
    wide = torch.get_default_dtype()

    def converted(tensor: Tensor) -> Tensor:
        single = tensor.dtype == torch.float32 and wide == torch.float64
        return tensor.to(wide) if single else tensor

    few = samples.mapped(converted)
    given: dict[str, Any] = {"train": lambda: few, "test": lambda: few.part(0, 1)}
    for name, method in given.items():
        setattr(made, name, method)
    return made


def config_of_trial(config: Config, cut: Cut, strategy: str, *, exact_numbers: bool) -> Config:
    """Return the settings of a trial: those of the run, without deliberate rounding."""
    changes: dict[str, Any] = {
        "global_batch": cut.batch,
        "micro_batch": cut.per_pass,
        "workers": 0,
        "sampling": "uniform",
        "precision": "fp32",
        "comm_hook": "none",
        "compile": False,
        "profile": None,
        "warmup_steps": 0,
        "lr_schedule": "constant",
        "checkpoint_every": 0,
    }
    if strategy == "local-sgd":
        # Only with these settings do local steps equal those of one process.
        changes |= {"local_steps": 1, "local_start": 0, "clip_norm": None}
    if strategy == "local-sgd" or not exact_numbers:
        # The first steps of AdamW are the signs of gradients, which rounding may flip, and the
        # mean of its steps is not the step of the mean.
        changes |= {"optimizer": "sgd", "momentum": 0.9}
    return dataclasses.replace(config, **changes)


def config_of_one_process(config: Config) -> Config:
    """Return the settings of one process that makes the same steps."""
    axes = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "micro_batch", "devices"))
    plain = {
        name: getattr(Config, name)
        for name in ("pp_schedule", "cp_method", "loss_parallel", "reduce", "virtual_shards",
                     "cpu_offload", "meta_init", "comm_hook", "sync_batch_norm",
                     "activation_checkpointing", "gradient_sync", "ps_mode", "local_steps",
                     "local_start")
    }  # fmt: skip
    return dataclasses.replace(config, strategy="single", **axes, **plain)  # type: ignore[arg-type]


class OneProcess(WholeModel):
    """The plain model on the whole batch.

    Buffers that change in each pass change as often as under the strategy: micro-batch m of one
    process joins micro-batch m of all shards. With `apart`, which allows differences between
    shares, passes are those of the strategy, and moving buffers are averaged over shards.
    """

    def __init__(self, parts: Parts, cut: Cut, *, apart: bool) -> None:
        super().__init__(parts, parts.model())
        self._cut, self._apart = cut, apart

    def accumulate(self, micro_batches: Sequence[Batch], factor: float = 1.0) -> Sums:
        """Add the gradients of the summed loss."""
        self.start_training()
        (whole,) = micro_batches
        shares = [
            share.split_into(self._cut.micro_batches)
            for share in whole.split_into(self._cut.shards)
        ]
        if self._apart:
            return self._share_by_share(shares, factor)
        return self.total(
            [self.backward(_joined(parts), factor) for parts in zip(*shares, strict=True)]
        )

    def _share_by_share(self, shares: Sequence[Sequence[Batch]], factor: float) -> Sums:
        names = {name for name, _ in self.model.named_buffers()}
        start = {n: t.clone() for n, t in self.model.state_dict().items() if n in names}
        ends: list[dict[str, Tensor]] = []
        sums = []
        for share in shares:
            state = self.model.state_dict()
            for name, tensor in start.items():
                state[name].copy_(tensor)
            sums += [self.backward(batch, factor) for batch in share]
            ends.append({n: self.model.state_dict()[n].clone() for n in start})
        moving = {id(buffer) for buffer in batchnorm.moving_buffers(self.model)}
        state = self.model.state_dict(keep_vars=True)
        for name in start:
            if id(state[name]) in moving:
                stacked = torch.stack([end[name] for end in ends])
                state[name].copy_(
                    stacked.to(torch.promote_types(stacked.dtype, torch.float64)).mean(0)
                )
        return self.total(sums)


def _joined(batches: Sequence[Batch]) -> Batch:
    return Batch(
        inputs=joined([batch.inputs for batch in batches]),
        targets=joined([batch.targets for batch in batches]),
    )


class _NoWatch:
    """Compares no replicas: a proof compares each rank's copy with that of one process."""

    def due(self, step: int) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True)
class _Bench:
    """The attributes of a `Saver` that a trainer uses in a step; saves nothing."""

    strategy: Strategy
    optimizer: NamedOptimizer
    scaler: LossScaler
    directory: RunDirectory
    console: Console
    watch: _NoWatch = field(default_factory=_NoWatch)
    interval: None = None


class Trial:
    """Some steps of one side."""

    def __init__(self, strategy: Strategy) -> None:
        # Rank 1 writes nothing.
        silent = RunDirectory(Path(), RankInfo(rank=1))
        optimizer = NamedOptimizer(strategy.named_parameters(), strategy.parts.config)
        strategy.bind(optimizer)
        console = Console(rank=1)
        bench = _Bench(strategy, optimizer, LossScaler(enabled=False), silent, console)
        self.trainer = Trainer(
            saver=cast("Saver", bench),
            profiler=Profiler(None, silent, console),
            progress=TrainingProgress(steps=STEPS),
            stop=StopRequest(),
        )
        self.strategy, self._optimizer = strategy, optimizer

    def model(self) -> dict[str, Tensor]:
        """Return unsharded copies of this rank's parameters and saved buffers."""
        return {name: _whole(tensor) for name, tensor in self.strategy.model_state().items()}

    def step(self) -> State:
        """Make a step; all ranks of this side call it."""
        self._step()
        state = State(
            loss=self.trainer.progress.metrics.get("loss", math.nan),
            model=self.model(),
            optimizer={name: _whole(t) for name, t in self._optimizer.tensors().items()},
        )
        self.trainer.directory.flush()
        return state

    def _step(self) -> None:
        self.trainer.train_step()

    def close(self) -> None:
        """Close the trainer."""
        self.trainer.close()


class ServedTrial(Trial):
    """Steps of a parameter server, with collectives in its exchange.

    Trainers that do not wait for each other take turns, so no weights are stale.
    """

    strategy: "Served"

    def _step(self) -> None:
        trainer, strategy = self.trainer, self.strategy
        step, rank = trainer.progress.step, trainer.group.rank_info.rank
        weights = trainer.group.broadcast(strategy.copy_weights() if strategy.serves else [])
        mine = None
        in_turn = strategy.shards > 1 or step % strategy.trainers == rank - 1
        if not strategy.serves and in_turn:
            strategy.take_weights(weights)
            batch = trainer.feed.lone_batch(step * trainer.config.global_batch)
            seed_generators(mixed(trainer.seed, step), trainer.group.device)
            sums = strategy.accumulate(batch.split_into(trainer.micro_batches))
            moved = strategy.moved(weights)
            mine = (sums.loss.item(), sums.count, strategy.take_gradients(), moved)
        pieces = [piece for piece in trainer.group.gather(mine) if piece is not None]
        loss, count = sum(piece[0] for piece in pieces), sum(piece[1] for piece in pieces)
        if not strategy.serves:
            trainer.progress.step += 1
            trainer.progress.metrics["loss"] = loss / max(count, 1)
            return
        strategy.put_gradients([piece[2] for piece in pieces])
        trainer.update(loss, count, started=time.monotonic())
        strategy.move([piece[3] for piece in pieces])


def by_strategy(parts: Parts) -> Trial:
    """Set up the side of the strategy; all ranks call this."""
    name = parts.config.strategy_on(parts.group.rank_info)
    strategy = parallel.build(name, parts)
    return ServedTrial(strategy) if name == "ps" else Trial(strategy)


def parts_of_one_process(parts: Parts) -> Parts:
    """Return the parts for the same steps in one process, within a run of several ranks."""
    rank_info = dataclasses.replace(parts.group.rank_info, rank=0, world_size=1)
    return dataclasses.replace(
        parts,
        config=config_of_one_process(parts.config),
        layout=Layout(),
        group=Alone(rank_info=rank_info, device=parts.group.device),
    )


def by_one_process(parts: Parts, cut: Cut, *, apart: bool) -> Trial:
    """Set up the side of one process; only rank 0 calls this."""
    return Trial(OneProcess(parts_of_one_process(parts), cut, apart=apart))


def one_process_trains(parts: Parts) -> bool:
    """Whether one process can make the steps of a trial; a single rank may call this."""
    strategy = parts.config.strategy_on(parts.group.rank_info)
    try:
        cut = Cut.of(parts.config, parts.layout, strategy)
        samples, _ = few_samples(parts.task, parts.config, STEPS * cut.batch)
        sides = dataclasses.replace(
            parts,
            task=with_samples(parts.task, samples),
            config=config_of_trial(parts.config, cut, strategy, exact_numbers=True),
        )
        one = by_one_process(sides, cut, apart=False)
        for _ in range(STEPS):
            one.step()
        one.close()
    except Exception:  # of the user's own model, whatever it may be
        return False
    return True


def _whole(tensor: Tensor) -> Tensor:
    """Copy a tensor, gathered if it is sharded; all ranks of its mesh call this."""
    if is_sharded(tensor):
        # An offloaded tensor must be on the mesh's device type for the gather.
        tensor = full(tensor.to(tensor.device_mesh.device_type))
    return tensor.detach().clone()
