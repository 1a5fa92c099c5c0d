"""Models that do by hand what strategies must know of: one kind of model per task."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from tests.train.support import proved
from tests.train.support.changed import changed

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

    plan: Mapping[str, ParallelStyle] = {
        "first.0": ColwiseParallel(),
        "middle.0": RowwiseParallel(),
    }

    def model(self) -> nn.Module:
        return Net()

    def pieces(self, model: nn.Module) -> list[str]:
        return ["first", "middle", "third", "last"]

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        return self.plan


def kind(change: Callable[[Net], object], **cut: ParallelStyle) -> type[Kind]:
    """Make a task whose net is changed, and cut otherwise if some layers are named."""

    task = changed(Kind, change)
    task.plan = {name.replace("_", "."): style for name, style in cut.items()} or Kind.plan
    return task


# Hooks on parameters.


def mask(gradient: Tensor) -> Tensor:
    """Keep a row of the first matrix as it is."""
    return torch.cat([0 * gradient[:1], gradient[1:]])


def mask_accumulated(parameter: Tensor) -> None:
    """Do the same when the gradient has been added up."""
    assert parameter.grad is not None
    parameter.grad[0] = 0.0


Masked = kind(lambda net: net.entry[0].weight.register_hook(mask))  # type: ignore[no-untyped-call]
Accumulated = kind(
    lambda net: net.entry[0].weight.register_post_accumulate_grad_hook(mask_accumulated)  # type: ignore[no-untyped-call]
)


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


def scaled(how: str) -> type[Kind]:
    return kind(
        lambda net: net.middle.__setitem__(0, Scaled(how)),
        first_0=ColwiseParallel(output_layouts=Replicate()),
    )


Listed, Closed, Viewed, InMemory = map(scaled, ("list", "closure", "view", "memory"))


def lend(net: Net) -> None:
    """Have a layer add the bias of an earlier one, which it does not have itself."""
    bias = net.entry[0].bias
    net.last.register_forward_hook(lambda module, inputs, outputs: outputs + bias.sum())


Lent = kind(lend)


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


def writing(how: str) -> type[Kind]:
    return kind(
        lambda net: net.middle.__setitem__(0, Writing(how)),
        third_0=ColwiseParallel(),
        last=RowwiseParallel(),
    )


Clamped, ThroughData, Followed, BySamples, AtFirst, Later = map(
    writing, ("clamped", "through data", "followed", "by samples", "at first", "later")
)


# Parameters that come later.


class Growing(nn.Linear):
    """A layer that makes another parameter in its second pass."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == 2 and "extra" not in self._parameters:
            self.extra = nn.Parameter(torch.ones(WIDTH))
        return super().forward(x)


Grown = kind(
    lambda net: net.middle.__setitem__(0, Growing()),
    third_0=ColwiseParallel(),
    last=RowwiseParallel(),
)


# Layers that only evaluate.


def evaluating() -> nn.Module:
    """Make a normalisation by statistics that stay as they are."""
    layer = nn.BatchNorm1d(WIDTH)
    torch.manual_seed(3)
    layer.running_mean, layer.running_var = torch.randn(WIDTH), torch.rand(WIDTH) + 0.5
    return layer.eval()


class Frozen(nn.BatchNorm1d):
    """The same, by a train() of its own."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


Evaluating = kind(lambda net: net.middle.append(evaluating()))
OwnTrain = kind(lambda net: net.middle.append(Frozen(WIDTH)))


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


def moving(how: str) -> type[Kind]:
    return kind(lambda net: net.middle.__setitem__(0, Moving(how)))


Replaced, Moved, CountedLate, InPython = map(moving, ("replaced", "moved", "counted", "in Python"))


# A loss that reads the model's weights.


class Decayed(Kind):
    """The loss has a term of the weights, for each sample."""

    def model(self) -> nn.Module:
        self.net = Net()
        return self.net

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = torch.stack([p.square().sum() for p in self.net.parameters()]).sum()
        return super().loss(outputs, targets) + 0.1 * len(targets) * weights


class Annealed(Kind):
    """The loss rises with its calls."""

    calls = 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return super().loss(outputs, targets) * min(1.0, self.calls / 5)


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


def dropping(between: Callable[[], nn.Module]) -> type[Kind]:
    """Make a task with dropout of a rank's units, and of what all ranks have."""

    def drop(net: Net) -> None:
        net.first.append(between())
        net.third.append(nn.Dropout(0.5))

    return kind(drop)


Dropped = dropping(lambda: nn.Dropout(0.5))
DroppedByFunction = dropping(_Functional)
