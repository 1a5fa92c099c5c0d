"""The weights alone, in one file that loads without us."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from train.checkpoints import safetensors_file
from train.checkpoints.reader import MODEL, Listing
from train.checkpoints.safetensors_file import TensorPart
from train.errors import CheckpointError


def weights(listing: Listing) -> Listing:
    """Give what of a checkpoint is the model's."""
    return {name: entry for name, entry in listing.items() if name.startswith(MODEL)}


def export(path: Path, listing: Listing, whole: Callable[[str], Tensor]) -> None:
    """Write the weights of a checkpoint under the plain model's names, tensor by tensor.

    Args:
        path: file to write; earlier files stay until all is written.
        listing: the checkpoint's tensors.
        whole: gives one of them by its name there.

    Raises:
        CheckpointError: it could not be written.
    """
    parts = [
        TensorPart(name=name, dtype=dtype, offsets=(0,) * len(shape), sizes=tuple(shape))
        for name, (shape, dtype) in weights(listing).items()
    ]
    parts.sort(key=TensorPart.order)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        named = [part.renamed(part.name.removeprefix(MODEL)) for part in parts]
        safetensors_file.write(draft, named, (whole(part.name) for part in parts))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise CheckpointError(f"cannot export to {path}: {error}") from error


def problem(path: Path) -> str:
    """Say why no file can be written there, if so; makes its directory."""
    if path.is_dir():
        return "is a directory; name a file in it"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"cannot write in {path.parent}: {error.strerror}"
