"""Reading a checkpoint: its contents, a rank's part, a whole tensor, or all weights."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import CheckpointError
from . import safetensors_file, store
from .safetensors_file import MEANT, TensorPart, as_stored

MODEL, OPTIMIZER = "model.", "optimizer."
Listing = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape and type of each tensor."""


class Stored:
    """A checkpoint that has passed `verify()`; only headers are read at first.

    It is read by torch's reader for distributed checkpoints (DCP), which unpickles nothing here.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            CheckpointError: the headers are invalid, or their parts do not form whole tensors.
        """
        self.path = path
        self._reader = HuggingFaceStorageReader(str(path))
        with _reading(path):
            files = [path / name for name in store.tensor_files(path)]
            self._reader.fs = _ListedFiles(files)
            self._metadata: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
            meant = {name: dtype for file in files for name, dtype in _meant(file).items()}
            self.listing: Listing = {}
            """The tensors."""
            for name, entry in sorted(self._metadata.state_dict_metadata.items()):
                if not isinstance(entry, TensorStorageMetadata):
                    continue
                if not _complete(entry):
                    raise ValueError(
                        f"the parts of {name!r} leave the tensor, or do not make it up"
                    )
                dtype = meant.get(name, entry.properties.dtype)
                # A file stores a complex number as two, in one more dimension.
                shape = entry.size[:-1] if dtype.is_complex else entry.size
                self.listing[name] = (shape, dtype)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place; for a DTensor, read this rank's part only.

        Raises:
            CheckpointError: a tensor is missing, or has another shape.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _reading(self.path), torch.no_grad():
            # A lazily conjugated or negated tensor cannot be filled through a view.
            lazy = {n: t for n, t in tensors.items() if t.is_conj() or t.is_neg()}
            solid = {name: torch.empty_like(tensor) for name, tensor in lazy.items()}
            views = {name: as_stored(tensor) for name, tensor in {**tensors, **solid}.items()}
            planner.set_up_planner(views, self._metadata, is_coordinator=False)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
            for name, tensor in lazy.items():
                tensor.copy_(solid[name])

    def whole(self, name: str) -> Tensor:
        """Read all of one tensor."""
        shape, dtype = self.listing[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.load({name: tensor})
        return tensor


class _ListedFiles(FileSystem):
    """Shows a reader only these files of the folder."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(file) for file in self._files]


def _meant(file: Path) -> dict[str, torch.dtype]:
    """Return the original types of the tensors that a file stores as another type."""
    with safe_open(file, framework="pt") as opened:
        names: dict[str, str] = json.loads((opened.metadata() or {}).get(MEANT, "{}"))
    meant = {name: getattr(torch, dtype) for name, dtype in names.items()}
    if strange := [name for name, dtype in meant.items() if not isinstance(dtype, torch.dtype)]:
        raise ValueError(f"{names[strange[0]]!r} is not a torch dtype")
    return meant


def _complete(entry: TensorStorageMetadata) -> bool:
    """Whether the parts of a tensor lie within it and have as many elements in total."""
    rank = len(entry.size)
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == rank and min(chunk.offsets, default=0) >= 0
        for chunk in entry.chunks
    )
    # Ranks that hold the same part may each have written it.
    boxes = {(*chunk.offsets, *chunk.sizes): math.prod(chunk.sizes) for chunk in entry.chunks}
    return inside and sum(boxes.values()) == math.prod(entry.size)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error in reading a checkpoint into a CheckpointError with its path."""
    try:
        yield
    # torch raises an AssertionError if shapes differ.
    except (
        OSError, SafetensorError, RuntimeError, ValueError, LookupError, TypeError, AttributeError,
        AssertionError, ArithmeticError,
    ) as error:  # fmt: skip
        raise CheckpointError(f"cannot read checkpoint {path}: {error}") from error


def differences(there: Listing, here: Iterable[Listing]) -> list[str]:
    """Name the tensors in which a checkpoint differs from what all ranks together hold."""
    ours: Listing = {}
    for one in here:
        ours.update(one)
    return [
        f"{name}: {_shown(there.get(name))} there, {_shown(ours.get(name))} here"
        for name in sorted({*there, *ours})
        if there.get(name) != ours.get(name)
    ]


def _shown(entry: tuple[torch.Size, torch.dtype] | None) -> str:
    if entry is None:
        return "nothing"
    shape, dtype = entry
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def weights(listing: Listing) -> Listing:
    """Return the entries of a checkpoint that belong to the model."""
    return {name: entry for name, entry in listing.items() if name.startswith(MODEL)}


def export(path: Path, listing: Listing, whole: Callable[[str], Tensor]) -> None:
    """Write the weights of a checkpoint under the plain model's names, tensor by tensor.

    An earlier file is kept until the new one is complete. `whole` returns a tensor by its name in
    `listing`.

    Raises:
        CheckpointError: the file could not be written.
    """
    parts = [
        TensorPart(name=name, dtype=dtype, offsets=(0,) * len(shape), sizes=tuple(shape))
        for name, (shape, dtype) in weights(listing).items()
    ]
    parts.sort(key=TensorPart.order)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        renamed = [replace(part, name=part.name.removeprefix(MODEL)) for part in parts]
        safetensors_file.write(draft, renamed, (whole(part.name) for part in parts))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise CheckpointError(f"cannot export to {path}: {error}") from error


def export_problem(path: Path) -> str:
    """Return why no file can be exported there, or ''; makes its directory."""
    if path.is_dir():
        return "is a directory; name a file in it"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"cannot write in {path.parent}: {error.strerror}"
