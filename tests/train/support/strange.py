"""Tasks with models as other people write them: ties, unused layers, branches, frozen parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.train.support.changed import changed
from train.data.order import Batch
from train.layers import CausalAttention
from train.tasks.base import Task
from train.tasks.chars import Block, Chars, Sizes, Transformer

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

SAMPLES, FEATURES, CLASSES = 48, 6, 4


class Small(Chars):
    layers = 2

    def __init__(self) -> None:
        super().__init__(Sizes(width=16, heads=4, layers=self.layers))


class Deeper(Small):
    layers = 3


class Tied(Small):
    """The matrix that scores symbols is the one that describes them."""

    def model(self) -> nn.Module:
        model = Transformer(self.sizes)
        model.head.project.weight = model.embed.symbols.weight
        return model


class Scaled(CausalAttention):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(query, key, value * self.factor)


def share(model: Transformer) -> None:
    """Have two blocks mix by one matrix."""
    model.blocks[2].attention_out = model.blocks[0].attention_out


def freeze(model: Transformer) -> None:
    """Leave norms untrained, which SequenceParallel would train."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)
    model.embed.symbols.weight.requires_grad_(False)


def hide(model: Transformer) -> None:
    """Put two parameters in the same memory, which is no tie."""
    model.head.project.weight = nn.Parameter(model.embed.symbols.weight.data)


def scale(model: Transformer) -> None:
    """Put a layer that the plan leaves out between two that are cut."""
    for block in model.blocks:
        block.attention = Scaled()


def widen(model: Transformer) -> None:
    """Give hidden layers a width that two ranks cannot share."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.feed[0], block.feed[2] = nn.Linear(16, 11), nn.Linear(11, 16)


SharedBlocks = changed(Deeper, share)
FrozenNorms, HiddenTie = changed(Small, freeze), changed(Small, hide)
LeftOut, Uneven = changed(Small, scale), changed(Small, widen)


class TiedAcrossCuts(Tied):
    """The head would cut the matrix by its columns, the embedding by its rows."""

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import RowwiseParallel

        plan = dict(super().tensor_plan(model, ranks=ranks, loss_parallel=loss_parallel))
        return plan | {"head.project": RowwiseParallel(input_layouts=Shard(1))}


class LookingTied(Tied):
    """One block chooses a branch by its data."""

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Transformer)
        model.blocks[1] = Looks(model.blocks[1])
        return model


class CountsSamples(Tied):
    """Its loss sums over characters, and it counts sequences."""

    def count(self, targets: Tensor) -> int:
        return len(targets)


class Looks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) if hidden.sum() > 0 else hidden


class Table(Task):
    """Numbers; the first decides the branch of a batch."""

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        return Batch(inputs=inputs.to(torch.get_default_dtype()), targets=targets)

    def test(self) -> Batch:
        return self.train()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="sum")

    def metrics(self, score: Tensor, count: int) -> Mapping[str, float]:
        return {}


def linear() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES)


class Either(nn.Module):
    """Takes one branch or the other, or neither, by the sum of the batch."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(linear() for _ in range(ways))
        self.never = linear()
        self.always_frozen = linear().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        number = int(inputs.detach().sum().mul(1000).abs().item()) % 3
        inputs = self.always_frozen(inputs)
        return self.ways[number](inputs).tanh() if number < len(self.ways) else inputs


class Branching(Table):
    """The branch is a piece; its ways have parameters of equal size."""

    def model(self) -> nn.Module:
        last = nn.Linear(FEATURES, CLASSES)
        return nn.Sequential(Either(2), linear(), nn.Tanh(), Either(3), last)


class BranchFirst(Table):
    """Nothing before the branch has parameters, and it may go around all of its own."""

    def model(self) -> nn.Module:
        return nn.Sequential(Either(1), linear(), nn.Linear(FEATURES, CLASSES))


class Skipping(Branching):
    """The branch is around pieces, so that some pieces do not run."""

    def model(self) -> nn.Module:
        return Skips()

    def pieces(self, model: nn.Module) -> Sequence[str]:
        return ["first", "second", "last"]


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = linear(), linear(), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        which = self.first if inputs.detach().sum() > 0 else self.second
        return self.last(which(inputs).tanh())  # type: ignore[no-any-return]


class Whole(Skipping):
    """The same, sharded as a whole."""

    def pieces(self, model: nn.Module) -> Sequence[str]:
        return [""]


class Twice(Table):
    """A layer that stands in a Sequential two times."""

    def model(self) -> nn.Module:
        layer = linear()
        return nn.Sequential(layer, nn.Tanh(), linear(), layer, nn.Linear(FEATURES, CLASSES))


class Unseeded(Table):
    """Each rank's model begins with other weights."""

    def model(self) -> nn.Module:
        model = nn.Sequential(linear(), nn.Linear(FEATURES, CLASSES))
        nn.init.constant_(model.get_parameter("0.weight"), float(dist.get_rank()))
        return model


class OtherData(Twice):
    """Each rank is given other data."""

    def train(self) -> Batch:
        batch = super().train()
        return Batch(inputs=batch.inputs + float(dist.get_rank()), targets=batch.targets)


class Scalar(Table):
    """A parameter without a dimension."""

    def model(self) -> nn.Module:
        return nn.Sequential(linear(), Factor(), nn.Linear(FEATURES, CLASSES))


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class Beside(Skipping):
    """The model does something that is in none of its pieces."""

    def model(self) -> nn.Module:
        return Doubles()


class Doubles(Skips):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.first(inputs)) * 2)  # type: ignore[no-any-return]


class ByHand(Skipping):
    """A matrix is used outside of the module that it belongs to."""

    def model(self) -> nn.Module:
        return Again()


class Again(Skips):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs))
        return self.last(functional.linear(hidden, self.first.weight))  # type: ignore[no-any-return]
