"""Layers that a strategy or an option cannot take: refused by name before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.train.support.changed import changed
from tests.train.support.ladder import Case, climb
from tests.train.support.making import refusal, trainer_for
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import Batch
from train.parallel.pipeline import split
from train.parallel.sparse_exchange import SparseGradients
from train.rundir.console import Console
from train.tasks import Task

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

NAME = f"{__file__}:"
PLAIN: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}


class Deep(Task):
    """Fit the sum of numbers, at each of three times."""

    name = "deep"

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def train(self) -> Batch:
        inputs = torch.randn(24, 3, 4, generator=torch.Generator().manual_seed(1))
        return Batch(inputs=inputs, targets=inputs.cumsum(-1))

    test = train

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum()

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> dict[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"1": ColwiseParallel(), "2": RowwiseParallel()}


class Twice(Deep):
    def pieces(self, model: nn.Module) -> Sequence[str]:
        return ["0", "1", "2", "1", "3"]


class Handing(Deep):
    """Hands a feature to the loss by a hook."""

    feature: Tensor

    def model(self) -> nn.Module:
        model = super().model()
        keep = lambda layer, given, out: setattr(self, "feature", out)  # noqa: E731  # as written
        model.get_submodule("0").register_forward_hook(keep)
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = super().loss(outputs, targets) + self.feature.square().sum()
        return loss


class Hooking(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient / 2)  # type: ignore[no-untyped-call]
        return outputs


class Checkpointing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.requires_grad:
            return super().forward(inputs)
        outputs: Tensor = checkpoint(super().forward, inputs, use_reentrant=True)
        return outputs


def tie(model: nn.Module) -> None:
    """Tie the first and the last of three layers that are a stage, of twelve."""
    for number in range(4, 12):
        model.add_module(str(number), nn.Linear(4, 4))
    model.get_submodule("5").weight = model.get_parameter("3.weight")


def extra(value: Tensor) -> Callable[[nn.Module], object]:
    return lambda model: model.get_submodule("2").register_parameter("extra", nn.Parameter(value))


Parametrized = changed(Deep, lambda model: parametrizations.weight_norm(model.get_submodule("1")))
Mixed = changed(Deep, extra(torch.zeros(4, dtype=torch.float16)))
Hollow = changed(Deep, extra(torch.zeros(0, 4)))
Hooked = changed(Deep, lambda model: model.set_submodule("1", Hooking(4, 4)))
Tied = changed(Deep, tie)
Repeating = changed(Deep, lambda model: model.set_submodule("1", Checkpointing(4, 4)))
Watched = changed(
    Deep, lambda model: model.get_submodule("1").register_full_backward_hook(lambda *_: None)
)


class Words(Deep):
    """Fit a number for each of eight words."""

    sparse = True

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, sparse=self.sparse), nn.Linear(4, 1))

    def train(self) -> Batch:
        words = torch.arange(24) % 8
        return Batch(inputs=words, targets=words[:, None].to(torch.get_default_dtype()))

    test = train


class Reading(Words):
    """Its loss reads the weights that have sparse gradients."""

    def model(self) -> nn.Module:
        self.net = super().model()
        return self.net

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(outputs, targets) + self.net.get_parameter("0.weight").square().sum()


class Dense(Words):
    sparse = False


class ByHand(Words):
    def model(self) -> nn.Module:
        return Looked()


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(8, 1))

    def forward(self, words: Tensor) -> Tensor:
        return functional.embedding(words, self.rows, sparse=True)


class Weighing(Deep):
    """Weighs its loss by a parameter that the model does not have."""

    def __init__(self) -> None:
        self.scales = [nn.Parameter(torch.ones(1))]
        self.teacher = nn.Linear(4, 4)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = (outputs - targets * self.scales[0]).square().sum()
        return loss


DDP: dict[str, object] = {"strategy": "ddp"}
ZERO_BUBBLE: dict[str, object] = {
    "strategy": "pp", "micro_batch": 2, "pp_schedule": "ZBVZeroBubble",
}  # fmt: skip
SPARSE = (
    "task 'deep': layer '0' (Embedding, sparse=True) has sparse gradients, which cannot be "
    "combined with {}; use dense ones (sparse=False), or --optimizer sgd --momentum 0 "
    "--weight-decay 0 with --strategy ddp"
)
REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("Words", {"strategy": "fsdp"}, SPARSE.format("--strategy fsdp")),
    ("Words", {"strategy": "local-sgd"}, SPARSE.format("--strategy local-sgd")),
    ("Words", {"strategy": "pp", "micro_batch": 4}, SPARSE.format("--strategy pp")),
    (
        "Mixed",
        {"strategy": "fsdp"},
        "task 'deep': sharded data parallel reduces the gradients of piece '2' together, which are "
        "of several types ('2.weight' of float32 and '2.extra' of float16): make them one type, "
        "have pieces() name a module around each, or use --strategy ddp",
    ),
    (
        "Hollow",
        {"strategy": "fsdp"},
        "task 'deep': parameter '2.extra' of shape [0, 4] is empty, and sharded data parallel "
        "reduces no empty gradient; leave the parameter out, or use --strategy ddp",
    ),
    (
        "Parametrized",
        {"tp": 2},
        "--tp 2: tensor_plan() of task 'deep' cuts layer '1', but a "
        "parametrization (weight_norm, orthogonal, ...) computes its weight as a whole: leave "
        "'1' out of the plan, or use --strategy fsdp",
    ),
    (
        "Twice",
        {"strategy": "pp", "micro_batch": 4},
        "task 'deep': pieces() names '1' twice, and each piece has one place when a model is cut: "
        "register the module under a second name (an nn.Sequential may hold it twice), or have "
        "pieces() name a module around both uses",
    ),
    (
        "Handing",
        {"strategy": "pp", "micro_batch": 4},
        "--pp 2: loss() of task 'deep' fails where only the outputs of the model are known "
        "(AttributeError: 'Handing' object has no attribute 'feature'); layer '0' has a forward "
        "hook, and what that hands to the loss stays on the rank of the layer's stage: return it "
        "from the model, or leave out --pp",
    ),
    (
        "Hooked",
        ZERO_BUBBLE,
        "--pp-schedule ZBVZeroBubble: the model of task 'deep' registers a hook on an activation "
        "in layer '1', but the backward pass of this schedule goes through a stage in two parts; "
        "use another --pp-schedule, such as 1F1B",
    ),
    (
        "Watched",
        ZERO_BUBBLE,
        "--pp-schedule ZBVZeroBubble: the model of task 'deep' has a backward hook on layer '1', "
        "but the backward pass of this schedule goes through a stage in two parts; use another "
        "--pp-schedule, such as 1F1B",
    ),
    (
        "Repeating",
        ZERO_BUBBLE,
        "--pp-schedule ZBVZeroBubble: the model of task 'deep' checkpoints its activations in "
        "layer '1' with use_reentrant=True, but the backward pass of this schedule goes through a "
        "stage in two parts; use another --pp-schedule, such as 1F1B",
    ),
    (
        "Tied",
        ZERO_BUBBLE,
        "--pp-schedule ZBVZeroBubble: the model of task 'deep' uses parameter '3.weight' before "
        "and after others of a stage, but the backward pass of this schedule goes through a stage "
        "in two parts; use another --pp-schedule, such as 1F1B",
    ),
    ("Repeating", {"strategy": "pp", "micro_batch": 4}, ""),
    ("Hollow", DDP, ""),
    *((task, DDP, "") for task in ("Words", "Reading")),
    (
        "ByHand",
        DDP,
        "task 'deep': parameter 'rows' has sparse gradients. --strategy ddp exchanges them only "
        "for an nn.Embedding or nn.EmbeddingBag beside other layers: use one instead of "
        "functional.embedding(), or dense gradients (sparse=False)",
    ),
]


def refusals(rank: int, folder: Path) -> tuple[list[str], list[list[float]]]:
    """What each case says; and the mean of gradients where rank 1 has used no row."""
    said = [
        refusal(rank, 2, folder / f"{number}", steps=1, **PLAIN | {"task": NAME + task} | chosen)
        for number, (task, chosen, _) in enumerate(REFUSED)
    ]
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    nn.init.ones_(model[1].weight)  # type: ignore[arg-type]
    model(torch.tensor([1, 1, 3])[: 3 * (1 - rank)]).sum().backward()
    SparseGradients(model).average()
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None and gradient.is_sparse
    return said, gradient.to_dense().tolist()


def test_what_a_strategy_cannot_take_is_refused_by_name(tmp_path: Path) -> None:
    wanted = [message for *_, message in REFUSED]
    for said, mean in on_ranks(2, refusals, tmp_path):
        assert said == wanted
        assert mean == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("chosen", "flags"),
    [
        ({"optimizer": "adamw"}, "--optimizer adamw"),
        ({"momentum": 0.9, "weight_decay": 0.1}, "--momentum 0.9, --weight-decay 0.1"),
        ({"clip_norm": 1.0, "precision": "fp16"}, "--clip-norm, --precision fp16"),
        ({"reduce": "exact", "virtual_shards": 2}, "--reduce exact"),
    ],
)
def test_sparse_gradients_are_refused_before_a_step_where_an_option_cannot_take_them(
    tmp_path: Path, chosen: dict[str, object], flags: str
) -> None:
    words = {**PLAIN, "task": f"{NAME}Words", **chosen}
    assert refusal(0, 1, tmp_path, **words) == SPARSE.format(flags)
    rows = {**PLAIN, "task": f"{NAME}ByHand", "momentum": 0.9}
    by_hand = refusal(0, 1, tmp_path, steps=1, **rows)
    assert by_hand.startswith(
        "task 'deep': parameter 'rows' has sparse gradients, which cannot be combined"
    )


def test_sparse_gradients_train_as_dense_ones_do(tmp_path: Path) -> None:
    ends = []
    for name in ("Words", "Dense"):
        # Uneven parts: gradients are scaled once more.
        trainer = trainer_for(0, 1, tmp_path / name, task=NAME + name, micro_batch=3, **PLAIN)
        losses = []
        for _ in range(3):
            trainer.train_step()
            losses.append(trainer.progress.metrics["loss"])
        ends.append(losses)
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    assert ends[0][2] < ends[0][0]


def test_the_last_layer_of_a_stage_may_be_linear_under_every_schedule() -> None:
    """For inputs of three dimensions it gives a view, which torch's schedules detach in place."""
    chosen: dict[str, Any] = {"strategy": "pp", "global_batch": 8, "micro_batch": 1}
    chosen |= {"task": NAME + "Deep", "optimizer": "sgd", "lr": 0.01}
    cases = [
        Case(name=schedule, world_size=2, config=Config(**{**chosen, "pp_schedule": schedule}))
        for schedule in split.TWO_PASSES
    ]
    for name, far in climb(cases).items():
        assert max(far.loss, far.gradients, far.weights) <= 1e-9, name


def test_a_parameter_of_the_loss_that_nothing_trains_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_for(0, 1, tmp_path, task=NAME + "Weighing", **PLAIN)
    trainer.console = Console(rank=0)
    trainer.progress.steps = 1
    trainer.saver.save = lambda *_, **__: None  # type: ignore[method-assign]
    trainer.run()
    said = capsys.readouterr().out
    assert said.startswith("the loss gives a gradient to scales[0] of the task, which nothing ")
    assert "teacher" not in said
