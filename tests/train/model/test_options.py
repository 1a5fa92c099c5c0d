"""Options of the command line on models that have little or no use for them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.train.support.making import config_of, trainer_for
from train.data.order import Batch
from train.errors import UsageError
from train.inference.session import infer
from train.model import dropout
from train.model.prepare import prepare
from train.rundir.console import Console
from train.runtime.rank import RankInfo
from train.runtime.signals import StopRequest
from train.tasks import Task

NAME = f"{__file__}:"


class Plain(Task):
    """Fit a sum, by a model without any option's layers."""

    name = "plain"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def train(self) -> Batch:
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return Batch(inputs=inputs, targets=inputs.sum(1, keepdim=True))

    test = train

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum()


class Masked(Plain):
    """Counts in a tensor."""

    def count(self, targets: Tensor) -> int:
        return (targets == targets).sum()  # type: ignore[return-value]  # as people write it


class Untested(Plain):
    def test(self) -> Batch:
        return self.train().part(0, 0)


class Warm(Plain):
    """Begins with weights that were trained before."""

    def model(self) -> nn.Module:
        model = super().model()
        cpu = torch.device("cpu")
        weights = {n: torch.ones_like(t, device=cpu) for n, t in model.state_dict().items()}
        model.load_state_dict(weights)
        return model


class Whole(Plain):
    def model(self) -> nn.Module:
        return nn.Linear(4, 1)


class Double(Plain):
    def model(self) -> nn.Module:
        return super().model().double()


class Own(nn.Module):
    """Drops by a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.1


class Owning(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1), Own())


@pytest.mark.parametrize(
    ("task", "chosen", "message"),
    [
        (Plain(), {"dropout": 0.5}, "--dropout 0.5: the model of task 'plain' has no dropout "
            "layer; leave it out"),
        (Owning(), {"dropout": 0.5}, "--dropout 0.5: the model of task 'plain' has no dropout "
            "layer, and does not reach 1.attention_dropout; leave it out"),
        (Plain(), {"sync_batch_norm": True}, "--sync-batch-norm has no effect, as the model of "
            "task 'plain' has no batch normalisation; leave it out"),
        (Whole(), {"activation_checkpointing": True}, "--activation-checkpointing saves no "
            "memory, as the model of task 'plain' is one piece: have pieces() name its parts, one "
            "after the other; leave it out"),
        (Double(), {"precision": "bf16"}, "--precision bf16 has no effect, as the model of task "
            "'plain' is of float64, which autocast leaves alone; leave it out"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(
    task: Task, chosen: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        prepare(task.model(), task, config_of(**chosen))
    assert str(caught.value) == message


def test_dropout_reaches_every_layer_of_torch_and_names_what_it_does_not() -> None:
    model = nn.Sequential(
        nn.Dropout(0.1), nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1),
        nn.LSTM(4, 4, num_layers=2, dropout=0.1), nn.LSTM(4, 4), nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8), Own(),
    )  # fmt: skip
    dropout.apply(model, 0.5, task="plain")
    layers = [model[0].p, model[1].p, model[2].p, model[3].p, model[4].dropout, model[6].dropout]
    assert layers == [0.5] * 6
    assert model[5].dropout == 0.0
    deep = model[7]
    assert isinstance(deep, nn.TransformerEncoderLayer)
    assert (deep.self_attn.dropout, deep.dropout.p, deep.dropout1.p) == (0.5, 0.5, 0.5)
    assert dropout.describe(model) == (
        "holds for 0, 1, 2, 3 and 6 more, and does not reach 8.attention_dropout"
    )


def test_a_count_may_be_a_tensor_and_a_test_set_empty(tmp_path: Path) -> None:
    plain, masked, untested = (
        trainer_for(0, 1, tmp_path / name, task=NAME + name, steps=2)
        for name in ("Plain", "Masked", "Untested")
    )
    for trainer in (plain, masked, untested):
        trainer.train_step()
    assert plain.progress.metrics == masked.progress.metrics == untested.progress.metrics
    assert plain.measure() == masked.measure() != {}
    assert untested.measure() == {}
    assert untested.evaluate()
    config = config_of(task=f"{NAME}Untested", evaluate_only=True)
    with pytest.raises(UsageError, match=r"^--evaluate-only: test\(\) of task .* has no samples$"):
        infer(config, RankInfo(), StopRequest(), Console(rank=0))


def test_a_model_that_loads_weights_makes_no_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = trainer_for(0, 1, tmp_path, task=NAME + "Warm", steps=2)
        assert trainer.task.identity()["parameters"] == 25
    weights = trainer.strategy.model_state()
    assert all(bool((tensor == 1.0).all()) for tensor in weights.values())
