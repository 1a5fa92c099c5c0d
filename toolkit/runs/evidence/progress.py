"""The progress of a run: its step, its speed, and the remaining time.

The data comes from the last records of `metrics.jsonl` and from `outcome.json`
(docs/reference/run-directory.md), which are untrusted.
"""

import contextlib
import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.errors import LauncherError
from toolkit.runs.records import run_directory
from toolkit.runs.records.log_reader import Tail
from toolkit.text import untrusted
from toolkit.text.quantities import rounded_duration

_LAST_BYTES = 1 << 17
"""How much of the metrics file is read: about 500 steps."""

_MOST_STEPS = 1000
"""Number of records for the speed."""

_PARTS = 4
"""Number of parts of these records, to estimate the variation of the speed."""

_RATES = ("samples_per_s", "tokens_per_s", "mfu")
_RATED_STEPS = 50
"""Number of newest steps for the median rate."""


class _Record(NamedTuple):
    start: int
    """The index of the start among those read."""
    when: float
    attempt: int
    restart: int
    step: int
    loss: float | None
    steps: int | None
    """The total number of steps, if the record has it."""
    rates: tuple[float | None, ...]
    """The rates, in the order of `_RATES`."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run."""

    step: int
    """The number of finished steps, up to the last record."""

    steps_planned: int | None
    """The total number of steps; None if the training has not recorded it."""

    loss: float | None
    """The newest loss."""

    step_s: float | None
    """Seconds per step, including the time between steps; None until the newest start has made two
    steps."""

    left_s: float | None
    """The remaining time at this speed, in seconds."""

    spread_s: float | None
    """The uncertainty of `left_s`, in seconds, from the variation of the speed."""

    attempt: int
    restart: int

    silent_s: float
    """Seconds since the last record was written."""

    samples_per_s: float | None = None
    """The median rate of the newest records."""

    tokens_per_s: float | None = None

    mfu: float | None = None
    """Model FLOPs utilisation, from 0 to 1."""

    @property
    def is_silent(self) -> bool:
        """Whether no step has been recorded for a minute, and for ten times the step time."""
        return self.silent_s > max(60.0, 10 * (self.step_s or 0.0))

    @property
    def position(self) -> str:
        """The step, as in `840/1500 (56%)`."""
        planned = self.steps_planned
        of = f"/{planned}" if planned is not None else ""
        share = f" ({self.step / planned:.0%})" if planned else ""
        return f"{self.step}{of}{share}"

    @property
    def details(self) -> str:
        """The values besides the step, as in `loss 0.31, 0.21 s per step, 2 min left`."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.step_s is not None:
            parts.append(f"{self.step_s:.3g} s per step")
        if self.samples_per_s is not None:
            parts.append(f"{_short(self.samples_per_s)} samples/s")
        if self.tokens_per_s is not None:
            parts.append(f"{_short(self.tokens_per_s)} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.left_s:
            spread = f" (± {rounded_duration(self.spread_s)})" if self.spread_s else ""
            parts.append(f"{rounded_duration(self.left_s)} left{spread}")
        if self.is_silent:
            parts.append(f"no step for {rounded_duration(self.silent_s)}")
        if self.attempt or self.restart:
            parts.append(f"attempt {self.attempt}, restart {self.restart}")
        return ", ".join(parts)

    def __str__(self) -> str:
        """Describe it in one line, such as `step 840/1500 (56%), loss 0.31, …`."""
        return ", ".join(filter(None, [f"step {self.position}", self.details]))


class ProgressReader:
    """Follows the progress of a run; each call reads only the new records."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / "metrics.jsonl"
        self._tail = Tail()
        self._forget()

    def _forget(self) -> None:
        self._reader = run_directory.MetricReader()
        self._records: deque[_Record] = deque(maxlen=_MOST_STEPS)
        self._start = 0

    def progress(self, *, now: float | None = None) -> Progress | None:
        """Return how far the run is; None where it has recorded no step.

        Args:
            now: The time, in seconds since 1970; by default the present.
        """
        try:
            self._read_on()
        except (OSError, LauncherError):  # for example, the file was removed
            self._forget()
            self._tail = Tail()
        if not self._records:
            return None
        now = time.time() if now is None else now
        last = self._records[-1]
        same = [one for one in self._records if one.start == last.start]
        steps = untrusted.whole((run_directory.outcome(self._run_dir) or {}).get("steps"))
        if steps is None:
            steps = last.steps
        step_s, varies_s = _speed(same)
        left = None if steps is None else max(steps - last.step, 0)
        return Progress(
            step=last.step,
            steps_planned=steps,
            loss=next((one.loss for one in reversed(self._records) if one.loss is not None), None),
            step_s=step_s,
            left_s=None if left is None or step_s is None else step_s * left,
            spread_s=None if left is None or varies_s is None else varies_s * left,
            attempt=last.attempt,
            restart=last.restart,
            silent_s=max(now - last.when, 0.0),
            **_rates(same),
        )

    def _read_on(self) -> None:
        size = os.lstat(self._path).st_size
        if not self._tail.offset <= size <= self._tail.offset + _LAST_BYTES:
            self._forget()  # the file was truncated, or has grown a lot: only its end is read
            self._tail = Tail(offset=max(size - _LAST_BYTES, 0))
        for line in self._tail.new_lines(self._path):
            record = self._reader.read(_parsed(line))
            if record is None:
                continue
            self._start += record.opens_start
            when = untrusted.moment(record.values.get("time"))
            if when is not None:
                loss = untrusted.finite(record.values.get("loss"))
                steps = untrusted.whole(record.values.get("steps"))
                place = record.attempt, record.restart, record.step
                rates = tuple(untrusted.finite(record.values.get(name)) for name in _RATES)
                self._records.append(_Record(self._start, when, *place, loss, steps, rates))


def progress_of(run_dir: Path, *, now: float | None = None) -> Progress | None:
    """Return how far a run is; None where it has recorded no step.

    Args:
        run_dir: The run directory.
        now: The time, in seconds since 1970; by default the present.
    """
    return ProgressReader(run_dir).progress(now=now)


def _rates(records: Sequence[_Record]) -> dict[str, float | None]:
    """Return the median rates of a start's newest records."""
    newest = records[-_RATED_STEPS:]
    rates: dict[str, float | None] = {}
    for place, name in enumerate(_RATES):
        most = 1.0 if name == "mfu" else float("inf")
        rated = (each.rates[place] for each in newest)
        values = [rate for rate in rated if rate is not None and 0 < rate <= most]
        rates[name] = statistics.median(values) if values else None
    return rates


def _short(number: float) -> str:
    """Return a rate with three digits.

    >>> _short(0.25), _short(31.46), _short(4096), _short(1234567)
    ('0.25', '31.5', '4.1k', '1.23M')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def _parsed(line: str) -> object:
    with contextlib.suppress(ValueError):  # the first line may be cut, and others by a kill
        return untrusted.parse_json(line)
    return None


def _speed(records: Sequence[_Record]) -> tuple[float | None, float | None]:
    """Return the seconds per step, and the deviation between parts of the records."""
    means = [_mean(records)]
    size = len(records) // _PARTS
    if size >= 2:
        bounds = [part * size for part in range(_PARTS)] + [len(records) - 1]
        means += [_mean(records[a : b + 1]) for a, b in itertools.pairwise(bounds)]
    known = [mean for mean in means if mean is not None]
    spread = (max(known) - min(known)) / 2 if len(known) > 1 else None
    return means[0], spread


def _mean(records: Sequence[_Record]) -> float | None:
    first, last = records[0], records[-1]
    steps, seconds = last.step - first.step, last.when - first.when
    return seconds / steps if steps > 0 and seconds >= 0 else None
