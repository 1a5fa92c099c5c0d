"""How long the phases of a start took, from the attempt's beginning to the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

ATTEMPT_BEGAN = "TRAIN_ATTEMPT_BEGAN"
"""Set by the scripts: when this attempt began, in seconds since 1970."""

_OLDEST_S = 30 * 24 * 3600
"""An attempt that began longer ago is not believed: the variable may be left from another job."""


class Phases:
    """The phases of one start of this process. Each begins where the one before has ended."""

    def __init__(self, began: float) -> None:
        self.began = began
        """When the first phase began, in seconds since 1970."""
        self.seconds: dict[str, float] = {}
        """How long each phase took, in the order of the phases."""
        self._last = began

    @classmethod
    def of_process(cls, environ: Mapping[str, str], *, restart: int) -> Phases:
        """Begin with the attempt, or with this process where the attempt's beginning is not known.

        The phase `start` lasts from the attempt's beginning until this process begins: containers,
        torchrun, the rendezvous of the nodes. A process that torchrun has started again has no
        such phase, since the attempt began with an earlier one.
        """
        began = process_began()
        text = environ.get(ATTEMPT_BEGAN, "")
        attempt_began = int(text) if text.isdecimal() and len(text) < 12 else 0
        if restart or not 0 <= began - attempt_began < _OLDEST_S:
            return cls(began)
        phases = cls(attempt_began)
        phases.end("start", at=began)
        return phases

    def end(self, phase: str, *, at: float | None = None) -> None:
        """Note that a phase has ended, now or at a time in seconds since 1970."""
        now = time.time() if at is None else at
        # A clock may have been set back meanwhile.
        self.seconds[phase] = max(now - self._last, 0.0)
        self._last = max(now, self._last)


def process_began() -> float:
    """Return when this process was started, in seconds since 1970, to 10 ms; now if unknown.

    Linux, proc(5): field 22 of /proc/self/stat, in clock ticks since the boot.
    """
    try:
        # The second field is the command in parentheses, which may hold any character.
        fields = (
            Path("/proc/self/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
