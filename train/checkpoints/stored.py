"""Reading a checkpoint: what it holds, a rank's part of it, or a whole tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from train.errors import CheckpointError

MODEL, OPTIMIZER = "model.", "optimizer."
# Shape and type of each tensor.
Listing = dict[str, tuple[torch.Size, torch.dtype]]


class Stored:
    """A checkpoint that `verify()` has found whole; at first only headers are read.

    Read by torch's own reader for distributed checkpoints (DCP), which knows no pickle here.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            CheckpointError: they are no headers.
        """
        self.path = path
        self._reader = HuggingFaceStorageReader(str(path))
        with _told(path):
            self._metadata: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    def listing(self) -> Listing:
        """List the tensors."""
        return {
            name: (found.size, found.properties.dtype)
            for name, found in sorted(self._metadata.state_dict_metadata.items())
            if isinstance(found, TensorStorageMetadata)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place; of a DTensor only this rank's part is read.

        Raises:
            CheckpointError: a tensor is not there, or of another shape.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _told(self.path), torch.no_grad():
            planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=False)
            self._reader.read_data(planner.create_local_plan(), planner).wait()

    def whole(self, name: str) -> Tensor:
        """Read all of one tensor."""
        shape, dtype = self.listing()[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.load({name: tensor})
        return tensor


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Make any failure to read a checkpoint ours, with its path."""
    try:
        yield
    # torch raises an AssertionError where shapes differ.
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error}") from error


def listing_of(tensors: Mapping[str, Tensor]) -> Listing:
    """List live tensors in the same way."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def differences(there: Listing, here: Iterable[Listing]) -> list[str]:
    """Name the tensors in which a checkpoint differs from what all ranks together hold."""
    ours: Listing = {}
    for one in here:
        ours.update(one)
    found = []
    for name in sorted({*there, *ours}):
        if name not in ours:
            found.append(f"{name}: {_shown(there[name])} there, nothing here")
        elif name not in there:
            found.append(f"{name}: nothing there, {_shown(ours[name])} here")
        elif there[name] != ours[name]:
            found.append(f"{name}: {_shown(there[name])} there, {_shown(ours[name])} here")
    return found


def _shown(entry: tuple[torch.Size, torch.dtype]) -> str:
    shape, dtype = entry
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
