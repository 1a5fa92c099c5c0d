"""Loss scaling for fp16, whose smallest numbers are larger than many gradients."""

from __future__ import annotations

from collections.abc import Mapping

# The schedule of Micikevicius et al., "Mixed Precision Training" (2018), with the numbers that
# torch.amp.GradScaler uses.
START = 2.0**16
GROW_AFTER = 2000
SMALLEST = 2.0**-14


class LossScaler:
    """The factor by which losses are multiplied: halved at an overflow, doubled after long peace.

    Not torch.amp.GradScaler: it looks at one rank's gradients, and ranks that disagree about a step
    part for good. Here the norm over all ranks decides.
    """

    def __init__(self, *, enabled: bool) -> None:
        """Scale from the start, or by 1 for ever."""
        self.enabled = enabled
        self.scale = START if enabled else 1.0
        self._good_steps = 0

    def passed(self) -> None:
        """Note a step whose gradients were finite."""
        self._good_steps += 1
        if self.enabled and self._good_steps % GROW_AFTER == 0:
            self.scale *= 2.0

    def overflowed(self) -> bool:
        """Note a step whose gradients were not; say whether a smaller scale may help."""
        self._good_steps = 0
        self.scale /= 2.0
        return self.enabled and self.scale >= SMALLEST

    def state(self) -> dict[str, float]:
        """Give what a checkpoint must hold."""
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else {}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from there; a checkpoint of another precision holds nothing."""
        if self.enabled and state:
            self.scale, self._good_steps = state["scale"], int(state["good_steps"])
