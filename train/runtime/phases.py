"""The duration of each phase of a start, from the start of the attempt to the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

ATTEMPT_BEGAN = "TRAIN_ATTEMPT_BEGAN"
"""The job scripts set it: start time of this attempt, in seconds since 1970."""

_OLDEST_S = 30 * 24 * 3600
"""An older start time is ignored: the variable may be left over from another job."""


class Phases:
    """The phases of one start of this process; each phase starts when the previous one ends."""

    def __init__(self, began: float) -> None:
        self.began = began
        """Start time of the first phase, in seconds since 1970."""
        self.seconds: dict[str, float] = {}
        """Duration of each phase, in order."""
        self._last = began

    @classmethod
    def of_process(cls, environ: Mapping[str, str], *, restart: int) -> Phases:
        """Start with the attempt, or with this process if the start of the attempt is not known.

        The phase `start` lasts from the start of the attempt until the start of this process:
        containers, torchrun, the rendezvous of the nodes. A process that torchrun has restarted has
        no such phase, since the attempt started with an earlier process.
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
        """Record the end of a phase, now or at a time in seconds since 1970."""
        now = time.time() if at is None else at
        # A clock may have been set back meanwhile.
        self.seconds[phase] = max(now - self._last, 0.0)
        self._last = max(now, self._last)


def process_began() -> float:
    """Return the start time of this process, in seconds since 1970, to 10 ms; now if unknown.

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
