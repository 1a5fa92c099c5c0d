"""Models that draw random numbers of their own, from any library, in training and evaluation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.train.support.making import config_of, group_of, trainer_for
from tests.train.support.reading import same
from train import tasks
from train.data.loader import source_of
from train.data.order import Batch
from train.inference.session import prepare
from train.loop import Trainer
from train.model.evaluation import batch_size, measure
from train.tasks import Task

STEPS = 4


class Noisy(nn.Module):
    """Adds noise of all three libraries, in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 1)
        nn.init.constant_(self.read.bias, random.random() + np.random.rand())

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.rand_like(inputs) + random.random() + np.random.rand()
        read: Tensor = self.read(inputs + noise)
        return read


class Noise(Task):
    """Fit random numbers by a noisy model, with a loss that draws, too."""

    def model(self) -> nn.Module:
        return Noisy()

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(1)
        return Batch(inputs=torch.randn(24, 4, generator=generator), targets=torch.zeros(24, 1))

    test = train

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets - random.random()).square().sum()


NAME = f"{__file__}:Noise"
CHOSEN: dict[str, Any] = {"task": NAME, "optimizer": "sgd", "momentum": 0.0, "steps": STEPS}


def disturb() -> None:
    """Leave the generators as another process would."""
    torch.seed()
    random.seed()
    np.random.seed()


def made(folder: Path, **chosen: object) -> Trainer:
    disturb()
    trainer = trainer_for(0, 1, folder, **{**CHOSEN, **chosen})
    disturb()
    return trainer


@pytest.mark.parametrize(
    "chosen",
    [{"strategy": "single", "micro_batch": 4}, {"reduce": "exact", "virtual_shards": 2}],
    ids=["single", "exact"],
)
def test_a_runs_random_numbers_depend_on_its_step_alone(
    tmp_path: Path, chosen: dict[str, object]
) -> None:
    first, again = made(tmp_path / "first", **chosen), made(tmp_path / "again", **chosen)
    assert same(first.strategy.model_state(), again.strategy.model_state())
    for number in range(STEPS):
        if number == STEPS // 2:
            # As a resume would.
            resumed = made(tmp_path / "resumed", **chosen)
            resumed.strategy.load_model_state(first.strategy.model_state())
            resumed.progress.step = first.progress.step
            resumed.progress.samples_seen = first.progress.samples_seen
        for trainer in (first, again, *([resumed] if number >= STEPS // 2 else [])):
            trainer.train_step()
            disturb()
    assert first.progress.metrics == again.progress.metrics == resumed.progress.metrics
    assert same(first.strategy.model_state(), resumed.strategy.model_state())


def test_noise_in_an_evaluation_is_the_same_each_time_and_for_evaluate_only(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    measured = trainer.measure()
    disturb()
    assert trainer.measure() == measured
    task, group = tasks.load(NAME), group_of(0, 1)
    test = source_of(task.test())
    config = config_of(**CHOSEN, evaluate_only=True)
    strategy = prepare(config, task, group, test)
    disturb()
    batch = batch_size(config, strategy)
    assert measure(task, strategy, group, test, batch=batch) == measured
