"""Tasks whose positions are angles by which queries and keys are turned, counted in two ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from train.layers import CausalAttention, Places
from train.tasks.chars import VOCABULARY, Chars

WIDTH, HEADS = 32, 2
HEAD_DIM = WIDTH // HEADS


class FromZero(nn.Module):
    """Counts from the start of its input, without a global position."""

    def forward(self, time: int) -> Tensor:
        return torch.arange(time)


class Block(nn.Module):
    def __init__(self, places: nn.Module) -> None:
        super().__init__()
        self.places, self.attention = places, CausalAttention()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.mix(self.norm(hidden)).unflatten(-1, (3, HEADS, HEAD_DIM))
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        angles = self.places(hidden.shape[1])[:, None] / 10.0 ** torch.arange(HEAD_DIM // 2)
        seen = self.attention(turned(query, angles), turned(key, angles), value)
        return hidden + self.out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def turned(vectors: Tensor, angles: Tensor) -> Tensor:
    x, y = vectors.chunk(2, dim=-1)
    return torch.cat([x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()], -1)


class Rotary(Chars):
    name = "rotary"

    def model(self) -> nn.Module:
        return transformer(Places())

    def pieces(self, model: nn.Module) -> Sequence[str]:
        return ["0", "1", "2"]


class RotaryFromZero(Rotary):
    def model(self) -> nn.Module:
        return transformer(FromZero())


def transformer(places: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Block(places), nn.Linear(WIDTH, VOCABULARY)
    )
