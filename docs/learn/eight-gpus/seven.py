"""A transformer of 7 billion parameters, with the sizes of Llama 2 7B."""

import torch
from torch import nn

from train.data.order import Batch
from train.layers import CausalAttention, Positions
from train.tasks.base import Classifier

WIDTH, HEADS, INNER, LAYERS, CONTEXT, VOCABULARY = 4096, 32, 11008, 32, 4096, 32000


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols, self.positions = nn.Embedding(VOCABULARY, WIDTH), Positions(CONTEXT, WIDTH)

    def forward(self, symbols):
        return self.symbols(symbols) + self.positions(symbols.shape[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention = CausalAttention()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden):
        heads = self.into(self.norm_1(hidden)).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2)
        hidden = hidden + self.out(self.attention(*heads.unbind(-2)).transpose(1, 2).flatten(-2))
        inner = self.norm_2(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden):
        return self.project(self.norm(hidden))


class Seven(Classifier):
    name = "seven"

    def model(self):
        return nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), Head())

    def train(self):
        symbols = torch.zeros(1024, CONTEXT, dtype=torch.int64)
        return Batch(inputs=symbols, targets=symbols)

    def test(self):
        symbols = torch.zeros(8, CONTEXT, dtype=torch.int64)
        return Batch(inputs=symbols, targets=symbols)

    def pieces(self, model):
        return [name for name, _ in model.named_children()]
