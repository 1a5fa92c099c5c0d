"""Small tasks as people write them: what a proof before training must see, or must let pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from train.data.order import Batch
from train.tasks.base import Task

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

WIDTH = 8


class Plain(Task):
    """Fit 48 numbers by two layers with something between them."""

    def between(self) -> nn.Module:
        return nn.Tanh()

    def model(self) -> nn.Module:
        middle = self.between()
        return nn.Sequential(nn.Linear(6, WIDTH), middle, nn.Linear(WIDTH, 4), nn.Linear(4, 1))

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(48, 6, generator=generator)
        return Batch(inputs=inputs, targets=inputs[:, :1].sin() + 0.5 * inputs[:, 1:2])

    def test(self) -> Batch:
        return self.train().part(0, 6)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum()

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"2": ColwiseParallel(), "3": RowwiseParallel()}


def with_layer(make: Callable[[], nn.Module]) -> type[Plain]:
    """Make a task whose model has something else between its layers."""

    class Made(Plain):
        def between(self) -> nn.Module:
            return make()

    return Made


class Thaw(nn.Module):
    """Is trained from the second pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(WIDTH, WIDTH).requires_grad_(False), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.linear.requires_grad_(self.passes > 1)(x)  # type: ignore[no-any-return]


Thawed = with_layer(Thaw)


# Right with every strategy.


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3, self.training) * torch.empty_like(x).uniform_(0.5, 1.5)
        return x + 0.1 * torch.randn_like(x) * torch.rand(1)


class Tied(Plain):
    """Two layers are one."""

    def between(self) -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(layer, nn.Tanh(), layer)


class Recurrence(nn.Module):
    """Reads the features one by one: [samples, features, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x[..., None])[0]
        return found[:, -1]


class Choice(nn.Module):
    """Each sample chooses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        which = (x[:, 0] > 0).long()
        both = torch.stack([expert(x) for expert in self.experts], 1)
        return both[torch.arange(len(x)), which]


class Narrow(nn.Module):
    """Computes in single precision whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().tanh().to(x.dtype)


class Half(Plain):
    """Has weights in half precision."""

    def model(self) -> nn.Module:
        return Halved(super().model().bfloat16())


class Halved(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x.bfloat16())
        return outputs.float()


def attention() -> nn.Module:
    """A transformer with dropout in attention, over the features of a sample."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), encoder, nn.Flatten())


Dropped = with_layer(lambda: nn.Sequential(nn.Dropout(0.5), Noisy()))
Recurrent = with_layer(Recurrence)
Experts = with_layer(Choice)
Parametrized = with_layer(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
Moving = with_layer(lambda: Averaged(reads=False))
Single = with_layer(Narrow)
Attentive = with_layer(attention)


class Meant(Plain):
    """A declared mean over the samples."""

    reduction = "mean"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)


class MeantByToken(Plain):
    """A declared mean over the numbers that are not left out."""

    reduction: Literal["sum", "mean"] = "mean"

    def count(self, targets: Tensor) -> int:
        return int((targets > -0.5).sum())

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        kept = targets > -0.5
        return functional.mse_loss(outputs[kept], targets[kept])


# Wrong wherever the batch is cut.


class Mean(Plain):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)


class MeanByToken(MeantByToken):
    reduction: Literal["sum", "mean"] = "sum"


class Contrastive(Plain):
    """All other samples of the batch are negatives."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores = -(outputs - targets.T).square()
        return functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum")


class Penalised(Plain):
    """A penalty once per call of loss()."""

    def model(self) -> nn.Module:
        model = super().model()
        self.held = list(model.parameters())
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        penalty = torch.stack([w.square().sum() for w in self.held]).sum()
        return (outputs - targets).square().sum() + 0.01 * penalty


class PenalisedBySample(Penalised):
    """The same for each sample, which adds up."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        penalty = torch.stack([w.square().sum() for w in self.held]).sum()
        return (outputs - targets).square().sum() + 0.01 * len(targets) * penalty


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentredByHand(Plain):
    """The same, in the forward pass of the model itself."""

    def model(self) -> nn.Module:
        return ByHand(super().model())


class ByHand(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x / x.abs().max())
        return outputs


class Branch(nn.Module):
    """Takes another way if the samples of a pass are large together."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x.tanh()


class Cap(nn.Module):
    """An expert has room for every second sample of a batch only."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(descending=True).argsort()
        return torch.where((order < (len(x) + 1) // 2)[:, None], x, torch.zeros_like(x))


class Balanced(Plain):
    """An auxiliary loss over the batch, which the model returns beside its outputs."""

    def model(self) -> nn.Module:
        return Auxiliary(super().model())

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        loss: Tensor = super().loss(outputs["y"], targets) + outputs["balance"]
        return loss


class Auxiliary(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.net(x)
        return {"y": y, "balance": y.mean().square() * len(y)}


Centred = with_layer(Centre)
Branching = with_layer(Branch)
Capped = with_layer(Cap)
Normed = with_layer(lambda: nn.BatchNorm1d(WIDTH))


# Wrong with some strategies.


class Teacher(nn.Module):
    """Follows its student in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight.data.lerp_(self.student.weight.data, 0.1)
        outputs: Tensor = self.student(x) + self.teacher(x)
        return outputs


class Clamp(nn.Module):
    """Each pass writes its matrix, depending on its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=x.abs().mean().item())
        return x @ self.weight


class Averaged(nn.Module):
    """A mean of what was seen, moved after a pass has read it."""

    ema: Tensor

    def __init__(self, *, reads: bool, saved: bool = True) -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("ema", torch.zeros(WIDTH), persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.tanh(x - self.ema if self.reads else x)
        if self.training:
            self.ema.copy_(0.9 * self.ema + 0.1 * x.detach().mean(0))
        return outputs


class Normalised(Plain):
    """A buffer that forward() reads and then moves."""

    def between(self) -> nn.Module:
        return Normaliser()

    def pieces(self, model: nn.Module) -> list[str]:
        return ["1"]


class Normaliser(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.tanh(x * self.scale.clone())
        if self.training:
            self.scale.mul_(0.9)
        return outputs


class Counter(nn.Module):
    """Counts samples."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return torch.tanh(x)


class Hooked(Plain):
    """A hook on a gradient that is not linear: it sees one rank's part."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))  # type: ignore[index]
        return model


Followed = with_layer(Teacher)
Clamped = with_layer(Clamp)
Passing = with_layer(lambda: Averaged(reads=True))
Drifting = with_layer(lambda: Averaged(reads=True, saved=False))
Counted = with_layer(Counter)


# Right in one process, and an error elsewhere.


class Shaped(Plain):
    """A layer that knows how many numbers it is given, of which tensor parallelism has a part."""

    def model(self) -> nn.Module:
        first = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh())
        return nn.Sequential(first, nn.Linear(WIDTH, 4), Squares(), nn.Linear(4, 1))

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"1": ColwiseParallel(), "3": RowwiseParallel()}


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 2, 2).tanh().flatten(1)


class Once(nn.Module):
    """Cannot be computed again within a backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() >= 0:
            raise ValueError("the input is gone")
        return x.tanh()


Forgetting = with_layer(Once)


# No proof.


class Shuffle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x[torch.randperm(len(x))]


class ByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.random())


Shuffled, DrawnByNumpy = with_layer(Shuffle), with_layer(ByNumpy)


class Unseeded(Plain):
    """Samples with random numbers of a generator of their own."""

    def train(self) -> Any:
        return Samples()


class Samples:
    def __init__(self, offset: int = 0) -> None:
        self._generator, self._offset = np.random.default_rng(), offset

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        draws = torch.from_numpy(self._generator.normal(size=6)).float()
        return draws, draws[:1]


class CutByRank(Plain):
    """A Dataset of every second file."""

    def train(self) -> Any:
        import torch.distributed as dist

        return Part(dist.get_rank() if dist.is_initialized() else 0)


class Part:
    def __init__(self, rank: int) -> None:
        self._all = Plain().train()
        self._rank = rank

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        place = 2 * number + self._rank
        return self._all.inputs[place], self._all.targets[place]


class Resting(Plain):
    """Its model has experts, of which a rank's few samples reach some, in other steps others."""

    def between(self) -> nn.Module:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

            def forward(self, hidden: Tensor) -> Tensor:
                chosen = hidden[:, :6].argmax(-1)
                out = torch.zeros_like(hidden)
                for number, expert in enumerate(self.experts):
                    if (chosen == number).any():
                        out[chosen == number] = expert(hidden[chosen == number])
                return out

        return Experts()


class Thawing(Resting):
    """Half of its experts are frozen in the first two passes of training."""

    def between(self) -> nn.Module:
        experts = super().between()
        frozen = [p for name, p in experts.named_parameters() if int(name.split(".")[1]) < 3]
        passes = 0

        def thaw(module: nn.Module, _: object) -> None:
            nonlocal passes
            passes += module.training
            for parameter in frozen:
                parameter.requires_grad_(passes > 2)

        experts.register_forward_pre_hook(thaw)
        return experts
