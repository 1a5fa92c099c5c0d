"""Small tasks as people write them: what a proof before training must see, or must let pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

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


# Right with every strategy.


class Dropped(Plain):
    """Dropout, also by function, and noise."""

    def between(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), Noisy())


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3, self.training) * torch.empty_like(x).uniform_(0.5, 1.5)
        return x + 0.1 * torch.randn_like(x) * torch.rand(1)


class Tied(Plain):
    """Two layers are one, and their matrix is used by hand once more."""

    def between(self) -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(layer, nn.Tanh(), layer)


class Recurrent(Plain):
    def between(self) -> nn.Module:
        return Recurrence()


class Recurrence(nn.Module):
    """Reads the features one by one: [samples, features, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x[..., None])[0]
        return found[:, -1]


class Experts(Plain):
    """Each sample chooses one of two layers."""

    def between(self) -> nn.Module:
        return Choice()


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        which = (x[:, 0] > 0).long()
        both = torch.stack([expert(x) for expert in self.experts], 1)
        return both[torch.arange(len(x)), which]


class Parametrized(Plain):
    def between(self) -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Moving(Plain):
    """A mean of what was seen, written in place, which does nothing to the outputs."""

    def between(self) -> nn.Module:
        return Averaged(in_place=True)


class Single(Plain):
    """Computes in single precision whatever it is given."""

    def between(self) -> nn.Module:
        return Narrow()


class Narrow(nn.Module):
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


class Attentive(Plain):
    """A transformer with dropout in attention, over the features of a sample."""

    def between(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Unflatten(1, (2, 4)), encoder, nn.Flatten())


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


class Centred(Plain):
    def between(self) -> nn.Module:
        return Centre()


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


class Branching(Plain):
    """Takes another way if the samples of a pass are large together."""

    def between(self) -> nn.Module:
        return Branch()


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x.tanh()


class Capped(Plain):
    """An expert has room for every second sample of a batch only."""

    def between(self) -> nn.Module:
        return Cap()


class Cap(nn.Module):
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


class Normed(Plain):
    def between(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH)


# Wrong with some strategies.


class Followed(Plain):
    """A teacher that follows its student in the forward pass."""

    def between(self) -> nn.Module:
        return Teacher()


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight.data.lerp_(self.student.weight.data, 0.1)
        outputs: Tensor = self.student(x) + self.teacher(x)
        return outputs


class Clamped(Plain):
    """A matrix is written by each pass, depending on its samples."""

    def between(self) -> nn.Module:
        return Clamp()


class Clamp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=x.abs().mean().item())
        return x @ self.weight


class Replaced(Plain):
    """A mean of what was seen, for which forward() puts another tensor."""

    def between(self) -> nn.Module:
        return Averaged(in_place=False)


class Averaged(nn.Module):
    ema: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = 0.9 * self.ema + 0.1 * x.detach().mean(0)
            if self.in_place:
                self.ema.copy_(new)
            else:
                self.ema = new
        return torch.tanh(x)


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


class Counted(Plain):
    """Counts samples."""

    def between(self) -> nn.Module:
        return Counter()


class Counter(nn.Module):
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


class EvaluatingNorm(Plain):
    """A layer that model() puts in evaluation mode."""

    def between(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).eval()


# No proof.


class Shuffled(Plain):
    def between(self) -> nn.Module:
        return Shuffle()


class Shuffle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x[torch.randperm(len(x))]


class DrawnByNumpy(Plain):
    def between(self) -> nn.Module:
        return ByNumpy()


class ByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.random())


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
