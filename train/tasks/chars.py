"""A character language model over real text that every Python brings along: its own source code."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.data import Batch
from train.errors import UsageError

# Files that CPython 3.10 to 3.14 all have, each well above PIECE bytes. Their text differs from one
# Python version to the next, hence the digest in `identity()`.
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
PIECE = 16 * 1024
CONTEXT = 64
# The last windows of each file are the test: neighbours of the training text, never part of it.
TEST_WINDOWS = 24
VOCABULARY = 128
WIDTH = 64
HEADS = 4
LAYERS = 2


class Chars:
    """Predict the next character from up to 64 before it."""

    name = "chars"

    def __init__(self) -> None:
        """Read the first 16 KiB of each file and cut them into windows of 64 characters."""
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
        for piece in pieces:
            windows = self._windows(piece)
            train.append(windows[:-TEST_WINDOWS])
            test.append(windows[-TEST_WINDOWS:])
        self._train = self._batch(torch.cat(train))
        self._test = self._batch(torch.cat(test))

    @staticmethod
    def _windows(piece: bytes) -> Tensor:
        """Cut bytes into windows that share one character. Shape [n, CONTEXT + 1]."""
        ascii_only = bytes(byte if byte < VOCABULARY else ord("?") for byte in piece)
        symbols = torch.frombuffer(bytearray(ascii_only), dtype=torch.uint8).long()
        return symbols.unfold(0, CONTEXT + 1, CONTEXT)

    @staticmethod
    def _batch(windows: Tensor) -> Batch:
        return Batch(inputs=windows[:, :-1].contiguous(), targets=windows[:, 1:].contiguous())

    def identity(self) -> Mapping[str, str | int]:
        """Say what else makes two runs different: the text and the sizes."""
        return {"text_sha256": self._digest, "context": CONTEXT, "width": WIDTH, "layers": LAYERS}

    def model(self) -> nn.Module:
        """Make a small causal transformer, [batch, time] to [batch, time, vocabulary]."""
        return Transformer()

    def train(self) -> Batch:
        """Give all training windows: [2310, 64] int, twice; the targets are one character ahead."""
        return self._train

    def test(self) -> Batch:
        """Give all test windows: [240, 64] int, twice."""
        return self._test

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy over the characters, in nats."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")

    def count(self, targets: Tensor) -> int:
        """Count the characters."""
        return targets.numel()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the characters whose likeliest guess is right."""
        return (outputs.argmax(dim=-1) == targets).sum()


class Transformer(nn.Module):
    """Embedding, blocks, projection."""

    def __init__(self) -> None:
        """Make the layers from torch's global generator."""
        super().__init__()
        self.symbols = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, symbols: Tensor) -> Tensor:
        """Score every next character: [batch, time] to [batch, time, vocabulary]."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        hidden = self.symbols(symbols) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.project(self.norm(hidden))
        return scores


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised before and added after."""

    def __init__(self) -> None:
        """Make the layers from torch's global generator."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        # No bias: softmax ignores a key's, whose gradient is then mere rounding noise, which AdamW
        # would scale up to full steps.
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        batch, time, width = hidden.shape
        mixed = self.attention_in(self.attention_norm(hidden))
        query, key, value = mixed.view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(seen.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.feed(self.feed_norm(hidden))  # type: ignore[no-any-return]  # nn.Module
