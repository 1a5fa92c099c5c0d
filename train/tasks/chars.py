"""A character language model over real text that comes with Python: its source code."""

import hashlib
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.order import Batch
from ..errors import UsageError
from ..layers import CausalAttention, Positions
from .base import ResidentClassifier, check_divisible, classes_can_be_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

FILES = (
    "argparse.py",
    "configparser.py",
    "difflib.py",
    "doctest.py",
    "inspect.py",
    "ipaddress.py",
    "mailbox.py",
    "optparse.py",
    "pickletools.py",
    "tarfile.py",
)
"""Files that CPython 3.10 to 3.14 all contain, each well above PIECE bytes. Their text differs
between Python versions, so `identity()` includes a digest."""
PIECE = 16 * 1024
CONTEXT = 64
TEST_WINDOWS = 24
"""The last windows of each file are the test set: next to the training text, never part of it."""
VOCABULARY = 128
WIDTH = 64
HEADS = 4
LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model: the defaults are small, benchmarks choose larger ones."""

    context: int = CONTEXT
    """Characters per sequence; at most half of PIECE."""
    width: int = WIDTH
    """Size of the hidden state per position."""
    heads: int = HEADS
    """Attention heads, which divide the width among them."""
    layers: int = LAYERS
    """Number of blocks."""


class Chars(ResidentClassifier):
    """Predict the next character from up to 64 before it.

    Training windows: [2310, 64] int, twice; test windows: [240, 64]. Targets are one character
    ahead.
    """

    name = "chars"

    def __init__(self, sizes: Sizes | None = None) -> None:
        """Read the first 16 KiB of each file and cut them into windows of 64 characters."""
        self.sizes = sizes or Sizes()
        library = Path(sysconfig.get_path("stdlib"))
        pieces = []
        for name in FILES:
            try:
                with (library / name).open("rb") as source:
                    pieces.append(source.read(PIECE))
            except OSError as error:
                raise UsageError(
                    f"task 'chars' reads Python's own sources, but {error.filename}: "
                    f"{error.strerror}; use a Python that installs them as .py files"
                ) from error
        self._digest = hashlib.sha256(b"".join(pieces)).hexdigest()
        train, test = [], []
        tests = max(TEST_WINDOWS * CONTEXT // self.sizes.context, 1)
        for piece in pieces:
            ascii_only = bytes(byte if byte < VOCABULARY else ord("?") for byte in piece)
            symbols = torch.frombuffer(bytearray(ascii_only), dtype=torch.uint8).long()
            # Neighbouring windows share one character. Shape [n, context + 1].
            windows = symbols.unfold(0, self.sizes.context + 1, self.sizes.context)
            train.append(windows[:-tests])
            test.append(windows[-tests:])
        super().__init__(train=self._batch(torch.cat(train)), test=self._batch(torch.cat(test)))

    @staticmethod
    def _batch(windows: Tensor) -> Batch:
        return Batch(inputs=windows[:, :-1].contiguous(), targets=windows[:, 1:].contiguous())

    def identity(self) -> Mapping[str, str | int]:
        """Return the text's digest and the sizes, which also tell runs apart."""
        return {
            "text_sha256": self._digest,
            "context": self.sizes.context,
            "width": self.sizes.width,
            "layers": self.sizes.layers,
        }

    def predictions(self, outputs: Tensor, targets: Tensor) -> Mapping[str, object]:
        """Return, for each window, the likeliest text, the true text, and its loss in nats.

        Each character of the prediction is the likeliest one after the preceding true text.
        """
        loss = functional.cross_entropy(
            outputs.float().transpose(1, 2), targets, reduction="none"
        ).sum(dim=1)
        prediction, target = (
            [bytes(symbols).decode("ascii") for symbols in batch.tolist()]
            for batch in (outputs.argmax(dim=-1), targets)
        )
        return {"prediction": prediction, "target": target, "loss": loss}

    def model(self) -> nn.Module:
        """Make a small causal transformer, [batch, time] to [batch, time, vocabulary]."""
        return Transformer(self.sizes)

    def pieces(self, model: nn.Module) -> Sequence[str]:
        """Name embedding, blocks and head."""
        return ["embed", *self._blocks(), "head"]

    def _blocks(self) -> list[str]:
        return [f"blocks.{number}" for number in range(self.sizes.layers)]

    def tensor_plan(
        self, model: nn.Module, *, ranks: int = 1, loss_parallel: bool = False
    ) -> "Mapping[str, ParallelStyle]":
        """Shard attention by heads, other layers by width; between them, shard the sequence.

        Layers that process every position separately (norms, sums, dropout) need not run for the
        whole sequence on all ranks. Each rank processes its part (sequence parallel), and the
        layers before and after gather and scatter the sequence.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
        )

        from .styles import PartwiseDropout, Replicated

        check_divisible("attention heads", self.sizes.heads, ranks)
        check_divisible("characters of a sequence", self.sizes.context, ranks)
        by_class = loss_parallel and classes_can_be_sharded(VOCABULARY, ranks)
        time = Shard(1)
        plan: dict[str, ParallelStyle] = {
            # The sum of both stays a DTensor, as only a DTensor knows its rank's part of the time.
            "embed.symbols": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=time, use_local_output=False
            ),
            "embed.positions": Replicated(),
            "embed": PrepareModuleOutput(output_layouts=time, desired_output_layouts=time),
            "head.norm": SequenceParallel(),
            "head.project": ColwiseParallel(
                input_layouts=time,
                output_layouts=Shard(-1) if by_class else Replicate(),
                use_local_output=not by_class,
            ),
        }
        for block in self._blocks():
            plan |= {
                f"{block}.attention_norm": SequenceParallel(),
                f"{block}.attention_in": ColwiseParallel(input_layouts=time),
                f"{block}.attention_out": RowwiseParallel(output_layouts=time),
                f"{block}.attention_drop": PartwiseDropout(),
                f"{block}.feed_norm": SequenceParallel(),
                f"{block}.feed.0": ColwiseParallel(input_layouts=time),
                f"{block}.feed.2": RowwiseParallel(output_layouts=time),
                f"{block}.feed.3": PartwiseDropout(),
            }
        return plan


class Transformer(nn.Module):
    """Embedding, blocks, head: in sequence, so that the model can be cut between any two."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        sizes = sizes or Sizes()
        self.embed = Embed(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = Head(sizes)

    def forward(self, symbols: Tensor) -> Tensor:
        """Score every next character: [batch, time] to [batch, time, vocabulary]."""
        hidden = self.embed(symbols)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden)
        return scores


class Embed(nn.Module):
    """Token embedding plus position embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.symbols = nn.Embedding(VOCABULARY, sizes.width)
        self.positions = Positions(sizes.context, sizes.width)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map [batch, time] to [batch, time, width]."""
        hidden: Tensor = self.symbols(symbols) + self.positions(symbols.shape[1])
        return hidden


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with pre-normalisation and residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.head_dim = width // sizes.heads
        self.attention_norm = nn.LayerNorm(width)
        # No bias: softmax ignores that of the keys. Its gradient would be mere rounding noise,
        # which AdamW would scale up to full steps.
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention = CausalAttention()
        self.attention_out = nn.Linear(width, width)
        self.attention_drop = nn.Dropout(0.0)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.0)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        mixed = self.attention_in(self.attention_norm(hidden))
        # Order the matrix by heads, so that a rank's rows are whole heads. Neither the number of
        # heads nor the time is fixed: a rank may have a part of either.
        by_head = mixed.unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = by_head.permute(3, 0, 2, 1, 4)
        seen = self.attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.attention_drop(self.attention_out(seen))
        return hidden + self.feed(self.feed_norm(hidden))  # type: ignore[no-any-return]  # nn.Module


class Head(nn.Module):
    """Normalise and score every symbol."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.project = nn.Linear(sizes.width, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, time, width] to [batch, time, vocabulary]."""
        scores: Tensor = self.project(self.norm(hidden))
        return scores
