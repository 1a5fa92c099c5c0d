"""The equality ladder: a layout's first steps beside those of one process, in the same run.

`climb()` starts some ranks and sends all cases of that world size through them, one after the
other. Each case makes real steps with the real `Trainer`; rank 0 makes the same steps alone. Where
every rank can have a GPU, it has one, and NCCL: as in a run.

All compute in double precision unless a test is about another one. There a fault and rounding lie
far apart, on any processor; in single precision they need not: what a sum is rounded to depends on
its order, and its order on the processor's vectors.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tests.train.support import shared_gpu
from tests.train.support.ranks import PATIENCE_S, on_ranks
from train import session, tasks
from train.cli.config import Config
from train.data.order import Batch, Samples
from train.loop import Trainer
from train.parallel.base import Parts
from train.parallel.layout import Layout
from train.proof.trial import config_of_one_process
from train.rundir.console import Console
from train.rundir.files import RunDirectory, TrainingProgress
from train.runtime.process_group import Alone, RankGroup, open_group
from train.runtime.rank import RankInfo
from train.runtime.signals import StopRequest
from train.tasks import Task

AnyTask = TypeVar("AnyTask", bound=Task)

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to arrange ranks."""

    name: str
    world_size: int
    config: Config
    """What the ranks do; the reference does the same without their layout."""
    reference: Mapping[str, object] = field(default_factory=dict)
    """What the reference does otherwise, such as cutting batches as the ranks cut them."""
    sabotage: str = ""
    """Python that plants a fault; ranks that have run it are changed for good."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The largest absolute differences to one process."""

    initial_weights: float
    loss: float
    gradients: float
    """Of all steps, relative to the largest entry of that step's gradient."""
    weights: float


class Recording:
    """A trainer's steps, with their inputs."""

    def __init__(self, trainer: Trainer) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        step = trainer.optimizer.step

        def recorded(lr: float | None = None) -> None:
            # What the optimizer is given: after scaling and clipping.
            named = trainer.strategy.named_parameters()
            self.gradients.append({n: whole(p.grad) for n, p in named if p.grad is not None})
            step(lr)

        trainer.optimizer.step = recorded  # type: ignore[method-assign]
        self.initial = weights_of(trainer)
        for _ in range(STEPS):
            trainer.train_step()
            self.losses.append(trainer.progress.metrics["loss"])
        self.final = weights_of(trainer)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {n: whole(t).clone() for n, t in trainer.strategy.model_state().items()}


def whole(tensor: Tensor) -> Tensor:
    """Put a sharded tensor together; all ranks of its mesh take part."""
    if hasattr(tensor, "device_mesh"):
        # From where its ranks talk: one that is offloaded lies elsewhere.
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return tensor.detach().double().cpu().clone()


def trainer_of(config: Config, layout: Layout, group: RankGroup, folder: Path) -> Trainer:
    """Assemble what a run would, without claiming a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    task = like_the_models(tasks.load(config.task))
    parts = Parts(task=task, config=config, layout=layout, group=group)
    return session.assemble(
        parts,
        identity={},
        progress=TrainingProgress(steps=STEPS),
        directory=RunDirectory(folder, group.rank_info),
        console=Console(rank=1),
        stop=StopRequest(),
    )


def like_the_models(task: AnyTask) -> AnyTask:
    """Give a task whose data have the type that models are made of; a Dataset's are left alone."""

    def converted(data: Batch | Samples) -> Batch | Samples:
        if not isinstance(data, Batch) or torch.get_default_dtype() == torch.float32:
            return data
        return data.mapped(
            lambda t: t.to(torch.get_default_dtype()) if t.is_floating_point() else t
        )

    train, test = task.train, task.test
    task.train = lambda: converted(train())  # type: ignore[method-assign]
    task.test = lambda: converted(test())  # type: ignore[method-assign]
    return task


def compare(case: Case, group: RankGroup, folder: Path) -> Differences | None:
    """Run a case; rank 0 reports its distance from one process."""
    layout = case.config.layout_on(group.rank_info)
    record = Recording(trainer_of(case.config, layout, group, folder / case.name))
    # Pipeline stages each know a part: put all ranks' together.
    initial = merged(group, record.initial)
    final = merged(group, record.final)
    gradients = [merged(group, step) for step in record.gradients]
    differences = None
    if group.rank_info.rank == 0:
        one = by_one_process(case, group, folder)
        differences = Differences(
            initial_weights=largest(initial, one.initial),
            loss=max(abs(a - b) for a, b in zip(record.losses, one.losses, strict=True)),
            gradients=max(
                largest(a, b) / max(t.abs().max().item() for t in b.values())
                for a, b in zip(gradients, one.gradients, strict=True)
            ),
            weights=largest(final, one.final),
        )
    group.sum([0.0])
    return differences


_references: dict[Config, Recording] = {}


def by_one_process(case: Case, group: RankGroup, folder: Path) -> Recording:
    """Make a case's steps as one process; several cases may have the same ones."""
    if case.sabotage:
        _references.clear()
    config = config_of_one_process(case.config)
    config = dataclasses.replace(config, **case.reference)  # type: ignore[arg-type]
    if config not in _references:
        rank_info = dataclasses.replace(group.rank_info, rank=0, world_size=1)
        one = Alone(rank_info=rank_info, device=group.device)
        _references[config] = Recording(
            trainer_of(config, Layout(), one, folder / f"{case.name}-alone")
        )
    return _references[config]


def merged(group: RankGroup, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every rank's tensors by name; of those that several have, the last one's."""
    return {name: t for rank in group.gather(mine) for name, t in rank.items()}


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def climb(cases: Sequence[Case], *, dtype: torch.dtype = torch.float64) -> dict[str, Differences]:
    """Run all cases of one world size, with models of some type; give the differences by name."""
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(
            cases[0].world_size, _climb, list(cases), Path(folder), dtype, connected=False
        )[0]
    return {one.name: far for one, far in zip(cases, found, strict=True) if far is not None}


def _climb(
    rank: int, cases: Sequence[Case], folder: Path, dtype: torch.dtype
) -> list[Differences | None]:
    torch.set_default_dtype(dtype)
    # As a user's own Python: a warning is no error.
    warnings.simplefilter("ignore")
    shared_gpu.become_a_host(rank)
    world_size = cases[0].world_size
    rank_info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launched=True,
        meeting=f"file://{folder}/meeting",
    )
    found = []
    # As long as all of it may take: the others wait while rank 0 compiles and makes the reference.
    with open_group(rank_info, Config(strategy="ddp", timeout_s=int(PATIENCE_S))) as group:
        for case in cases:
            exec(case.sabotage, {})
            found.append(compare(case, group, folder))
    return found
