"""The output of a run: the files that contain it, as they grow, and the lines that are shown.

On Slurm one file contains the output of all jobs of a run, and each attempt records where its part
begins (`logs/attempt-N/log`); on this machine each node of an attempt has a file (`node-K.log`).
Both contain the lines of all ranks as torchrun forwards them: each begins with `[rank N] `.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from toolkit.errors import InputError, LauncherError
from toolkit.runs.records.state_dir import state_folder
from toolkit.runs.state import RunState, RunStatus
from toolkit.text import untrusted

if TYPE_CHECKING:
    from toolkit.runs.run import Run

_CHUNK = 1 << 20
_LINE_BYTES = 1 << 20
"""Longer lines are split, so that a file without a line end cannot fill the memory."""

_ATTEMPT = re.compile(r"attempt-(0|[1-9][0-9]{0,8})", re.ASCII)
_NODE_LOG = re.compile(r"node-.*\.log", re.DOTALL)
_NOTE = re.compile(r"([0-9]{1,18}) (.+)\n", re.ASCII)
_NOTE_BYTES = 1 << 14
_NODES_BYTES = 1 << 20

# ---- Selection of lines

_RANK = re.compile(r"\[rank (\d{1,9})\] ")
"""torchrun's prefix of a rank's lines: see TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""

_TORN = re.compile(r"(\[rank \d+\] .+)\[rank \d+\] ")
"""A line with a second prefix before its line end. Under PYTHONUNBUFFERED a rank writes the line
end separately; torchrun has read in between, and forwards the line end with another prefix."""


@dataclass(frozen=True, kw_only=True)
class LogView:
    """The lines of a run to show."""

    follow: bool = False
    """Whether to continue until the run has ended."""

    ranks: frozenset[int] = frozenset()
    """The ranks to show; empty for all lines."""

    attempt: int | None = None
    """The attempt to show; None for all."""

    def of_ranks(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield the lines of the requested ranks, as the ranks have written them."""
        for line in lines:
            if line.startswith("[rank ") and (torn := _TORN.fullmatch(line)):
                line = torn[1]
            of = _RANK.match(line) if self.ranks else None
            if not self.ranks or (of and int(of[1]) in self.ranks):
                yield line


_STOP_TRACE = re.compile(
    r"\s|$|Traceback \(most recent call last\):|During handling of the above exception"
    r"|torch\.distributed\.elastic\.\S*SignalException|--- Logging error ---|Call stack:"
    r"|Message: |Arguments: |RuntimeError: reentrant call"
)
"""Lines of torchrun's traceback after a stop signal: its `SignalException` looks like a failure but
is not. The lines of several nodes may be interleaved."""

_MOST_HELD, _HELD_CHARACTERS = 50_000, 8 << 20
"""How much of a traceback is buffered; the tracebacks of a thousand nodes have about 4 MB."""

_STARTS = ("Traceback (most recent call last):", "--- Logging error ---")

_LOG_LINE = re.compile(r"\[|[WIE]\d{4} |srun: |slurmstepd")
"""Lines that may appear within a traceback."""


_NOISE = re.compile(
    r"(\[rank \d+\] )?\[W\S+ \S+ socket\.cpp:\d+\] \[c10d\] "
    r"The hostname of the client socket cannot be retrieved\. err=-?\d+"
)
"""A harmless warning of c10d about an address without a host name."""

_FRAME = re.compile(r"frame #\d+: .*|Exception raised from \S+ at .* \(most recent call first\):")
"""The C++ stack of a torchrun warning, for example after the first node's torchrun has ended before
the others. Lines of ranks have a prefix."""


class LogFilter:
    """Selects the lines of a log that a view shows, and adds a prefix to each.

    Tracebacks are buffered until it is clear whether they are torchrun's stop tracebacks. These are
    left out, as are c10d's warnings about addresses without a name, and the C++ stacks of
    torchrun's warnings. Lines beyond the buffer limit are shown.
    """

    def __init__(self, view: LogView, prefix: str = "") -> None:
        self._view, self._prefix = view, prefix
        self._held: list[str] = []
        self._held_characters = 0

    def shown(self, lines: Iterable[str], *, ended: bool = False) -> Iterator[str]:
        """Yield the next lines that are shown; with `ended`, also the buffered ones."""
        for line in self._view.of_ranks(self._without_stop_traces(lines, ended)):
            yield self._prefix + line

    def _without_stop_traces(self, lines: Iterable[str], ended: bool) -> Iterator[str]:
        for line in lines:
            if ("socket.cpp" in line and _NOISE.fullmatch(line)) or _FRAME.fullmatch(line):
                continue
            if line.startswith(_STARTS) or (self._held and _STOP_TRACE.match(line)):
                self._held.append(line)
                self._held_characters += len(line)
                if len(self._held) > _MOST_HELD or self._held_characters > _HELD_CHARACTERS:
                    yield from self._rest()
                continue
            if not _LOG_LINE.match(line):
                yield from self._rest()
            yield line
        if ended:
            yield from self._rest()

    def _rest(self) -> list[str]:
        held, self._held, self._held_characters = self._held, [], 0
        return [] if any("SignalException" in line for line in held) else held


# ---- Files that grow


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a file."""

    path: Path

    start: int = 0
    """The offset of its first byte."""

    end: int | None = None
    """The offset after its last byte; None for the end of the file, which may grow."""

    below: Path | None = None
    """The folder below which no part of the path may be a link; None checks the file only."""


def end_of(span: Span, most: int) -> bytes:
    """Return the last bytes of a file part."""
    with untrusted.open_untrusted(span.path, below=span.below) as file:
        size = file.seek(0, os.SEEK_END)
        end = size if span.end is None else min(span.end, size)
        begin = file.seek(max(span.start, end - most))
        return file.read(max(0, end - begin))


def last_objects(span: Span, most: int) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects, one per line, from the end of a file, the last one first.

    The first and the last line may be torn.
    """
    try:
        lines = end_of(span, most).split(b"\n")
    except OSError:
        return
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            if isinstance(value := untrusted.parse_json(line), dict):
                yield value


@dataclass(kw_only=True)
class Tail:
    """The read position in a growing file."""

    offset: int = 0
    """The next byte."""

    torn: bytearray = field(default_factory=bytearray, repr=False)
    """The beginning of a line that is not yet complete."""

    def new_lines(
        self, path: Path, end: int | None = None, below: Path | None = None
    ) -> Iterator[str]:
        """Yield the complete new lines, up to the byte `end`; `below` as in `Span`.

        Raises:
            LauncherError: the file cannot be read, or is not a regular file.
        """
        # Reopened each time: network file systems show other clients' writes only after an open.
        try:
            file = untrusted.open_untrusted(path, below=below)
        except FileNotFoundError:
            return
        except OSError as error:
            raise LauncherError(f"{path} cannot be read: {error.strerror}") from error
        with file:
            if file.seek(0, os.SEEK_END) < self.offset:  # it was truncated
                self.offset, self.torn = 0, bytearray()
            file.seek(self.offset)
            while chunk := _read(
                file, path, _CHUNK if end is None else max(0, min(_CHUNK, end - self.offset))
            ):
                self.offset += len(chunk)
                self.torn += chunk
                if b"\n" in chunk:
                    *lines, self.torn = self.torn.split(b"\n")
                    for line in lines:
                        yield line.decode(errors="replace")
                if len(self.torn) > _LINE_BYTES:
                    yield from self.last_words()

    def last_words(self) -> Iterator[str]:
        """Yield the last line of a file that does not end with a newline."""
        if self.torn:
            yield self.torn.decode(errors="replace")
            self.torn = bytearray()


def _read(file: BinaryIO, path: Path, most: int) -> bytes:
    try:
        return file.read(most)
    except OSError as error:  # not an OSError: `main()` takes one for the end of the output
        raise LauncherError(f"{path} cannot be read: {error.strerror}") from error


class _Tails:
    """The read positions in the files of a run."""

    def __init__(self) -> None:
        self._tails: dict[Path, Tail] = {}

    def new_lines(self, spans: Iterable[Span], *, ended: bool) -> Iterator[str]:
        """Yield the lines since the last call; with `ended`, also an incomplete last line."""
        for span in spans:
            tail = self._tails.setdefault(span.path, Tail(offset=span.start))
            yield from tail.new_lines(span.path, span.end, span.below)
        if ended:
            for tail in self._tails.values():
                yield from tail.last_words()


def follow_files(
    find: Callable[[], list[Span]],
    *,
    ended: Callable[[], bool],
    pause_s: float = 0.2,
    ask_every_s: float = 0.0,
) -> Iterator[str]:
    """Yield the lines of growing files as they come, until `ended` and all files are read.

    Args:
        find: Returns the spans to read; called repeatedly, since new files appear.
        ended: Whether nothing more will be written.
        pause_s: How long to wait when there is nothing new.
        ask_every_s: The minimum time between two calls of `ended`.
    """
    tails = _Tails()
    asked_s, last_round = float("-inf"), False
    while not last_round:
        if (now := time.monotonic()) >= asked_s + ask_every_s:
            last_round = ended()  # asked first: lines from before the end are still read
            asked_s = now
        any_line = False
        for line in tails.new_lines(find(), ended=last_round):
            any_line = True
            yield line
        if not any_line and not last_round:
            time.sleep(pause_s)


# ---- Log locations of the attempts


def modified_at(path: Path) -> float:
    """Return when a file or folder was last changed, in seconds since 1970; 0 if it is missing."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def nodes_of(attempt: Path) -> list[str]:
    """Return an attempt's node names in node order; an empty list if they are not recorded."""
    with contextlib.suppress(OSError):
        path = attempt / "nodes"
        return untrusted.read_text(path, limit=_NODES_BYTES, below=attempt.parents[1]).split()
    return []


def is_followed(run_dir: Path, attempt: int | None) -> bool:
    """Whether a later attempt has begun; never for None, which means all attempts."""
    return attempt is not None and bool(attempt_folders(run_dir)[attempt + 1 :])


def attempt_folders(run_dir: Path) -> list[Path]:
    """Return the log folders of the attempts, oldest first."""
    return [run_dir / f"logs/attempt-{number}" for number in attempt_numbers(run_dir)]


def attempt_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of the attempts, in order; entries with other names are left out."""
    folders = untrusted.entries(f"{run_dir}/logs")
    return sorted(int(named[1]) for f in folders if (named := _ATTEMPT.fullmatch(f.name)))


def attempt_spans(run_dir: Path, attempt: int) -> list[Span]:
    """Return the file parts with an attempt's lines; none if it has not started."""
    folder = run_dir / "logs" / f"attempt-{attempt}"
    if (own := _noted(folder)) is None:
        return _of_nodes(folder, run_dir)
    start, name = own
    notes = filter(None, (_noted(other) for other in attempt_folders(run_dir) if other != folder))
    later = [begin for begin, other in notes if other == name and begin > start]
    span = _here(name, run_dir, folder)
    return [replace(span, start=start, end=min(later, default=None))] if span else []


def all_spans(run_dir: Path, first: Path) -> list[Span]:
    """Return the file parts with the lines of all attempts, beginning with the file `first`.

    A manually continued run (`sbatch FILE RUN_DIR continue`) prints to another file.
    """
    below = next((p for p in (run_dir, run_dir.parent) if first.is_relative_to(p)), None)
    noted: dict[Path, Span] = {first: Span(path=first, below=below)}
    nodes: list[Span] = []
    for folder in attempt_folders(run_dir):
        if (own := _noted(folder)) is None:
            nodes += _of_nodes(folder, run_dir)
        elif span := _here(own[1], run_dir, folder):
            noted.setdefault(span.path, span)
    return [*noted.values(), *nodes]


def spans_of(run_dir: Path, view: LogView, first: Path) -> list[Span]:
    """Return the file parts of the view's attempt, or of all, beginning with `first`."""
    if view.attempt is None:
        return all_spans(run_dir, first)
    return attempt_spans(run_dir, view.attempt)


def read_run(
    run_dir: Path,
    view: LogView,
    find: Callable[[], list[Span]],
    *,
    ended: Callable[[], bool],
    **pace: float,
) -> Iterator[str]:
    """Yield the lines of a run that the view shows; `follow_files` gets the other arguments.

    Raises:
        InputError: the attempt does not exist, and will not start.
    """
    if view.attempt is not None and not view.follow:
        numbers = attempt_numbers(run_dir)
        if view.attempt not in numbers:
            attempts = f"there are {numbers[0]} to {numbers[-1]}" if numbers else "none has begun"
            raise InputError(f"{attempts} of it", place=f"--attempt {view.attempt}")
    lines = follow_files(find, ended=lambda: not view.follow or ended(), **pace)
    return LogFilter(view).shown(lines, ended=True)


def _noted(folder: Path) -> tuple[int, str] | None:
    """Return the log position recorded by an attempt on Slurm: the offset and the file."""
    path = folder / "log"
    # Most attempts on other sites have no such file, and lexists costs less than an open.
    with contextlib.suppress(OSError, ValueError):
        if not os.path.lexists(path):
            return None
        start, name = _note(path)
        return None if name == "/dev/null" else (start, name)
    return None


@functools.lru_cache(maxsize=4096)  # a follower calls this often, and the note never changes
def _note(path: Path) -> tuple[int, str]:
    text = untrusted.read_text(path, limit=_NOTE_BYTES, below=path.parents[2])
    if (note := _NOTE.fullmatch(text)) is None or "\0" in text:
        raise ValueError("it is being written")  # exceptions are not cached
    return int(note[1]), note[2]


def _here(name: str, run_dir: Path, attempt: Path) -> Span | None:
    """Return the location of a log that an attempt has recorded; None if it is not trusted.

    The run directory may be a mirror of another. A log outside the run directory, such as that of a
    manually submitted job, is read only if the record and the log belong to this user and no other
    user can write the record: otherwise the record could expose any file as the run's log.
    """
    path = Path(name)
    if path.parent.name == "logs":
        for parent in (run_dir, run_dir.parent):  # a point's log is in the sweep's directory
            if (parent / "logs" / path.name).exists():
                return Span(path=parent / "logs" / path.name, below=parent)
    if path.is_relative_to(run_dir):
        return Span(path=path, below=run_dir)
    with contextlib.suppress(OSError):
        note = (attempt / "log").lstat()
        ours = {note.st_uid, path.lstat().st_uid} == {os.getuid()} and not note.st_mode & 0o022
        if ours and state_folder() not in run_dir.parents:
            return Span(path=path)
    return None


def _of_nodes(folder: Path, run_dir: Path) -> list[Span]:
    files = (entry.name for entry in untrusted.entries(folder, below=run_dir) if entry.is_file)
    names = by_number(name for name in files if _NODE_LOG.fullmatch(name))
    return [Span(path=folder / name, below=run_dir) for name in names]


def by_number(names: Iterable[str]) -> list[str]:
    """Return names sorted by the numbers in them.

    >>> by_number(["node-10.log", "node-9.log"])
    ['node-9.log', 'node-10.log']
    """
    return sorted(names, key=lambda name: [(len(n), n) for n in re.findall("[1-9][0-9]*", name)])


# ---- Sweeps: the lines of all points in one stream, each after its point's name
#
# There may be thousands of points, so only files that may have changed are opened: those of running
# points, and once more when a point has ended.

_BUSY = 5
"""Status queries of the points take at most one part in this many of the time."""

_PAUSE_S = 0.5
_PAUSE_PER_POINT_S = 0.005
"""Pause when there is nothing new; it grows with the number of points."""

Spans = Mapping[str, Callable[[LogView], list[Span]]]
"""Functions that return the file parts of a point's log, by the point's URI."""


class _PointLog:
    """The read position in a point's log."""

    def __init__(self, point: "Run", view: LogView, spans: Spans) -> None:
        self._find = functools.partial(spans[point.uri], view)
        self._filter = LogFilter(view, f"[{point.name.rpartition('/')[2]}] ")
        self._tails = _Tails()

    def new_lines(self, *, ended: bool = False) -> Iterator[str]:
        """Yield the lines since the last call; all remaining lines if the point has `ended`."""
        return self._filter.shown(self._tails.new_lines(self._find(), ended=ended), ended=ended)


def read_points(points: "Sequence[Run]", view: LogView, spans: Spans) -> Iterator[str]:
    """Yield the output of the points, one point after the other."""
    for point in points:
        yield from _PointLog(point, view, spans).new_lines(ended=True)


def follow_points(
    sweep: "Run",
    view: LogView,
    spans: Spans,
    on_status: Callable[[RunStatus], object],
    *,
    ask_every_s: float = 3.0,
) -> Iterator[str]:
    """Yield the output of the points as it comes, until all have ended.

    `on_status` gets each answer of the scheduler, at most one per `ask_every_s` seconds.
    """
    logs = {point.uri: _PointLog(point, view, spans) for point in sweep.points}
    states: dict[str, RunState] = {}
    while True:
        asked_s = time.monotonic()
        point_statuses = sweep.statuses()
        took_s = time.monotonic() - asked_s
        on_status(sweep.sum_of(point_statuses))
        busy = []
        for point, status in zip(sweep.points, point_statuses, strict=True):
            if (log := logs.get(point.uri)) is None:
                continue
            if status.state.final or status.lost:
                yield from logs.pop(point.uri).new_lines(ended=True)
            elif status.state is not RunState.PENDING:
                busy.append(log)
            elif states.get(point.uri) is not RunState.PENDING:
                yield from log.new_lines()  # lines from before a requeue
            states[point.uri] = status.state
        if not logs:
            return
        pause_s = max(_PAUSE_S, _PAUSE_PER_POINT_S * len(busy))
        while time.monotonic() < asked_s + max(ask_every_s, _BUSY * took_s):
            lines = 0
            for log in busy:
                for line in log.new_lines():
                    lines += 1
                    yield line
            if not lines:
                time.sleep(pause_s)
