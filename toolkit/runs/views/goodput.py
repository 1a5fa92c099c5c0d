"""Goodput: the share of a run's time spent on steps that count, and how the rest was spent.

All data comes from the files of the run directory (docs/reference/run-directory.md), so it is the
same on every site. These files are untrusted: values that are not numbers or times are left out,
and a clock that was set back makes a span empty, never negative.
"""

import itertools
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import LauncherError
from toolkit.runs.records.record_version import require_known
from toolkit.runs.records.run_directory import MetricReader
from toolkit.runs.records.scheduler_times import Schedule, Scheduled
from toolkit.text import control, untrusted

BUCKETS = {
    "productive": "steps that count",
    "lost work": "steps that were lost and repeated",
    "queue": "waiting for nodes",
    "held": "not yet eligible: a dependency, a begin time, a hold",
    "allocation": "from the nodes to the script: their boot, the prolog; in pods the image",
    "start": "containers, torchrun, the nodes' rendezvous",
    "imports": "Python and its imports",
    "process group": "the ranks' rendezvous",
    "setup": "data, model, optimizer",
    "restore": "loading a checkpoint",
    "first step": "extra time of the first step (compilation, warm-up)",
    "checkpoint": "training waits for a checkpoint",
    "evaluation": "on the test set",
    "stall": "from the last step to the failure",
    "restart": "from a failure to the next start in the job",
    "requeue": "from the end of an attempt until the next one is queued, or begins",
    "other": "the rest",
}
"""The buckets of a run's time, in display order."""

_PHASES = {
    "start": "start",
    "imports": "imports",
    "process_group": "process group",
    "setup": "setup",
    "restore": "restore",
}
"""The phases of the event `ready`, by bucket."""

_RELEASED = frozenset({"queue", "held", "requeue"})
"""Buckets in which the scheduler may give the run's nodes to other jobs."""

_QUEUE = frozenset({"queue", "held", "allocation"})
"""Buckets from the submission to the beginning of an attempt."""

_DOWN = frozenset({"checkpoint", "lost work", "stall", "restart", "requeue"})
"""Downtime as NVIDIA counts it: checkpoints, work lost, shutdown and restart."""

_STARTING = frozenset({"start", "imports", "process group", "setup", "restore", "first step"})
"""Also downtime, as is the queue, in each start except the first."""

_BYTES = 4 << 30
"""Read limit per file: 10 million steps, and more events than a run has."""

_LINE_BYTES = 1 << 16
_OUTCOME_BYTES = 1 << 20

_MOST_STARTS = 50_000
"""Limit of starts in memory; a run that restarts every minute reaches it in a month."""

_AHEAD_S = 86400.0
"""Limit by which a node's clock may be ahead of this machine's clock."""


class Price(NamedTuple):
    """The price of a rank-hour."""

    rank_hour: float
    currency: str

    @classmethod
    def of(cls, profile: Mapping[str, Any]) -> "Price | None":
        """Return the price in a run's recorded profile, which is untrusted."""
        price = untrusted.mapping(profile.get("price"))
        amount, currency = untrusted.finite(price.get("rank_hour")), price.get("currency")
        if amount is None or amount < 0 or not isinstance(currency, str):
            return None
        return cls(amount, control.printable(currency)[:16])

    def of_ranks(self, rank_s: float) -> str:
        """Return the price of this many rank-seconds, with the currency."""
        return f"{self.rank_hour * rank_s / 3600:.2f} {self.currency}"


class Span(NamedTuple):
    """A time that belongs to one bucket."""

    start: int
    """The index of the rank start, from 0; the gap before a start belongs to it."""

    bucket: str

    begin: float
    """In seconds since the submission."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How a run's time was spent."""

    elapsed_s: float
    """Seconds from the submission to the end, or to now."""

    seconds: Mapping[str, float]
    """Seconds in each of `BUCKETS`; their sum is the elapsed time."""

    steps: int
    """Steps that count, including those without a record."""

    steps_again: int
    """Steps that were lost and repeated."""

    starts: int
    """Number of starts of the ranks: attempts and restarts together."""

    ranks: int | None
    """Number of ranks in the newest start; None if no start has recorded a number."""

    rank_s: float | None
    """Rank-seconds for which the run held nodes. They exclude the queue and requeues, in which a
    scheduler may give the nodes to other jobs. None if a start has not recorded its ranks."""

    productive_rank_s: float | None
    """The part of `rank_s` spent on steps that count."""

    price: Price | None = None
    """The price of a rank-hour, if the run's profile sets it."""

    spans: tuple[Span, ...] = ()
    """The elapsed time from beginning to end. Between a start's first step and its last record,
    time is summed by bucket: for example, one span for all its checkpoints."""

    numbers: tuple[tuple[int, int], ...] = ()
    """Attempt and restart of each start."""

    step: int | None = None
    """The newest step, as in `toolkit status` and a report; None before the first. It is larger
    than `steps` if the run began with a later step than the first one."""

    @property
    def share(self) -> float:
        """The goodput: productive time ÷ elapsed time, from 0 to 1."""
        return self.seconds["productive"] / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def definitions(self) -> Mapping[str, float]:
        """The goodput by other definitions; see docs/reference/goodput.md."""
        after_queue = self.elapsed_s - sum(
            span.seconds for span in self.spans if not span.start and span.bucket in _QUEUE
        )
        productive = self.seconds["productive"]
        down_s = sum(
            span.seconds
            for span in self.spans
            if span.bucket in _DOWN or (span.start and span.bucket in _STARTING | _QUEUE)
        )
        return {
            "goodput (Google)": productive / after_queue if after_queue else 0.0,
            "ETTR (Meta)": self.share,
            "uptime (NVIDIA)": max(1 - down_s / after_queue, 0.0) if after_queue else 0.0,
        }

    def as_json(self) -> dict[str, Any]:
        """Return all figures by name, as `toolkit goodput --json` prints them."""
        return {
            "goodput": self.share,
            "elapsed_s": self.elapsed_s,
            "seconds": dict(self.seconds),
            "definitions": dict(self.definitions),
            "step": self.step,
            "steps_made": self.steps,
            "steps": self.steps,  # its earlier name
            "steps_again": self.steps_again,
            "starts": self.starts,
            "ranks": self.ranks,
            "rank_hours": None if self.rank_s is None else self.rank_s / 3600,
            "rank_hours_productive": (
                None if self.productive_rank_s is None else self.productive_rank_s / 3600
            ),
            "price": self.price and self.price._asdict(),
        }


@dataclass(slots=True)
class _Start:
    """The records of one start of the ranks."""

    number: tuple[int, int]
    """Attempt and restart."""

    first: float
    """The earliest recorded moment, in seconds since 1970."""

    last: float
    """The latest recorded moment."""

    is_begun: bool = False
    """Whether its event `start` was read."""

    began: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    batch: float | None = None
    ranks: int | None = None
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    failed_at: float | None = None
    stepped_at: float | None = None
    """When the last step ended."""
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    durations: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds for each of `steps`, including the steps that its record represents."""
    counts: "array[int]" = field(default_factory=lambda: array("q"))
    """Number of steps that each record represents; more than one if records were thinned."""

    def stretch(self, when: float) -> None:
        self.first, self.last = min(self.first, when), max(self.last, when)

    def add_event(self, event: str, row: Mapping[str, Any], when: float) -> None:
        """Add a record of `events.jsonl`."""
        seconds = untrusted.finite(row.get("stall_seconds" if event == "checkpoint" else "seconds"))
        seconds = max(seconds or 0.0, 0.0)
        if event == "start":
            self.batch = untrusted.finite(row.get("global_batch"))
            self.ranks = untrusted.whole(row.get("world_size"), least=1)
        elif event == "ready":
            began = untrusted.moment(row.get("began"))
            self.began = None if began is None else min(began, when)
            phases = untrusted.mapping(row.get("phases"))
            known = ((name, untrusted.finite(phases.get(name))) for name in _PHASES)
            self.phases = {name: max(took, 0.0) for name, took in known if took is not None}
        elif event == "epoch":
            self.evaluation_s += seconds
        elif event == "checkpoint":
            self.checkpoint_s += seconds
        elif event == "error":
            self.failed_at = when

    def add_step(self, step: int, row: Mapping[str, Any], when: float) -> None:
        """Add a record of `metrics.jsonl`."""
        if self.steps and step <= self.steps[-1]:
            return  # an evaluation has a separate record
        rate, took = (untrusted.finite(row.get(key)) for key in ("samples_per_s", "seconds"))
        before = self.steps[-1] if self.steps else step - 1
        count = min(untrusted.whole(row.get("count"), least=1) or 1, step - before)
        if took is not None:
            seconds = count * max(took, 0.0)
        elif rate and self.batch:
            seconds = count * self.batch / rate
        elif self.stepped_at is not None:
            seconds = max(when - self.stepped_at, 0.0)
        else:
            seconds = 0.0
        self.steps.append(step)
        self.durations.append(seconds)
        self.counts.append(count)
        self.stepped_at = when

    def steps_before(self) -> int:
        """Return how many steps had been made before this start.

        If a script records only every hundredth step, the first record represents a hundred steps.
        """
        first, second = (*self.steps[:2], self.steps[0])[:2]
        return max(first - self.counts[0], 0) if first > second - first else 0

    def in_first_step(self) -> float:
        """Return how much longer the first step took than the mean of the others."""
        others = sum(self.counts[1:])
        if others < 1:
            return 0.0
        return max(self.durations[0] - sum(self.durations[1:]) / others, 0.0)


def goodput_of(
    folder: Path,
    *,
    submitted: float | None = None,
    until: float | None = None,
    times: Sequence[Scheduled] = (),
    now: float | None = None,
) -> Goodput:
    """Return how a run's time was spent, from the files in its run directory.

    Args:
        folder: Where `events.jsonl`, `metrics.jsonl` and `outcome.json` are.
        submitted: When the run was submitted, in seconds since 1970; by default, when it began.
        until: The end of the time range for an active run; by default, its last recorded moment.
        times: The scheduler's times for the attempts, in any order.
        now: The time, in seconds since 1970; by default the present. Records from more than a day
            later are left out.

    Raises:
        NewerFormat: a record has an unknown version.
        LauncherError: the files contain more starts of the ranks than a run can have.
    """
    latest = (time.time() if now is None else now) + _AHEAD_S
    starts = _read_starts(folder, latest)
    schedule, valid_steps = Schedule(times), _valid_steps(starts)
    clock = _Clock(submitted)
    held, productive = 0.0, 0.0
    for index, start in enumerate(starts):
        clock.start = index
        if index == 0:
            gap = "queue"
        else:
            same = starts[index - 1].number[0] == start.number[0]
            gap = "restart" if same else "requeue"
        ranks = start.ranks or 0
        before = dict(clock.seconds)
        ended = start.first if start.began is None else start.began
        clock.wait(gap, ended, schedule.newest_before(ended))
        before |= {bucket: clock.seconds[bucket] for bucket in _RELEASED}
        for phase, seconds in start.phases.items():
            # From its end: an attempt's beginning, in whole seconds, may precede the submission.
            ended += seconds
            clock.advance(_PHASES[phase], min(ended, start.last))
        valid = valid_steps[index]
        clock.divide(_training(start, valid), until=start.last)
        held += ranks * (sum(clock.seconds.values()) - sum(before.values()))
        productive += ranks * (clock.seconds["productive"] - before["productive"])
    counted = zip(starts, valid_steps, strict=True)
    stepped = [(start, valid) for start, valid in counted if start.steps]
    step = stepped[-1][0].steps[-1] if stepped else None
    all_counted = bool(starts) and all(start.ranks for start in starts)
    last = untrusted.moment(_outcome(folder).get("time")) or 0.0
    ends = (last if last <= latest else None, until)
    clock.advance("other", max(filter(None, ends), default=clock.now))
    return Goodput(
        elapsed_s=sum(clock.seconds.values()),
        seconds=clock.seconds,
        step=step,
        steps=0 if step is None else step - min(start.steps_before() for start, _ in stepped),
        steps_again=sum(
            start.steps[-1] - (start.steps[valid - 1] if valid else start.steps_before())
            for start, valid in stepped
        ),
        starts=len(starts),
        ranks=next((start.ranks for start in reversed(starts) if start.ranks), None),
        rank_s=held if all_counted else None,
        productive_rank_s=productive if all_counted else None,
        spans=tuple(clock.spans),
        numbers=tuple(start.number for start in starts),
    )


class _Clock:
    """Moves through a run from its submission, and assigns each second to a bucket."""

    def __init__(self, begin: float | None) -> None:
        self._begin = begin
        self._now = begin
        self.seconds = dict.fromkeys(BUCKETS, 0.0)
        self.start = 0
        """The index of the current start of the ranks, from 0."""
        self.spans: list[Span] = []

    @property
    def now(self) -> float:
        """The current moment."""
        return self._now or 0.0

    def advance(self, bucket: str, moment: float) -> None:
        """Advance to a moment; does nothing if it has been passed."""
        if self._now is None:
            self._begin = self._now = moment
        self._spend(bucket, max(moment - self._now, 0.0))

    def wait(self, gap: str, moment: float, times: Scheduled | None) -> None:
        """Advance to the beginning of a start, through its scheduler's times."""
        if times is not None and gap != "restart" and times.started > self.now:
            self.advance(gap, min(times.queued, moment))
            self.advance("held", min(times.eligible, moment))
            self.advance("queue", min(times.started, moment))
            gap = "allocation"
        self.advance(gap, moment)

    def divide(self, shares: Mapping[str, float], *, until: float) -> None:
        """Advance to a moment. Each bucket gets its share of the time until then, `other` the rest.

        Shares that exceed the time, because clocks differ, are scaled down.
        """
        there_is, wanted = max(until - self.now, 0.0), sum(shares.values())
        scale = min(there_is / wanted, 1.0) if wanted else 0.0
        for bucket, seconds in shares.items():
            self._spend(bucket, seconds * scale)
        self._spend("other", max(there_is - wanted * scale, 0.0))
        self._now = max(until, self.now)

    def _spend(self, bucket: str, seconds: float) -> None:
        if seconds:
            self.spans.append(Span(self.start, bucket, self.now - (self._begin or 0.0), seconds))
            self.seconds[bucket] += seconds
            self._now = self.now + seconds


def _valid_steps(starts: Sequence[_Start]) -> list[int]:
    """Return how many records of each start are valid: no later start has repeated the step.

    A later start voids the steps from its first one on, as `run_directory.read_metrics` has it.
    """
    counts, voided = [], float("inf")
    for start in reversed(starts):
        counts.append(bisect_left(start.steps, voided))
        voided = min([voided, *start.steps[:1]])
    return counts[::-1]


def _training(start: _Start, valid: int) -> dict[str, float]:
    """Return the buckets of the time from a start's first step to its last record."""
    extra = start.in_first_step()
    productive, lost = sum(start.durations[:valid]), sum(start.durations[valid:])
    if valid:
        productive -= extra
    else:
        lost -= extra
    noticed = start.failed_at
    stall = 0.0 if noticed is None else max(noticed - (start.stepped_at or noticed), 0.0)
    return {
        "productive": productive,
        "lost work": lost,
        "first step": extra,
        "checkpoint": start.checkpoint_s,
        "evaluation": start.evaluation_s,
        "stall": stall,
    }


def _read_starts(folder: Path, latest: float) -> list[_Start]:
    """Return the starts of the ranks in their order, each with its records."""
    starts = _StartsByRecord()
    for row, when in _rows(folder / "events.jsonl", latest):
        event = str(row.get("event"))
        starts.of(row, when, begins=event == "start").add_event(event, row, when)
    reader = MetricReader()
    for row, when in _rows(folder / "metrics.jsonl", latest):
        start, record = starts.of(row, when), reader.read(row)
        adds = record is not None and record.voids_from > record.step  # such as an evaluation
        if not adds and (step := untrusted.whole(row.get("step"))) is not None:
            start.add_step(step, row, when)
    return starts.in_order()


class _Alike:
    """The starts that have the same attempt and restart."""

    __slots__ = ("_began", "_opened", "_starts")

    def __init__(self) -> None:
        self._opened: list[_Start] = []
        # Of these, the starts that began before every later-opened one, and when they began.
        self._starts: list[_Start] = []
        self._began: list[float] = []

    @property
    def newest(self) -> _Start | None:
        """The most recently opened start."""
        return self._opened[-1] if self._opened else None

    def add(self, start: _Start) -> None:
        """Add a start; the starts that began after it have no more records."""
        self._opened = [*self._opened[:1], start]
        kept = bisect_left(self._began, start.first)
        self._starts[kept:], self._began[kept:] = [start], [start.first]

    def at(self, when: float) -> _Start:
        """Return the last-opened start that had begun at a time, or the very first one."""
        count = bisect_right(self._began, when)
        return self._starts[count - 1] if count else self._opened[0]


class _StartsByRecord:
    """The starts of a run; attempt and restart numbers do not identify them.

    torchrun counts no restart for a membership change: two starts can have the same attempt and
    restart, and a start with a lower restart can follow if rank 0 moves to another node.
    """

    def __init__(self) -> None:
        self._opened: list[_Start] = []
        # Keyed by text: a writer of records may choose numbers with equal hashes.
        self._by_number: dict[str, _Alike] = {}

    def of(self, row: Mapping[str, Any], when: float, *, begins: bool = False) -> _Start:
        """Return the start of a record; a record that `begins` a start opens it."""
        numbers = (untrusted.whole(row.get(key)) or 0 for key in ("attempt", "restart"))
        number = (next(numbers), next(numbers))
        if (alike := self._by_number.get(f"{number}")) is None:
            alike = self._by_number[f"{number}"] = _Alike()
        if (newest := alike.newest) is None or (begins and newest.is_begun):
            if len(self._opened) == _MOST_STARTS:
                raise LauncherError(
                    f"its records have more than {_MOST_STARTS:,} starts of the ranks; their "
                    "goodput is not computed"
                )
            self._opened.append(_Start(number, when, when))
            alike.add(self._opened[-1])
        start = alike.at(when)
        start.is_begun = start.is_begun or begins
        start.stretch(when)
        return start

    def in_order(self) -> list[_Start]:
        """Return the starts by attempt, and within an attempt in recorded order."""
        starts = sorted(self._opened, key=lambda start: start.number[0])
        for before, start in itertools.pairwise(starts):
            # After a restart that torchrun has not counted, a process takes itself for the first.
            if start.began is not None and start.began < before.last:
                start.began += start.phases.pop("start", 0.0)
        return starts


def _rows(path: Path, latest: float) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield the records of a file, each with its time; lines without a time are left out.

    The file is read line by line: a run of millions of steps has gibibytes.
    """
    for value in untrusted.stream_json(path, limit=_BYTES, line_limit=_LINE_BYTES):
        row = require_known(untrusted.mapping(value), path.name)
        if (when := untrusted.moment(row.get("time"))) is not None and when <= latest:
            yield row, when


def _outcome(folder: Path) -> Mapping[str, Any]:
    try:
        content = untrusted.mapping(
            untrusted.read_json(folder / "outcome.json", limit=_OUTCOME_BYTES)
        )
    except (OSError, ValueError):
        return {}
    return require_known(content, "outcome.json")
