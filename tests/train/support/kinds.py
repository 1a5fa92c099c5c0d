"""Models that do by hand what strategies must know of: one kind of model per task."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from tests.train.support import proved

WIDTH = proved.WIDTH


class Net(nn.Module):
    """Four layers, the pieces of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = [nn.Linear(6, WIDTH)]
        self.first = nn.Sequential(*self.entry, nn.Tanh())
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.third = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.third(self.middle(self.first(x))))
        return outputs


class Kind(proved.Plain):
    """Fit 48 numbers by this net."""

    name = "kind"

    def model(self) -> nn.Module:
        return Net()

    def pieces(self, model: nn.Module) -> list[str]:
        return ["first", "middle", "third", "last"]

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> dict[str, ParallelStyle]:
        return {"first.0": ColwiseParallel(), "middle.0": RowwiseParallel()}


# Hooks on parameters.


class Masked(Kind):
    """A hook keeps a row of the first matrix as it is."""

    def model(self) -> nn.Module:
        model = Net()
        mask = torch.ones(WIDTH, 1)
        mask[0] = 0.0
        model.entry[0].weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]
        return model


class Accumulated(Kind):
    """The same, when the gradient has been added up."""

    def model(self) -> nn.Module:
        model = Net()

        def mask(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad[0] = 0.0

        model.entry[0].weight.register_post_accumulate_grad_hook(mask)  # type: ignore[no-untyped-call]
        return model


# Parameters that something else holds.


class Scaled(nn.Module):
    """A layer that multiplies by some of its own parameters."""

    held: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH).add(0.1))
        weight = self.weight
        if how == "list":
            self.list = {"of": [weight]}
        elif how == "view":
            self.held = weight.t()
        elif how == "memory":
            self.held = weight.detach()
        ways: dict[str, Callable[[], Tensor]] = {
            "list": lambda: self.list["of"][0],
            "closure": lambda: weight,
        }
        self.get = ways.get(how, lambda: self.held)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + x @ self.get())


class Listed(Kind):
    how = "list"

    def model(self) -> nn.Module:
        model = Net()
        model.middle[0] = Scaled(self.how)
        return model

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> dict[str, ParallelStyle]:
        return {"first.0": ColwiseParallel(output_layouts=Replicate())}


class Closed(Listed):
    how = "closure"


class Viewed(Listed):
    how = "view"


class InMemory(Listed):
    how = "memory"


class Lent(Kind):
    """A layer adds the bias of an earlier one, which it does not have itself."""

    def model(self) -> nn.Module:
        model = Net()
        bias = model.entry[0].bias
        model.last.register_forward_hook(lambda module, inputs, outputs: outputs + bias.sum())
        return model


# Parameters that forward() writes.


class Writing(nn.Linear):
    """A layer that writes its weight before it uses it."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how, self.passes = how, 0
        self.follower = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        with torch.no_grad():
            if self.how == "clamped":
                self.weight.clamp_(-0.2, 0.2)
            elif self.how == "through data":
                self.weight.data.clamp_(-0.2, 0.2)
            elif self.how == "followed" and self.training:
                self.follower.lerp_(self.weight, 0.5)
            elif self.how == "by samples" and self.training and len(x):
                self.weight.mul_(1.0 + 0.01 * x.mean())
            elif (self.how == "at first" and self.passes == 1) or (
                self.how == "later" and self.passes == 2
            ):
                self.weight.mul_(0.5)
        return super().forward(x) + x @ self.follower


class Clamped(Kind):
    how = "clamped"

    def model(self) -> nn.Module:
        model = Net()
        model.middle[0] = Writing(self.how)
        return model

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> dict[str, ParallelStyle]:
        return {"third.0": ColwiseParallel(), "last": RowwiseParallel()}


class ThroughData(Clamped):
    how = "through data"


class Followed(Clamped):
    how = "followed"


class BySamples(Clamped):
    how = "by samples"


class AtFirst(Clamped):
    how = "at first"


class Later(Clamped):
    how = "later"


# Layers that only evaluate.


class Evaluating(Kind):
    """A normalisation by statistics that stay as they are."""

    def normalisation(self) -> nn.Module:
        layer = nn.BatchNorm1d(WIDTH)
        torch.manual_seed(3)
        layer.running_mean, layer.running_var = torch.randn(WIDTH), torch.rand(WIDTH) + 0.5
        return layer.eval()

    def model(self) -> nn.Module:
        model = Net()
        model.middle.append(self.normalisation())
        return model


class _Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> _Frozen:
        return super().train(False)


class OwnTrain(Evaluating):
    """The same, by a train() of its own."""

    def normalisation(self) -> nn.Module:
        return _Frozen(WIDTH)


# Buffers that forward() moves.


class Moving(nn.Linear):
    """A layer that subtracts a moving average, or multiplies by a counter."""

    mean: Tensor
    count: Tensor

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how, self.passes = how, 0
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone()
        if self.training and len(x):
            self.passes += 1
            if self.how == "replaced":
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            elif self.how == "moved":
                self.mean += 0.1 * (x.detach().mean(0) - self.mean)
            elif self.how == "in Python":
                x = x * (1.0 + 0.1 * self.passes)
            elif self.how == "counted" and self.passes > 2:
                self.count += (100 * x.detach()[:, 0]).long().sum()
        hidden = super().forward(x - before)
        return hidden + 1e-3 * self.count


class Replaced(Kind):
    how = "replaced"

    def model(self) -> nn.Module:
        model = Net()
        model.middle[0] = Moving(self.how)
        return model


class Moved(Replaced):
    how = "moved"


class CountedLate(Replaced):
    how = "counted"


class InPython(Replaced):
    """The number of passes is in the model's sums."""

    how = "in Python"


# A loss that reads the model's weights.


class Decayed(Kind):
    """The loss has a term of the weights, for each sample."""

    def model(self) -> nn.Module:
        self.net = Net()
        return self.net

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = torch.stack([p.square().sum() for p in self.net.parameters()]).sum()
        return super().loss(outputs, targets) + 0.1 * len(targets) * weights


class Taught(Kind):
    """The loss has a term of a frozen model, which is not trained."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.teacher = Net().requires_grad_(False)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        bias = torch.stack([p.mean() for p in self.teacher.parameters()]).sum()
        return super().loss(outputs + bias, targets)


# Layers that are trained from some step on.


class Thawed(Kind):
    """The first layer joins in the second pass."""

    def model(self) -> nn.Module:
        model = Net()
        model.first.requires_grad_(False)
        passes = iter(range(100))

        def thaw(module: nn.Module, inputs: object) -> None:
            if module.training and torch.is_grad_enabled() and next(passes) == self.passes:
                model.first.requires_grad_(True)

        model.register_forward_pre_hook(thaw)
        return model

    passes = 1


class ThawedLater(Thawed):
    """The same in the fourth: the first two of ddp's are made on zeros."""

    passes = 3


# Data that differ from rank to rank.


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Numbers and their squares."""

    def __init__(self, *numbers: float, noise: bool = False) -> None:
        self.numbers, self.noise = numbers, noise

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = torch.tensor([self.numbers[index]])
        if self.noise:
            # A generator of its own, which nobody seeds.
            number += torch.rand(1, generator=OWN)
        return number, number.square()


OWN = torch.Generator()
OWN.seed()


# Dropout between matrices that are cut.


class _Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, self.training)


class Dropped(Kind):
    """One dropout layer has a rank's units, the other what all ranks have."""

    def between(self) -> nn.Module:
        return nn.Dropout(0.5)

    def model(self) -> nn.Module:
        model = Net()
        model.first.append(self.between())
        model.third.append(nn.Dropout(0.5))
        return model


class DroppedByFunction(Dropped):
    def between(self) -> nn.Module:
        return _Functional()
