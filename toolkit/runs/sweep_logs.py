"""What the points of a sweep print, in one stream; each line begins with its point's name.

There may be thousands of points. So files are opened only where something may have been written:
those of points that run, and once more when a point has ended.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.runs.log_reader import LogView, Span, Tail
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.torchrun_report import StopTraces

__all__ = ["follow_points", "read_points"]

_BUSY = 5
"""Of so many parts of the time, asking where the points stand takes one at most."""

_PAUSE_S = 0.5
_PAUSE_PER_POINT_S = 0.005
"""How long to wait when there is nothing new; more points are looked at less often."""

Spans = Callable[[Run, LogView], list[Span]]
"""Where the lines of a point stand."""


@dataclass(kw_only=True)
class _Reader:
    """How far a point's log has been read."""

    point: Run
    view: LogView
    spans: Spans
    tails: dict[Path, Tail] = field(default_factory=dict)
    traces: StopTraces = field(default_factory=StopTraces)

    def new_lines(self) -> Iterator[str]:
        """Yield the lines since the last call."""
        return self._named(self._new())

    def rest(self) -> Iterator[str]:
        """Yield all that is left, now that the point has ended."""
        return self._named(self._rest())

    def _new(self) -> Iterator[str]:
        for span in self.spans(self.point, self.view):
            tail = self.tails.setdefault(span.path, Tail(offset=span.start))
            for line in tail.new_lines(span.path, span.end, span.below):
                yield from self.traces.take(line)

    def _rest(self) -> Iterator[str]:
        yield from self._new()
        for tail in self.tails.values():
            for line in tail.last_words():
                yield from self.traces.take(line)
        yield from self.traces.rest()

    def _named(self, lines: Iterator[str]) -> Iterator[str]:
        name = self.point.name.rpartition("/")[2]
        return (f"[{name}] {line}" for line in self.view.of_ranks(lines))


def read_points(points: Sequence[Run], view: LogView, spans: Spans) -> Iterator[str]:
    """Yield what the points have printed, one after the other."""
    for point in points:
        yield from _Reader(point=point, view=view, spans=spans).rest()


def follow_points(
    sweep: Run,
    view: LogView,
    spans: Spans,
    on_status: Callable[[RunStatus], object],
    *,
    ask_every_s: float = 3.0,
) -> Iterator[str]:
    """Yield what the points print as it comes, until all have ended.

    Args:
        sweep: The sweep.
        view: Which lines are wanted.
        spans: Where those of a point stand.
        on_status: Called with each answer of the scheduler.
        ask_every_s: How long to wait at least between two questions to the scheduler.
    """
    readers = {point.uri: _Reader(point=point, view=view, spans=spans) for point in sweep.points}
    states: dict[str, RunState] = {}
    while True:
        asked = time.monotonic()
        point_statuses = sweep.statuses()
        took_s = time.monotonic() - asked
        on_status(sweep.sum_of(point_statuses))
        busy = []
        for point, status in zip(sweep.points, point_statuses, strict=True):
            if (reader := readers.get(point.uri)) is None:
                continue
            if status.state.final or status.lost:
                yield from readers.pop(point.uri).rest()
            elif status.state is not RunState.PENDING:
                busy.append(reader)
            elif states.get(point.uri) is not RunState.PENDING:
                yield from reader.new_lines()  # lines from before it was requeued
            states[point.uri] = status.state
        if not readers:
            return
        pause_s = max(_PAUSE_S, _PAUSE_PER_POINT_S * len(busy))
        while time.monotonic() < asked + max(ask_every_s, _BUSY * took_s):
            lines = 0
            for reader in busy:
                for line in reader.new_lines():
                    lines += 1
                    yield line
            if not lines:
                time.sleep(pause_s)
