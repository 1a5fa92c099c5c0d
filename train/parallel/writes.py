"""Has a pass over the model written one of its parameters, beside the optimizer?

`Embedding(max_norm=...)`, a clamp, or a teacher that follows its student do so in `forward()`.
Where a strategy works on a copy, the write is lost; where each rank writes by its own samples, the
copies part; and where a step takes several passes, it may be written several times.

torch counts the in-place operations on each tensor, which costs next to nothing to read. It does
not count those through `.data`: the first step compares the contents as well.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .checksum import checksums


class Writes:
    """Watches this rank's parameters between the optimizer's steps."""

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        """Watch parameters by name; numbers for what they hold come to `device`."""
        self._names, self._tensors = list(parameters), list(parameters.values())
        self._device = device
        self._versions: list[int] | None = None
        self._contents: Tensor | None = None
        # What the first pass of a step has written.
        self._written: dict[str, Tensor] = {}
        self.unequal = frozenset[str]()
        """Parameters that the passes of this step have not left as the first of them has."""

    @property
    def started(self) -> bool:
        """Whether there is a moment to compare with."""
        return self._versions is not None

    def start(self, *, contents: bool = False) -> None:
        """Note how parameters are now; with `contents`, also what they hold."""
        self._contents = checksums(self._tensors, self._device) if contents else None
        self._versions = [tensor._version for tensor in self._tensors]
        if self._written:
            self._written = {}
            self.unequal = frozenset()

    def any(self) -> bool:
        """Whether any has been written since."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            return True
        return self._contents is not None and bool(self._changed().any())

    def names(self) -> list[str]:
        """Name those that have been written since."""
        assert self._versions is not None
        changed = [t._version != v for t, v in zip(self._tensors, self._versions, strict=True)]
        if self._contents is not None:
            changed = [a or b for a, b in zip(changed, self._changed().tolist(), strict=True)]
        return [name for name, yes in zip(self._names, changed, strict=True) if yes]

    def note_pass(self) -> None:
        """Compare with the first pass of this step what another one has left."""
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
