"""The curves of a run: its metrics, by step and by time, with few enough points to draw.

They come from `metrics.jsonl` (docs/reference/run-directory.md), which is untrusted: values that
are not finite numbers are left out, and so are more names than a page shows.
"""

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.runs.records.run_directory import PLACE, MetricRecord, metric_records, recorded_metrics
from toolkit.text import control, untrusted

_BYTES = 4 << 30
_LINE_BYTES = 1 << 16
_MOST_CURVES = 24
_MOST_STARTS = 200
_NAME = 60
"""The longest name of a curve, in characters."""


@dataclass(frozen=True)
class Curve:
    """The values of one name; steps, times and values have equal length."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    """Ascending."""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    """In seconds since 1970."""
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, when: float, value: float) -> None:
        """Append a value; the last value of a step counts."""
        self.cut(step)
        self.steps.append(step)
        self.times.append(when)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Remove the values from a step on, because the step is repeated."""
        if self.steps and self.steps[-1] >= step:
            first = bisect_left(self.steps, step)
            del self.steps[first:], self.times[first:], self.values[first:]

    def thinned(self, most: int) -> "Curve":
        """Return the curve with at most `most` points, all of them original points.

        It keeps the lowest and the highest value of equally long parts, so that no peak is lost,
        and the first and the last value of the curve.

        Args:
            most: The maximum number of points, at least 4.
        """
        count = len(self.steps)
        if count <= most:
            return self
        parts = (most - 2) // 2
        kept = {0, count - 1}
        for part in range(parts):
            inside = range(part * count // parts, (part + 1) * count // parts)
            kept |= {
                min(inside, key=self.values.__getitem__),
                max(inside, key=self.values.__getitem__),
            }
        chosen = sorted(kept)
        return Curve(
            array("q", [self.steps[i] for i in chosen]),
            array("d", [self.times[i] for i in chosen]),
            array("d", [self.values[i] for i in chosen]),
        )


class Start(NamedTuple):
    """The first record of a rank start."""

    attempt: int
    restart: int
    step: int
    time: float
    """In seconds since 1970."""


def curves_and_starts(folder: Path) -> tuple[dict[str, Curve], list[Start]]:
    """Return the curves of the run directory by name, and the restarts of the ranks.

    The curves are in the order in which they begin. Steps repeated after a failure count once, as
    in `run_directory.read_metrics`. The starts are the newest 200, oldest first, without the
    first one of the run.
    """
    curves: dict[str, Curve] = {}
    starts: deque[Start] = deque(maxlen=_MOST_STARTS)
    is_first = True
    lines = untrusted.stream_json(folder / "metrics.jsonl", limit=_BYTES, line_limit=_LINE_BYTES)
    for record in metric_records(lines):
        if record.opens_start:
            for curve in curves.values():
                curve.cut(record.voids_from)
        when = untrusted.moment(record.values.get("time"))
        if when is None:
            continue
        if record.opens_start and not (is_first and (record.attempt, record.restart) == (0, 0)):
            starts.append(Start(record.attempt, record.restart, record.step, when))
        is_first = False
        for name, value in figures_of(record).items():
            if name in curves or len(curves) < _MOST_CURVES:
                curves.setdefault(name, Curve()).add(record.step, when, value)
    return {name: curve for name, curve in curves.items() if curve.steps}, list(starts)


def newest_and_curve(folder: Path, name: str) -> tuple[dict[str, Any], Curve]:
    """Return the row of the newest step of a run directory, and the curve of one name.

    Records without a time count as well; all times of the curve are 0.

    Raises:
        NewerFormat: a record has an unknown version.
    """
    newest, curve = dict[str, Any](), Curve()
    for record in recorded_metrics(folder):
        if record.opens_start:
            curve.cut(record.voids_from)
        if record.voids_from == record.step:
            newest = {}
        newest |= record.figures
        if (value := untrusted.finite(record.values.get(name))) is not None:
            curve.add(record.step, 0.0, value)
    return newest, curve


def figures_of(record: MetricRecord) -> dict[str, float]:
    """Return the figures of a record: its finite numbers by name."""
    return {
        control.printable(key)[:_NAME]: value
        for key, content in record.values.items()
        if key not in PLACE and (value := untrusted.finite(content)) is not None
    }
