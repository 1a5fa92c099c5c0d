"""One process: the reference that every other strategy must equal."""

from __future__ import annotations

from train.model import compilation
from train.parallel.base import Parts, WholeModel


class Single(WholeModel):
    """Runs the model as it is."""

    def __init__(self, parts: Parts) -> None:
        """Make the model on the rank's device."""
        super().__init__(parts, parts.model())
        compilation.whole(self.model, parts.config)
