import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width, heads, *, fused, dropout=0.0):
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def drop(self, x):  # as on GPUs: keeps one byte per number
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x

    def attention(self, query, key, value):
        if self.fused:
            return functional.scaled_dot_product_attention(query, key, value)
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        return self.drop(scores.softmax(-1)) @ value

    def forward(self, x):
        heads = self.into(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = self.attention(*(head.transpose(1, 2) for head in heads))
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm_2(x)))))
