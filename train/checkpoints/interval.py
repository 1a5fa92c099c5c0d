"""When to save, with `--checkpoint-every auto`: docs/learn/checkpoint-interval.md.

A checkpoint of C seconds in every T seconds costs C/T of the time, and a failure every M seconds
costs half an interval. The sum is smallest at T = √(2·C·M) (Young 1974).
"""

import math
import time
from collections.abc import Iterable, Mapping

from ..rundir import untrusted
from ..rundir.console import Console
from .checkpointer import SaveTiming

FIRST_S = 60.0
"""When to save first: it measures what a checkpoint costs."""
ASSUMED_S = 86_400.0
"""Before the run has failed, a failure is assumed after so many seconds more."""
LEAST_COST_S = 0.001
REPORTED_FACTOR = 2.0
"""An interval is reported again if it has changed by this factor."""


class Interval:
    """Chooses the interval between checkpoints, from their cost and the failures of the run.

    On rank 0, whose clock decides. Times are in seconds.
    """

    def __init__(self, events: Iterable[Mapping[str, object]], console: Console) -> None:
        """Read the records of earlier starts; `events`: lines of `events.jsonl`."""
        self.failures, self.running_s, self.cost_s = history(events)
        self._began = self._saved = time.monotonic()
        self.seconds = FIRST_S if self.cost_s is None else self._best(self.cost_s)
        self._console, self._reported = console, 0.0

    @property
    def between_failures_s(self) -> float:
        """The expected time between two failures: one more than there were, in the time so far."""
        so_far = self.running_s + time.monotonic() - self._began
        return (so_far + ASSUMED_S) / (self.failures + 1)

    @property
    def due(self) -> bool:
        """Whether the next checkpoint is due."""
        return time.monotonic() - self._saved >= self.seconds

    def saving(self) -> None:
        """Note that a checkpoint begins."""
        self._saved = time.monotonic()

    def committed(self, timing: SaveTiming) -> None:
        """Choose the interval anew by the cost of a checkpoint, and report it if it has changed."""
        self.cost_s = max(timing.stall_s, LEAST_COST_S)
        # The next save waits for the one before it.
        self.seconds = max(self._best(self.cost_s), timing.total_s)
        ratio = self.seconds / self._reported if self._reported else math.inf
        if not 1 / REPORTED_FACTOR < ratio < REPORTED_FACTOR:
            self._reported = self.seconds
            self._console.say(self.describe())

    def describe(self) -> str:
        """Explain the interval with its arithmetic."""
        so_far_h = (self.running_s + time.monotonic() - self._began) / 3600
        failures = f"{self.failures} failure{'' if self.failures == 1 else 's'}"
        return (
            f"a checkpoint every {self.seconds:.0f} s, by √(2 · {self.cost_s:.3f} s · "
            f"{self.between_failures_s:.0f} s): the last one stopped training for "
            f"{self.cost_s:.3f} s; {failures} in {so_far_h:.1f} h, and one more is assumed in the "
            f"next {ASSUMED_S / 3600:.0f} h"
        )

    def _best(self, cost_s: float) -> float:
        between_s = self.between_failures_s
        return min(math.sqrt(2 * cost_s * between_s), between_s)


def history(events: Iterable[Mapping[str, object]]) -> tuple[int, float, float | None]:
    """Return what earlier starts tell: failures, seconds of training, cost of a checkpoint.

    Each start ends at its last event. It has failed if that event is not `stopped` or `done`.

    >>> start, saved = {"event": "start", "time": 0.0}, {"event": "checkpoint", "time": 50.0}
    >>> history([start, saved | {"stall_seconds": 0.5}, start | {"time": 100.0}])
    (1, 50.0, 0.5)
    """
    starts: list[list[Mapping[str, object]]] = []
    cost_s = None
    for event in events:
        if event.get("event") == "start":
            starts.append([])
        if starts:
            starts[-1].append(event)
        if event.get("event") == "checkpoint":
            stall_s = _finite(event.get("stall_seconds"))
            cost_s = cost_s if stall_s is None else max(stall_s, LEAST_COST_S)
    failures, running_s = 0, 0.0
    for ended in starts[:-1]:  # the last one is this start
        failures += ended[-1].get("event") not in ("stopped", "done")
        first, last = (_finite(event.get("time")) for event in (ended[0], ended[-1]))
        if first is not None and last is not None:
            running_s += max(last - first, 0.0)
    return failures, running_s, cost_s


def _finite(value: object) -> float | None:
    try:
        number = untrusted.number(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
