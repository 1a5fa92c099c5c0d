"""One process, several devices: by hand, and with nn.DataParallel."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.config import Config
from train.data import Batch
from train.distributed import Group
from train.environment import Place
from train.errors import UsageError
from train.layout import Layout
from train.strategies.base import Parts, WholeModel
from train.strategies.dataparallel import Threaded
from train.strategies.manual import Manual
from train.strategies.single import Single
from train.tasks.base import Classifier
from train.tasks.chars import Chars
from train.tasks.digits import Digits

Making = Callable[[Parts], WholeModel]
HERE = torch.device("cpu")
STEPS = 3


def parts_of(task: Classifier, **config: Any) -> Parts:
    return Parts(
        task=task,
        config=Config(**config),
        layout=Layout(),
        group=Group(place=Place(), device=HERE),
    )


def train(strategy: WholeModel) -> dict[str, Tensor]:
    """Make some steps, and give everything that came of them."""
    batch = strategy.task.train()
    assert isinstance(batch, Batch)
    optimizer = torch.optim.AdamW([p for _, p in strategy.named_parameters()], lr=1e-3)
    found = {f"start {name}": tensor.clone() for name, tensor in strategy.model_state().items()}
    for step in range(STEPS):
        sums = strategy.accumulate(batch.part(8 * step, 8 * step + 8).split_into(3))
        found[f"loss {step}"] = sums.loss
        strategy.scale_gradients(1 / sums.count)
        for name, parameter in strategy.named_parameters():
            assert parameter.grad is not None
            found[f"grad {step} {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    tally = strategy.evaluate(batch.part(0, 13))
    found |= {"test loss": tally.loss, "test score": tally.score}
    return found | strategy.model_state()


@pytest.mark.parametrize("task", [Digits, Chars])
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [(Manual, "cpu,cpu"), (Manual, "cpu, cpu ,cpu"), (Manual, None), (Threaded, None)],
)
def test_training_on_a_list_of_devices_equals_one_device(
    task: type[Classifier], strategy: Making, devices: str | None
) -> None:
    parts = parts_of(task(), strategy="manual", devices=devices)
    several, one = train(strategy(parts)), train(Single(parts))
    # The same operations in the same order: the same bits.
    assert several.keys() == one.keys()
    assert all(torch.equal(several[name], one[name]) for name in one)


def test_pieces_fetch_their_inputs_to_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # `meta` computes shapes without numbers: a second kind of device that every machine has.
    elsewhere = torch.device("meta")
    monkeypatch.setattr("train.strategies.manual.devices", lambda listed: [HERE, elsewhere])
    strategy = Manual(parts_of(Digits(), devices="pretended"))
    kinds = [parameter.device.type for _, parameter in strategy.named_parameters()]
    assert kinds == ["cpu", "cpu", "meta", "meta", "meta", "meta"]
    batch = Digits().train().part(0, 4)
    # So did the targets, or the loss could not be computed.
    assert strategy.evaluate(batch).loss.device == elsewhere


def test_manual_says_which_device_holds_what() -> None:
    strategy = Manual(parts_of(Digits(), devices="cpu,cpu"))
    assert strategy.describe() == ("cpu: 8,320 parameters (0); cpu: 17,802 parameters (1, 2, 3, 4)")


@pytest.mark.parametrize(
    ("strategy", "devices", "says"),
    [
        (Manual, "cpu,gpu", "--devices cpu,gpu: unknown device 'gpu'; use 'cpu', or 'cuda:0'"),
        (Manual, "cpu,", "--devices cpu,: unknown device ''"),
        (Manual, "cpu:1", "unknown device 'cpu:1'"),
        (Manual, "cuda:99", "--devices cuda:99: there is no 'cuda:99': this process sees "),
        (Threaded, "cuda:99,cuda:99", "there is no 'cuda:99'"),
        (
            Manual,
            "cpu,cpu,cpu,cpu",
            "--devices cpu,cpu,cpu,cpu: the model is to be cut in 4 parts, but only 3 of its "
            "pieces ('0', '1', '2', '3', '4') have parameters; ask for at most 3",
        ),
        (Threaded, "cpu,cpu", "--devices cpu,cpu: nn.DataParallel knows GPUs only"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(strategy: Making, devices: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        strategy(parts_of(Digits(), devices=devices))


def test_dataparallel_tells_what_the_first_device_carries() -> None:
    strategy = Threaded(parts_of(Digits(), optimizer="adamw"))
    weights = sum(p.numel() * 4 for p in strategy.model.parameters()) / 2**20
    strategy.accumulate([Digits().train().part(0, 64)])
    if torch.cuda.is_available():
        assert "peak memory: cuda:0" in strategy.report()
        return
    assert "just runs the model" in strategy.describe()
    assert f"keeps {4 * weights:,.2f} MiB" in strategy.report()
    assert f"borrows {2 * weights:,.2f} MiB" in strategy.report()
    assert "gathers the outputs of all, 0.00 MiB" in strategy.report()
    plain = Threaded(parts_of(Digits(), optimizer="sgd"))
    assert f"keeps {2 * weights:,.2f} MiB" in plain.report()


def test_wrong_form_mean_of_the_devices_means_weighs_samples_differently() -> None:
    """What is gathered must be outputs, not losses: shares differ in size."""
    model = nn.Linear(64, 10)
    batch = Digits().train().part(0, 5)
    loss = nn.functional.cross_entropy
    shares = batch.split_into(2)
    assert [len(share) for share in shares] == [2, 3]
    of_means = torch.stack([loss(model(s.inputs), s.targets) for s in shares]).mean()
    of_outputs = torch.cat([model(s.inputs) for s in shares])
    whole = loss(model(batch.inputs), batch.targets)
    torch.testing.assert_close(loss(of_outputs, batch.targets), whole)
    assert abs(of_means - whole) > 1e-4


def test_dataparallel_brings_batches_to_its_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which need not be the one that this process calls `cuda`.
    elsewhere = torch.device("meta")
    monkeypatch.setattr("train.strategies.dataparallel.devices", lambda listed: [elsewhere])
    strategy = Threaded(parts_of(Digits(), devices="pretended"))
    batch = Digits().train().part(0, 4)
    assert strategy.evaluate(batch).loss.device == elsewhere
    assert strategy.accumulate([batch]).loss.device == elsewhere


def test_dataparallel_on_the_cpu_needs_none_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    strategy = Threaded(parts_of(Digits(), devices="cpu"))
    assert strategy.accumulate([Digits().train().part(0, 4)]).loss.device == HERE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        (Manual, "cpu,cuda:0"),
        (Manual, "cuda:0"),
        (Threaded, "cuda:0"),
        (Threaded, "cpu"),
        pytest.param(Manual, "cuda:0,cuda:1", marks=pytest.mark.gpu(2)),
        pytest.param(Threaded, "cuda:0,cuda:1", marks=pytest.mark.gpu(2)),
        pytest.param(Threaded, "cuda:1", marks=pytest.mark.gpu(2)),
    ],
)
def test_gpus_equal_one_device(strategy: Making, devices: str) -> None:
    parts = parts_of(Digits(), devices=devices)
    there = dataclasses.replace(parts, group=Group(place=Place(), device=torch.device("cuda", 0)))
    several, one = train(strategy(there)), train(Single(parts))
    for name in one:
        torch.testing.assert_close(several[name].cpu(), one[name], atol=1e-5, rtol=1e-5)
