"""A task worth sharding: a transformer of 1.1 billion parameters, far more than tests may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from train.data.order import Batch
from train.layers import CausalAttention, Positions
from train.tasks.base import Classifier
from train.tasks.styles import Replicated

WIDTH, HEAD_DIM, LAYERS, CONTEXT, VOCABULARY = 4096, 128, 5, 2048, 16384
# Attention and feed-forward matrices have 4 and 8 times the square of the width.
MATRICES = LAYERS * 12 * WIDTH**2 + 2 * VOCABULARY * WIDTH


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(VOCABULARY, WIDTH), Positions(CONTEXT, WIDTH)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden: Tensor = self.symbols(symbols) + self.positions(symbols.shape[1])
        return hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention = CausalAttention()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.into(self.norm_1(hidden)).unflatten(-1, (-1, 3, HEAD_DIM)).transpose(1, 2)
        mixed = self.attention(*heads.unbind(-2)).transpose(1, 2).flatten(-2)
        hidden = hidden + self.out(mixed)
        up = nn.functional.gelu(self.up(self.norm_2(hidden)))
        return hidden + self.down(up)  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.project(self.norm(hidden))
        return scores


class Large(Classifier):
    name = "large"

    def model(self) -> nn.Module:
        return nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), Head())

    def train(self) -> Batch:
        symbols = torch.zeros(8, CONTEXT, dtype=torch.int64)
        return Batch(inputs=symbols, targets=symbols)

    def test(self) -> Batch:
        return self.train()

    def pieces(self, model: nn.Module) -> Sequence[str]:
        return [name for name, _ in model.named_children()]

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> Mapping[str, ParallelStyle]:
        time, last = Shard(1), str(LAYERS + 1)
        plan: dict[str, ParallelStyle] = {
            "0.symbols": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=time, use_local_output=False
            ),
            "0.positions": Replicated(),
            "0": PrepareModuleOutput(output_layouts=time, desired_output_layouts=time),
            f"{last}.norm": SequenceParallel(),
            f"{last}.project": ColwiseParallel(
                input_layouts=time,
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        }
        for block in map(str, range(1, LAYERS + 1)):
            plan |= {
                f"{block}.norm_1": SequenceParallel(),
                f"{block}.into": ColwiseParallel(input_layouts=time),
                f"{block}.out": RowwiseParallel(output_layouts=time),
                f"{block}.norm_2": SequenceParallel(),
                f"{block}.up": ColwiseParallel(input_layouts=time),
                f"{block}.down": RowwiseParallel(output_layouts=time),
            }
        return plan
