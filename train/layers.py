"""Layers that context parallelism needs in your transformer to split its sequences.

Context parallelism gives each rank a part of every sequence. Almost every layer works on one
position at a time and can ignore this. The layers here depend on other positions or on the offset.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class ContextExchange(Protocol):
    """How ranks that hold parts of one sequence attend to each other's."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally from this rank's part to all parts up to it.

        All four: [batch, heads, time of this rank's part, head_dim].
        """


class CausalAttention(nn.Module):
    """Scaled dot-product attention in which no position sees a later one; has no parameters."""

    context: ContextExchange | None = None
    """Set by context parallelism to replace the computation; `None`: the whole sequence is here."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix values; each of the four is [batch, heads, time, head_dim]."""
        if self.context is not None:
            return self.context.attend(query, key, value)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Placed(nn.Module):
    """A layer that must know where in the sequence its input begins."""

    offset: int = 0
    """Set by context parallelism: where in the sequence this rank's part begins."""


class Positions(Placed):
    """A learned vector for each position in the sequence."""

    def __init__(self, places: int, width: int) -> None:
        """Make vectors for sequences of up to `places`, from torch's global generator."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(places, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew, as a model made on the meta device must."""
        nn.init.normal_(self.weight)

    def forward(self, time: int) -> Tensor:
        """Return the vectors of `time` places. Shape [time, width]."""
        return self.weight[self.offset : self.offset + time]


class Places(Placed):
    """The index of each position in the sequence, for other encodings, such as rotary angles."""

    def forward(self, time: int, device: torch.device | None = None) -> Tensor:
        """Number `time` places. Shape [time], int64."""
        return torch.arange(self.offset, self.offset + time, device=device)
