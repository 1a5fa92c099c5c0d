"""Tasks whose inputs, targets and outputs are trees of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from train.data.order import Batch, Samples
from train.layers import CausalAttention, Positions
from train.model.trees import Tree
from train.tasks import Task

TRAINED, TESTED, WIDTH, KINDS = 24, 10, 8, 3


class Marks(NamedTuple):
    first: Tensor
    second: Tensor


class Read(nn.Module):
    """Makes one tensor of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.kinds = nn.Linear(4, WIDTH), nn.Embedding(KINDS, WIDTH)
        self.marks = nn.Linear(2, WIDTH)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        first, second = inputs["marks"]
        marks = self.marks(torch.stack((first, second), dim=-1))
        hidden: Tensor = self.numbers(inputs["numbers"]) + self.kinds(inputs["kind"]) + marks
        return hidden


class Answer(nn.Module):
    """Makes a dict of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.kind = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, KINDS)

    def forward(self, hidden: Tensor) -> dict[str, Any]:
        return {"value": self.value(hidden).squeeze(-1), "kinds": (self.kind(hidden),)}


class Nested(Task):
    """Everything is nested: inputs, targets, outputs."""

    name = "nested"

    def everything(self) -> Batch:
        dice = torch.Generator().manual_seed(1)
        size = TRAINED + TESTED
        numbers, marks = torch.randn(size, 4, generator=dice), torch.randn(size, 2, generator=dice)
        kinds = torch.randint(KINDS, (2, size), generator=dice)
        return Batch(
            inputs={"numbers": numbers, "kind": kinds[0], "marks": Marks(*marks.unbind(1))},
            targets=(numbers.sum(1) + marks[:, 0], {"kind": kinds[1]}),
        )

    def train(self) -> Batch | Samples:
        return self.everything().part(0, TRAINED)

    def test(self) -> Batch | Samples:
        return self.everything().part(TRAINED, TRAINED + TESTED)

    def model(self) -> nn.Module:
        wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        return nn.Sequential(Read(), *wide, Answer())

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        return {"1": ColwiseParallel(), "3": RowwiseParallel()}

    def loss(self, outputs: dict[str, Any], targets: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        value, kinds = targets
        (scores,) = outputs["kinds"]
        error = functional.mse_loss(outputs["value"], value, reduction="sum")
        return error + functional.cross_entropy(scores, kinds["kind"], reduction="sum")

    def score(self, outputs: dict[str, Any], targets: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        right: Tensor = outputs["kinds"][0].argmax(-1) == targets[1]["kind"]
        return right.sum().reshape(1)

    def metrics(self, score: Tensor, count: int) -> Mapping[str, float]:
        return {"right": score[0].item() / count}


class Numbered:
    """The same samples, one by one."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, number: int) -> tuple[Tree, Tree]:
        one = self.batch.part(number, number + 1).mapped(lambda tensor: tensor[0])
        return one.inputs, one.targets


class FromDataset(Nested):
    """The same, in float64 on the command line too, read from a Dataset."""

    def model(self) -> nn.Module:
        return super().model().double()

    def everything(self) -> Batch:
        return super().everything().mapped(lambda t: t.double() if t.is_floating_point() else t)

    def train(self) -> Samples:
        return Numbered(self.everything().part(0, TRAINED))

    def test(self) -> Samples:
        return Numbered(self.everything().part(TRAINED, TRAINED + TESTED))


class ReadTwice(Read):
    def forward(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(inputs)
        return hidden, hidden


class AnswerTwo(Answer):
    def forward(self, both: tuple[Tensor, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(both[0] + both[1])


class TwoBetween(Nested):
    """Between the two pieces of its model goes a tuple."""

    name = "two-between"

    def model(self) -> nn.Module:
        return nn.Sequential(ReadTwice(), AnswerTwo())


class WithText(Nested):
    """One of its outputs is no tensor."""

    name = "with-text"

    def model(self) -> nn.Module:
        return nn.Sequential(Read(), AnswerAndText())


class AnswerAndText(Answer):
    def forward(self, hidden: Tensor) -> dict[str, Any]:
        return {**super().forward(hidden), "text": "answer"}


class Sentences(Task):
    """A transformer of two inputs, and with two outputs, per position."""

    name = "sentences"

    def train(self) -> Batch:
        dice = torch.Generator().manual_seed(2)
        symbols = torch.randint(KINDS, (12, 9), generator=dice)
        weights = torch.rand(12, 8, 2, generator=dice)
        return Batch(
            inputs={"symbols": symbols[:, :-1], "weights": weights},
            targets={"next": symbols[:, 1:], "weight": weights.sum(-1)},
        )

    test = train

    def model(self) -> nn.Module:
        return Transformer()

    def loss(self, outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
        scores, weight = outputs
        error = functional.mse_loss(weight, targets["weight"], reduction="sum")
        return error + functional.cross_entropy(
            scores.flatten(0, 1), targets["next"].flatten(), reduction="sum"
        )

    def count(self, targets: dict[str, Tensor]) -> int:
        return targets["next"].numel()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.weights = nn.Embedding(KINDS, WIDTH), nn.Linear(2, WIDTH)
        self.positions, self.attention = Positions(8, WIDTH), CausalAttention()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, KINDS + 1)

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.symbols(inputs["symbols"]) + self.weights(inputs["weights"])
        hidden = hidden + self.positions(hidden.shape[1])
        mixed = self.mix(hidden).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = self.attention(*mixed.unbind()).transpose(1, 2).flatten(2)
        outputs = self.out(hidden + seen)
        return outputs[..., :KINDS], outputs[..., KINDS]


class WithLengths(Sentences):
    """One of its inputs has no sequence to be cut."""

    name = "with-lengths"

    def train(self) -> Batch:
        batch = super().train()
        return Batch(inputs={**batch.inputs, "length": torch.ones(12)}, targets=batch.targets)

    test = train
