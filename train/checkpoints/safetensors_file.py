"""Files of tensors, in the safetensors format with the offsets that DCP adds to it.

The writers of torch and safetensors need a second copy of the whole file in memory. Here tensors
are written and hashed block by block, and may arrive from another rank one by one.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..runtime.process_group import bytes_of
from .store import Proof

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
}
"""The safetensors name of each torch dtype."""
STORED_AS = {
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""Types that not every reader supports are stored as another type: complex numbers as pairs of real
numbers, in one more dimension, the rest as bytes. The file's header holds the original types."""
MEANT = "torch_dtypes"
"""Header key of the original types: JSON by tensor name, such as {"model.angles": "complex64"}."""
BLOCK_BYTES = 1 << 20
"""Block size: small enough to be hashed and written while it is in a processor's cache."""


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A box within a tensor; it may be the whole tensor."""

    name: str
    """Name of the tensor."""
    dtype: torch.dtype
    """Dtype of the tensor."""
    offsets: tuple[int, ...]
    """Start of the box within the tensor, in each dimension."""
    sizes: tuple[int, ...]
    """Size of the box in each dimension."""

    @property
    def nbytes(self) -> int:
        """Size of the box in bytes."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def order(self) -> tuple[int, str]:
        """Sort the widest types first, so that each starts at a multiple of its width."""
        return -self.dtype.itemsize, self.name

    def stored(self) -> "TensorPart":
        """Return the same part of the tensor as `as_stored()` makes it."""
        if self.dtype not in STORED_AS:
            return self
        pairs = self.dtype.is_complex
        return replace(
            self,
            dtype=STORED_AS[self.dtype],
            offsets=(*self.offsets, 0) if pairs else self.offsets,
            sizes=(*self.sizes, 2) if pairs else self.sizes,
        )


def as_stored(tensor: Tensor) -> Tensor:
    """View a tensor with its dtype and shape in a file; a DTensor remains a DTensor."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(STORED_AS[tensor.dtype]) if tensor.dtype in STORED_AS else tensor


def problem_of(tensor: object) -> str:
    """Return why a file cannot store something, or why it cannot be read back in place; else ''."""
    if not isinstance(tensor, Tensor):
        return f"is of type {type(tensor).__name__}, no tensor"
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided:
        return f"has layout {str(tensor.layout).removeprefix('torch.')}, not strided"
    sharded = hasattr(tensor, "device_mesh")
    if tensor.dtype not in (*DTYPES, *STORED_AS):
        return f"is of type {kind}, which safetensors cannot hold"
    if sharded and tensor.dtype in STORED_AS and not tensor.is_complex():
        return f"is of type {kind}, and sharded"
    if not sharded and torch._debug_has_internal_overlap(tensor) == 1:
        return "has elements that share memory, as expand() makes them: give it a clone()"
    return ""


def size_of(parts: Sequence[TensorPart]) -> int:
    """Return how many bytes a file of these parts will have."""
    return len(_header(parts)) + sum(part.nbytes for part in parts)


def write(path: Path, parts: Sequence[TensorPart], tensors: Iterable[Tensor]) -> Proof:
    """Write a file of tensors and force it onto the disk.

    The parts are sorted by `TensorPart.order`; the tensors, on the CPU and contiguous, hold the
    parts' elements in the same order.
    """
    digest, count = hashlib.sha256(), 0

    def blocks() -> Iterator[memoryview | bytes]:
        yield _header(parts)
        for part, tensor in zip(parts, tensors, strict=True):
            data = memoryview(bytes_of(tensor).numpy())  # type: ignore[arg-type]  # it has a buffer
            assert len(data) == part.nbytes, f"{part} has {len(data)} bytes"
            for start in range(0, len(data), BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]

    with path.open("wb") as file:
        for block in blocks():
            digest.update(block)
            count += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": count, "sha256": digest.hexdigest()}


def _header(parts: Sequence[TensorPart]) -> bytes:
    head = {"format": "pt"}
    if meant := {
        p.name: str(p.dtype).removeprefix("torch.") for p in parts if p.dtype in STORED_AS
    }:
        head[MEANT] = json.dumps(meant)
    parts = [part.stored() for part in parts]
    if any(any(part.offsets) for part in parts):
        # Without this entry, every part starts at the start of its tensor.
        offsets = {part.name: {"saved_offsets": part.offsets} for part in parts}
        head |= {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
    entries: dict[str, object] = {"__metadata__": head}
    start = 0
    for part in parts:
        entries[part.name] = {
            "dtype": DTYPES[part.dtype],
            "shape": part.sizes,
            "data_offsets": (start, start + part.nbytes),
        }
        start += part.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
