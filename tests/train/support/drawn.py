"""A small language model in the style of other people: `DRAWN` selects its oddities.

Every layer that is odd is there by choice of a test, so that any strategy can be compared with one
process on any of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.data.order import Batch
from train.layers import CausalAttention, Positions
from train.tasks.base import Task

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

VARIABLE = "DRAWN"
SYMBOLS, TIME, WIDTH, HEADS, SAMPLES, TESTS = 12, 8, 8, 2, 40, 10
# Far from 0, like measurements that are not normalised.
FAR = 1000.0


@dataclass(frozen=True, kw_only=True)
class Oddities:
    """The oddities of the model."""

    double: bool = True
    """Whether it computes in float64."""
    tie: str = ""
    """`module`: head and embedding share a matrix; `function`: the head's is used by hand."""
    again: bool = False
    """Whether the first block stands in the model a second time."""
    shared_linear: bool = False
    """Whether two blocks share a layer."""
    branch: str = ""
    """`experts`: one of two, by the data; `around`: through a layer or past it, by the data."""
    never: bool = False
    """Whether there is a layer that nothing uses."""
    frozen: str = ""
    """The frozen part: `embed`, `norms` or `block`."""
    buffers: tuple[str, ...] = ()
    """Types of buffers; those that begin with `-` are not saved."""
    scalar: bool = False
    """Whether a parameter has no dimension."""
    beside: bool = False
    """Whether the model does something between its pieces."""
    inputs: str = ""
    """`dict`: symbols and numbers far from 0; `pair`: the same as a tuple."""
    outputs: str = ""
    """`dict` or `tuple`: scores and something else."""
    bare_piece: bool = False
    """Whether one of the pieces has no parameters."""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Oddities:
        values = json.loads(text)
        values["buffers"] = tuple(values["buffers"])
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class Drawn(Task):
    def __init__(self) -> None:
        self.odd = Oddities.read(os.environ.get(VARIABLE) or Oddities().text())

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.odd.double else torch.float32

    def model(self) -> nn.Module:
        return Model(self.odd).to(self.dtype)

    def train(self) -> Batch:
        return self._samples(1, SAMPLES)

    def test(self) -> Batch:
        return self._samples(2, TESTS)

    def _samples(self, seed: int, count: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        symbols = torch.randint(SYMBOLS, (count, TIME), generator=generator)
        targets = torch.randint(SYMBOLS, (count, TIME), generator=generator)
        numbers = FAR + torch.randn(count, TIME, generator=generator)
        both = {"symbols": symbols, "numbers": numbers.to(self.dtype)}
        inputs: Any = {"": symbols, "dict": both, "pair": tuple(both.values())}[self.odd.inputs]
        return Batch(inputs=inputs, targets=targets)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        scores, extra = outputs, 0.0
        if self.odd.outputs == "dict":
            scores, extra = outputs["scores"], outputs["size"].sum()
        elif self.odd.outputs == "tuple":
            scores, extra = outputs[0], outputs[1].sum()
        flat = scores.flatten(0, -2)
        return functional.cross_entropy(flat, targets.flatten(), reduction="sum") + 0.01 * extra

    def count(self, targets: Tensor) -> int:
        return targets.numel()

    def metrics(self, score: Tensor, count: int) -> Mapping[str, float]:
        return {}

    def pieces(self, model: nn.Module) -> Sequence[str]:
        assert isinstance(model, Model)
        return model.piece_names

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan: dict[str, ParallelStyle] = {
            "embed.symbols": RowwiseParallel(input_layouts=Replicate()),
            "head.project": ColwiseParallel(
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        }
        for number in range(3):
            plan |= {
                f"blocks.{number}.mix": ColwiseParallel(),
                f"blocks.{number}.out": RowwiseParallel(),
            }
        return plan


class Model(nn.Module):
    def __init__(self, odd: Oddities) -> None:
        super().__init__()
        self.odd = odd
        self.embed = Embed(odd)
        self.blocks = nn.ModuleList(Block(odd, number) for number in range(3))
        self.head = Head(odd)
        if odd.shared_linear:
            self.blocks[2].out = self.blocks[0].out
        if odd.again:
            self.blocks[2] = self.blocks[0]
        if odd.tie == "module":
            self.head.project.weight = self.embed.symbols.weight
        elif odd.tie == "function":
            self.head.project = None  # type: ignore[assignment]
        if odd.frozen == "embed":
            self.embed.requires_grad_(False)
        elif odd.frozen == "block":
            self.blocks[1].requires_grad_(False)
        elif odd.frozen == "norms":
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(False)
        if odd.bare_piece:
            self.between = nn.Tanh()
        blocks = [f"blocks.{number}" for number in range(3)]
        self.piece_names = ["embed", *blocks[:2], *(["between"] if odd.bare_piece else [])]
        self.piece_names += [blocks[2], "head"]

    def forward(self, inputs: Any) -> Any:
        hidden = inputs
        for name in self.piece_names[:-1]:
            hidden = self.get_submodule(name)(hidden)
        if self.odd.beside:
            hidden = hidden * 1.5
        if self.odd.tie == "function":
            return functional.linear(self.head(hidden), self.embed.symbols.weight)
        return self.head(hidden)


class Embed(nn.Module):
    def __init__(self, odd: Oddities) -> None:
        super().__init__()
        self.odd = odd
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = Positions(TIME, WIDTH)
        if odd.inputs:
            self.numbers = nn.Linear(1, WIDTH)

    def forward(self, inputs: Any) -> Tensor:
        if self.odd.inputs == "dict":
            symbols, numbers = inputs["symbols"], inputs["numbers"]
        elif self.odd.inputs == "pair":
            symbols, numbers = inputs
        else:
            symbols, numbers = inputs, None
        hidden: Tensor = self.symbols(symbols) + self.positions(symbols.shape[1])
        if numbers is None:
            return hidden
        # Values far from 0 are brought near 0 here: rounding them earlier loses the signal.
        return hidden + self.numbers((numbers - FAR)[..., None])  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, odd: Oddities, number: int) -> None:
        super().__init__()
        self.branch = odd.branch if number == 1 else ""
        self.norm, self.attention = nn.LayerNorm(WIDTH), CausalAttention()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        if self.branch:
            self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        if odd.never and number == 1:
            self.never = nn.Linear(WIDTH, WIDTH)
        if odd.scalar and number == 0:
            self.factor = nn.Parameter(torch.tensor(1.0))
        for place, text in enumerate(odd.buffers if number == 0 else ()):
            dtype = getattr(torch, text.removeprefix("-"))
            buffer = (torch.arange(4) % 2 + 1).to(dtype)
            self.register_buffer(f"buffer{place}", buffer, persistent=not text.startswith("-"))

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.mix(self.norm(hidden)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        query, key, value = mixed.permute(3, 0, 2, 1, 4)
        seen = self.attention(query, key, value).transpose(1, 2).flatten(2)
        if hasattr(self, "factor"):
            seen = seen * self.factor
        hidden = hidden + self.out(seen)
        if not self.branch:
            return hidden
        # Of all that a pass is given, so that ranks differ, and micro-batches do.
        way = int(hidden.detach().double().sum().mul(1e3).floor().item()) % 2
        if self.branch == "experts":
            return hidden + self.ways[way](hidden)  # type: ignore[no-any-return]
        return hidden + self.ways[0](hidden) if way else hidden

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the buffers' types, which `model.to(dtype)` would make one of all."""
        types = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in types.items():
            self._buffers[name] = self.get_buffer(name).to(dtype)
        return self


class Head(nn.Module):
    def __init__(self, odd: Oddities) -> None:
        super().__init__()
        self.odd = odd
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, hidden: Tensor) -> Any:
        hidden = self.norm(hidden)
        if self.project is None:
            return hidden
        scores = self.project(hidden)
        # A number for each sample, as for a loss that has two parts.
        size = hidden.pow(2).sum((1, 2))
        if self.odd.outputs == "dict":
            return {"scores": scores, "size": size}
        return (scores, size) if self.odd.outputs == "tuple" else scores
