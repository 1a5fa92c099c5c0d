"""Detect parameters that a pass over the model writes, instead of the optimizer.

`Embedding(max_norm=...)`, a clamp, or a teacher that follows its student writes in `forward()`. If
a strategy works on a copy, the write is lost. If each rank writes values from its own samples,
replicas diverge. If a step takes several passes, a parameter may be written several times.

torch counts the in-place operations on each tensor, and the count is cheap to read. It does not
include writes through `.data`, so the first step compares the contents as well.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .checksum import checksums


class Writes:
    """Watches this rank's parameters between the optimizer's steps."""

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        """Watch parameters by name; their checksums are stored on `device`."""
        self._names, self._tensors = list(parameters), list(parameters.values())
        self._device = device
        self._versions: list[int] | None = None
        self._contents: Tensor | None = None
        # Values after the first pass of a step that has written any.
        self._written: dict[str, Tensor] = {}
        self.unequal = frozenset[str]()
        """Parameters to which the passes of this step have written different values."""

    @property
    def started(self) -> bool:
        """Whether there is a state to compare with."""
        return self._versions is not None

    def start(self, *, contents: bool = False) -> None:
        """Record the counts of writes to parameters; with `contents`, also checksums."""
        self._contents = checksums(self._tensors, self._device) if contents else None
        self._versions = [tensor._version for tensor in self._tensors]
        if self._written:
            self._written = {}
            self.unequal = frozenset()

    def any(self) -> bool:
        """Whether any parameter has been written since."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            return True
        return self._contents is not None and bool(self._changed().any())

    def names(self) -> list[str]:
        """Name the parameters that have been written since."""
        assert self._versions is not None
        changed = [t._version != v for t, v in zip(self._tensors, self._versions, strict=True)]
        if self._contents is not None:
            changed = [a or b for a, b in zip(changed, self._changed().tolist(), strict=True)]
        return [name for name, yes in zip(self._names, changed, strict=True) if yes]

    def note_pass(self) -> None:
        """Compare the written values after this pass with those of the step's first pass."""
        if not self.started or not self.any():
            return
        names = {*self.names()}
        pairs = zip(self._names, self._tensors, strict=True)
        now = {name: tensor for name, tensor in pairs if name in names}
        if not self._written:
            self._written = {name: tensor.detach().clone() for name, tensor in now.items()}
        self.unequal |= {
            name
            for name, tensor in now.items()
            if name not in self._written or not torch.equal(tensor, self._written[name])
        }

    def _changed(self) -> Tensor:
        assert self._contents is not None
        return checksums(self._tensors, self._device).ne(self._contents)
