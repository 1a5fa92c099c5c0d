"""One process that cuts its batch in micro-batches: what mixes samples is named before training."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from tests.train.support import proved
from tests.train.support.making import config_of, group_of
from train.errors import StrategyError
from train.parallel.base import Parts
from train.proof import Verdict, prove
from train.proof.session import refusing_failures
from train.tasks.base import Task

COMMON = {"optimizer": "adamw", "lr": 0.01, "global_batch": 12, "micro_batch": 3}


def parts_of(task: Task, **chosen: object) -> Parts:
    """This process alone, which cuts its batch."""
    config, group = config_of(**{"strategy": "single", **COMMON, **chosen}), group_of(0, 1)
    return Parts(task=task, config=config, layout=config.layout_on(group.rank_info), group=group)


def verdict_of(task: Task, **chosen: object) -> Verdict:
    return prove(parts_of(task, **chosen))


RIGHT = (
    proved.Plain, proved.Dropped, proved.Tied, proved.Recurrent, proved.Experts, proved.Meant,
    proved.Parametrized, proved.Moving, proved.Single, proved.MeantByToken, proved.Normalised,
    proved.Half, proved.Attentive,
)  # fmt: skip


@pytest.mark.parametrize("task", RIGHT)
def test_a_model_that_may_be_cut_is_let_through(task: type[Task]) -> None:
    verdict = verdict_of(task())
    assert verdict.holds, verdict
    assert verdict.steps == 3 and verdict.samples == 4 and verdict.seconds > 0


MIXING: dict[type[Task], str] = {
    proved.Mean: r"the batch is split into 4 passes \(1 shard x 4 micro-batches\), and loss\(\) "
    r"gave \S+ for 8 samples, and \S+ and \S+ for 2 and 6 of them: the mean over the samples, not "
    r"the sum; return the sum .*",
    proved.MeanByToken: r".* the mean over the items that count\(\) counts, not the sum; .*",
    proved.Contrastive: r".*loss\(\) gave .*, which do not add up; .*--accept loss-mixes-samples.*",
    proved.Penalised: r".*loss\(\) gave .*, which do not add up; .*penalties.*",
    proved.Balanced: r".*loss\(\) gave .*, which do not add up; .*",
    proved.Centred: r".*and layer '1' \(Centre\) gives other outputs for a sample with other "
    r"samples beside it; .*--accept layer-mixes-samples",
    proved.CentredByHand: r".*and the forward\(\) of the model, before 'net.0', gives other .*",
    proved.Capped: r".*and layer '1' \(Cap\) gives other outputs for a sample with .*",
    proved.Normed: r".*and layer '1' \(BatchNorm1d\) normalises over the samples of one pass; use "
    r"--sync-batch-norm without micro-batches, .* --accept batch-norm",
}


@pytest.mark.parametrize("task", MIXING)
def test_what_mixes_samples_is_refused_by_name(task: type[Task]) -> None:
    verdict = verdict_of(task())
    assert re.fullmatch(MIXING[task], verdict.problem), verdict
    assert verdict.difference is None
    # With the whole batch in one pass, it trains what is written.
    assert verdict_of(task(), micro_batch=None).holds


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (proved.Normed, "batch-norm"),
        (proved.Centred, "layer-mixes-samples"),
        (proved.Contrastive, "loss-mixes-samples"),
    ],
)
def test_a_difference_that_is_wanted_is_accepted_by_its_name_alone(
    task: type[Task], name: str
) -> None:
    verdict = verdict_of(task(), accept=name)
    assert verdict.holds, verdict
    assert verdict.accepted == (name,)
    others = {"batch-norm", "layer-mixes-samples", "loss-mixes-samples"} - {name}
    assert verdict_of(task(), accept=",".join(others)).problem


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (proved.Shuffled, "the model or the loss draws random numbers by randperm, and .*"),
        (proved.DrawnByNumpy, r"the model or the loss draws random numbers by numpy\.random, .*"),
        (proved.Unseeded, "a sample of the training data is another one each time it is read; .*"),
    ],
)
def test_random_numbers_that_nobody_can_repeat_are_named(task: type[Task], text: str) -> None:
    verdict = verdict_of(task())
    assert re.fullmatch(text, verdict.missing), verdict
    assert not verdict.holds


def test_activations_that_are_computed_again_start_from_the_same_buffers() -> None:
    assert verdict_of(proved.Normalised(), activation_checkpointing=True).holds


def test_a_proof_that_would_take_long_is_not_made() -> None:
    missing = prove(parts_of(proved.Plain()), patience_s=0).missing
    assert re.fullmatch(r"it would take about \d+ s; --verify starts it anyway", missing)


def test_a_model_that_fails_is_left_to_the_run() -> None:
    class Failing(proved.Plain):
        def between(self) -> torch.nn.Module:
            return torch.nn.Linear(3, 3)

    missing = verdict_of(Failing()).missing
    assert missing.startswith("one process cannot make a step with this model (RuntimeError: mat1")


def test_an_error_that_one_process_has_too_stays_as_it_is() -> None:
    class Failing(proved.Plain):
        def between(self) -> torch.nn.Module:
            return torch.nn.Linear(3, 3)

    parts = parts_of(Failing())
    with pytest.raises(RuntimeError, match="mat1"), refusing_failures(parts):
        parts.model()(parts.task.train().inputs)  # type: ignore[union-attr]
    # Nobody has asked one process.
    parts = parts_of(proved.Plain(), verify=False)
    with pytest.raises(KeyError), refusing_failures(parts):
        raise KeyError("weight")
    with pytest.raises(StrategyError), refusing_failures(parts_of(proved.Plain())):
        raise KeyError("weight")


def test_nothing_of_the_process_or_the_task_changes() -> None:
    class Noting(proved.Plain):
        """Keeps what it has seen, and draws random numbers."""

        def between(self) -> torch.nn.Module:
            return proved.Dropped().between()

        def __init__(self) -> None:
            self.seen: list[float] = []

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.seen.append(float(outputs.detach().sum()))
            return super().loss(outputs, targets)

    torch.manual_seed(1)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    task = Noting()
    assert verdict_of(task).holds
    assert task.seen == []
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]
