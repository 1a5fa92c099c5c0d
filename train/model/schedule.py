"""The learning rate of each step."""

from __future__ import annotations

import math

from train.cli.config import Config
from train.errors import UsageError


class Schedule:
    """A function of the step, so that a resumed run needs no state of it."""

    def __init__(self, config: Config, steps: int) -> None:
        """Plan for a run of so many steps.

        Raises:
            UsageError: the run would end before the learning rate has risen.
        """
        self._shape, self._warm_up, self._steps = config.lr_schedule, config.warmup_steps, steps
        self._lr = config.lr
        if self._warm_up and self._warm_up >= steps:
            raise UsageError(
                f"--warmup-steps {self._warm_up}: the run has {steps} steps, and would end before "
                "the learning rate reaches --lr; warm up for fewer, or train for more"
            )

    def at(self, step: int) -> float:
        """Give the learning rate of a step, counted from 0.

        It rises on a line, then falls towards 0, which the step after the last one would have; the
        half cosine is that of Loshchilov and Hutter, "SGDR" (2017).
        """
        if step < self._warm_up:
            return self._lr * (step + 1) / self._warm_up
        if self._shape == "constant":
            return self._lr
        done = min((step - self._warm_up) / max(self._steps - self._warm_up, 1), 1.0)
        left = 1.0 - done if self._shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return self._lr * left
