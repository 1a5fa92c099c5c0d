"""Sends the metrics of runs to a tracker, from a separate process.

The training writes `metrics.jsonl` and does not use the tracker, so that it neither waits for it
nor fails with it. The tracker gets one curve over all attempts, with each step once.
"""

import contextlib
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError, LauncherError
from toolkit.runs.records.run_directory import MetricReader
from toolkit.runs.run import pauses
from toolkit.runs.views.curves import figures_of
from toolkit.runs.views.trackers import Tracker, opened
from toolkit.text import untrusted

if TYPE_CHECKING:
    from toolkit.runs.run import Run

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.=+-]*)?", re.ASCII)
"""Names of runs, or of a sweep and its point. A run directory is untrusted: the run's name in it
may be anything, such as a path to another folder."""

_MOST_NAMES = 1000
"""Limit of figure names that a tracker gets per run."""

_LINE_BYTES = 1 << 16
_READ_BYTES = 64 << 20
"""Read size, so that a file of gibibytes does not need gibibytes of memory."""


class _Forwarder:
    """Sends the recorded metrics of one run."""

    def __init__(self, run: "Run", tracker: Tracker) -> None:
        self.run, self.tracker = run, tracker
        self._reader, self._offset, self._names = MetricReader(), 0, set[str]()
        self.has_ended = False
        self.records = 0
        """Number of records that have been sent."""

    def step(self) -> None:
        """Send the records since the last call.

        Raises:
            LauncherError: this machine cannot see the run directory.
        """
        with self.run.recorded("metrics.jsonl") as folder:
            for line in self._new_lines(folder / "metrics.jsonl"):
                record = self._reader.read(line)
                if record is None:
                    continue
                if record.opens_start:
                    self.tracker.begin(record.voids_from)
                when = untrusted.moment(record.values.get("time"))
                if when is not None:
                    self.tracker.add(record.step, when, self._known(figures_of(record)))
                    self.records += 1
        self.tracker.flush()

    def _known(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the figures with names among the run's first `_MOST_NAMES`."""
        new = (name for name in figures if name not in self._names)
        self._names |= set(itertools.islice(new, _MOST_NAMES - len(self._names)))
        return {name: value for name, value in figures.items() if name in self._names}

    def _new_lines(self, path: Path) -> Iterator[object]:
        with contextlib.suppress(FileNotFoundError), untrusted.open_untrusted(path) as file:
            file.seek(self._offset)
            limit = _READ_BYTES
            while limit > 0 and (line := file.readline(_LINE_BYTES)):
                if not line.endswith(b"\n") and len(line) < _LINE_BYTES:
                    return  # just being written
                limit -= len(line)
                self._offset += len(line)
                if line == b"\n":
                    continue
                with contextlib.suppress(ValueError):  # torn by a kill, or the rest of a long line
                    yield untrusted.parse_json(line)


def forward(
    runs: "Sequence[Run]", to: str, output: Path | None = None, *, follow: bool = True
) -> dict[str, tuple[int, str]]:
    """Send the metrics of runs, or of each point of a sweep, to a tracker until all have ended.

    Args:
        runs: The runs.
        to: One of `trackers.TRACKERS`.
        output: The folder or file to write; by default the tracker's.
        follow: Whether to continue until the runs have ended.

    Returns:
        The number of records read, and their destination, by run name.

    Raises:
        InputError: the output was not created by the toolkit, or the tracker is not installed.
        LauncherError: this machine cannot see a run directory, or the tracker has failed.
    """
    parts = [part for run in runs for part in run.parts]
    for part in parts:
        for name in (part.name, part.record.job):
            if not _NAME.fullmatch(name):
                raise InputError(
                    f"the run's name, {name!r}, cannot be a folder name", place=part.uri
                )
    with opened(parts, to, output) as trackers:
        forwarders = [_Forwarder(*pair) for pair in zip(parts, trackers, strict=True)]
        try:
            _follow(forwarders, follow=follow)
        finally:
            for one in forwarders:
                one.tracker.close(ended=one.has_ended)
    return {one.run.name: (one.records, one.tracker.place) for one in forwarders}


def _follow(forwarders: Sequence[_Forwarder], *, follow: bool) -> None:
    active = list(forwarders)
    for pause_s in pauses(first_s=1.0, longest_s=10.0):
        # Asked before reading: what a run records until its end is read afterwards.
        ended = [_has_ended(one.run) for one in active]
        for one, over in zip(active, ended, strict=True):
            before = -1
            while before != (before := one.records):
                one.step()
            one.has_ended = over
        active = [one for one in active if not one.has_ended]
        if not active or not follow:
            break
        time.sleep(pause_s)


def _has_ended(run: "Run") -> bool:
    try:
        status = run.status()
    except LauncherError:  # the cluster is temporarily unreachable
        return False
    return status.state.final or status.lost
