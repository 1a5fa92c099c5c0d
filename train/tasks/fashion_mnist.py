"""Fashion-MNIST: 70,000 small pictures of clothes, from a Debian package."""

import gzip
import os
import zlib
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.order import Batch
from ..errors import UsageError
from .base import ResidentClassifier

FOLDER = Path("/usr/share/datasets/fashion-mnist")
FOLDER_VARIABLE = "FASHION_MNIST_DIR"
CLASSES = 10
MAGIC = bytes([0, 0, 8])
"""Start of an idx file: two zero bytes, the type (8: unsigned bytes); then number of dimensions."""


class FashionMnist(ResidentClassifier):
    """Classify a picture of a piece of clothing.

    Training samples: [60000, 1, 28, 28] bytes and [60000] int; 10000 test samples of the same form.
    """

    name = "fashion-mnist"

    def __init__(self, folder: Path | None = None) -> None:
        """Read the pictures from a folder (default: $FASHION_MNIST_DIR, or the package's own)."""
        folder = folder or Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)
        super().__init__(train=_read(folder, "train"), test=_read(folder, "t10k"))

    def model(self) -> nn.Module:
        """Make a small network of convolutions, [batch, 1, 28, 28] bytes to [batch, 10]."""
        return nn.Sequential(
            OrderedDict(
                stem=Stem(),
                middle=nn.Sequential(*_convolution(16, 32)),
                deep=nn.Sequential(*_convolution(32, 64)),
                head=nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(64 * 3 * 3, CLASSES)),
            )
        )


class Stem(nn.Sequential):
    """The first convolution; takes bytes, a quarter of the memory and of the transfer to a GPU."""

    def __init__(self) -> None:
        super().__init__(*_convolution(1, 16))

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, 1, 28, 28] bytes to [batch, 16, 14, 14]."""
        # Cast to the weights' dtype, which mixed precision may have changed.
        hidden = images.to(next(self.parameters()).dtype) / 255
        for layer in self:
            hidden = layer(hidden)
        return hidden


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """Make the layers of a stage that halves height and width."""
    return [
        # No bias: the following normalisation would remove it.
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def _read(folder: Path, part: str) -> Batch:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    if len(images) != len(labels):
        raise UsageError(f"{folder}: {len(images)} {part} images, but {len(labels)} labels")
    return Batch(inputs=images.unsqueeze(1), targets=labels.long())


def read_idx(path: Path) -> Tensor:
    """Read a compressed idx file of bytes. Shape: as in the file.

    Raises:
        UsageError: the file is missing or damaged; names a source of the file.
    """
    try:
        with gzip.open(path) as file:
            content = bytearray(file.read())
    except FileNotFoundError as error:
        raise UsageError(
            f"task 'fashion-mnist' needs {path}: install the Debian package "
            "dataset-fashion-mnist (apt-get install dataset-fashion-mnist), or set "
            f"{FOLDER_VARIABLE} to a folder that has its files"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    dimensions = content[3] if len(content) > 3 and content.startswith(MAGIC) else 0
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if not dimensions or len(content) != start + torch.Size(shape).numel():
        raise UsageError(f"{path}: not an idx file of bytes, or cut short")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)
