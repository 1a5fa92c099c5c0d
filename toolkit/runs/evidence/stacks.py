"""The positions of a running run's ranks: stacks, and the last collective of each process group.

The watchdog on each node (toolkit/supervisor/watchdog) answers a query, which is an empty file in
the attempt's folder. Answers are untrusted: everybody with write access to the run directory can
forge one.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import LauncherError
from toolkit.runs.records.log_reader import Span, attempt_folders, last_objects
from toolkit.text import control, untrusted

ANSWERS_S = 45.0
"""Time limit for the nodes' answers, in seconds: NFS may need 30 s to show a new file."""

_PAUSE_S = 0.2
_LONGEST_ANSWER = 8 << 20
_MOST_RANKS = 1 << 20

_LINES_BYTES, _LONGEST_LINE = 64 << 20, 1 << 20
"""Read limits of a watchdog's records: a line may name many thousands of ranks."""

_WHY = 4000
"""Character limit of a sentence in these records."""

_MOST_FRAMES, _MOST_THREADS = 1000, 1000
"""Limits of frames per stack, and of threads per rank."""

_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk", "Z": "dead"}
"""Linux process states (proc(5)) in which Python does not run, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A stack frame."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStacks:
    """The state of one rank."""

    rank: int
    node: str
    pid: int

    state: str
    """The process's state if it does not run Python: `stopped`, `dead`; else empty."""

    stack: tuple[Frame, ...]
    """The main thread's stack, innermost frame first; empty if it could not be read."""

    threads: tuple[tuple[Frame, ...], ...]
    """The stacks of its other threads."""

    collectives: tuple[str, ...]
    """The last collective entered in each process group, like `all_reduce 57 of 0`."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The states of a run's ranks."""

    ranks: tuple[RankStacks, ...]

    world_size: int
    """The number of ranks; ranks without an answer are missing in `ranks`."""

    @property
    def missing(self) -> list[int]:
        """The ranks without an answer from their node."""
        known = {each.rank for each in self.ranks}
        return [rank for rank in range(self.world_size) if rank not in known]

    def groups(self) -> list[list[RankStacks]]:
        """Return the ranks grouped by position, the smallest group first."""
        same: dict[tuple[str, ...], list[RankStacks]] = {}
        for each in self.ranks:
            # As texts: a forged answer may contain frames with equal hashes.
            place = (each.state, "\0".join(each.collectives), "\0".join(map(str, each.stack)))
            same.setdefault(place, []).append(each)
        return sorted(same.values(), key=lambda ranks: (len(ranks), ranks[0].rank))

    def lines(self) -> Iterator[str]:
        """Yield the stacks as `toolkit stacks` prints them, the smallest group first."""
        for together in self.groups():
            first = together[0]
            nodes = sorted({each.node for each in together})
            states = f", {first.state}" if first.state else ""
            yield f"{_numbered([each.rank for each in together])} on {_few(nodes)}{states}"
            for last in first.collectives:
                yield f"  last collective: {last}"
            for frame in reversed(first.stack):
                yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
            if not first.stack and not first.state:
                yield "  its stack cannot be read"
        if missing := self.missing:
            yield f"{_numbered(missing)}: no answer"

    def as_json(self) -> dict[str, Any]:
        """Return the output of `toolkit stacks --json`."""
        return asdict(self) | {"missing": self.missing}


class Exchange(Protocol):
    """Access to the query files for the watchdogs, and to their answers."""

    def ask(self, name: str) -> None:
        """Query all watchdogs of the newest attempt.

        Raises:
            LauncherError: the attempt has no watchdog, or the query cannot be written.
        """

    def answers(self, name: str) -> Iterable[bytes]:
        """Return the answers that have come."""

    def withdraw(self, name: str) -> None:
        """Remove the question and its answers."""


class FolderExchange:
    """The watchdogs' folder in a run directory that this machine sees."""

    def __init__(self, run_dir: Path) -> None:
        attempts = attempt_folders(run_dir)
        self._folder = attempts[-1] / "watchdog" if attempts else run_dir
        self._run_dir = run_dir

    def ask(self, name: str) -> None:
        """Query all watchdogs of the newest attempt."""
        if self._folder == self._run_dir or not self._folder.is_dir():
            raise LauncherError(f"{self._run_dir}: {NO_WATCHDOG}")
        try:
            untrusted.write_bytes(self._folder / f"ask-{name}", b"", anew=True)
        except OSError as error:
            message = f"{self._folder} cannot be written: {error.strerror}"
            raise LauncherError(message) from error

    def answers(self, name: str) -> Iterable[bytes]:
        """Return the answers that have come."""
        return _answers_in(self._folder, f"answer-{name}-")

    def withdraw(self, name: str) -> None:
        """Remove the question and its answers."""
        (self._folder / f"ask-{name}").unlink(missing_ok=True)
        for entry in untrusted.entries(self._folder):
            if entry.name.startswith(f"answer-{name}-"):
                (self._folder / entry.name).unlink(missing_ok=True)


NO_WATCHDOG = (
    "no watchdog looks into its ranks: the profile has `supervisor: none`, or the job has "
    "`stall_timeout: never`, or nothing starts its ranks again and the job sets neither "
    "`stall_timeout` nor `log_pattern` nor `notify` of stalls, or it has not started"
)


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stall that a watchdog has detected."""

    attempt: int

    when: float | None
    """In seconds since 1970."""

    why: str
    """The rank that blocks the others, and its position."""

    kills: bool
    """Whether that rank was killed."""

    stacks: Stacks
    """The states of the ranks at that time."""


def stalls_of(run_dir: Path, most: int) -> Iterator[Stall]:
    """Yield at most `most` of the newest stalls of a run, oldest first.

    The answers of all ranks may be large, so one stall is read at a time.
    """
    named: list[tuple[Path, dict[str, Any]]] = []
    for attempt in reversed(attempt_folders(run_dir)):
        lines = untrusted.stream_json(
            attempt / "watchdog/stalls.jsonl", limit=_LINES_BYTES, line_limit=_LONGEST_LINE
        )
        stalled = (line for line in map(untrusted.mapping, lines) if line.get("stalled") is True)
        newest = deque(stalled, maxlen=most - len(named))
        named += [(attempt, line) for line in reversed(newest)]
        if len(named) >= most:
            break
    for attempt, line in reversed(named):
        name = line.get("asked")
        folder = attempt / "watchdog"
        answers = _answers_in(folder, f"answer-{name}-") if isinstance(name, str) else []
        yield Stall(
            attempt=int(attempt.name.removeprefix("attempt-")),
            when=untrusted.moment(line.get("time")),
            why=_why(line),
            kills=line.get("kills") is True,
            stacks=read_answers(answers),
        )


def _answers_in(folder: Path, prefix: str) -> Iterator[bytes]:
    for entry in untrusted.entries(folder):
        if entry.is_file and entry.name.startswith(prefix):
            with contextlib.suppress(OSError):
                yield untrusted.read_bytes(folder / entry.name, limit=_LONGEST_ANSWER)


def newest_stall(run_dir: Path) -> str | None:
    """Return the watchdog's sentence about the newest attempt's stall; None without a stall."""
    newest = _newest(run_dir, "stalls")
    return _why(newest) if newest.get("stalled") is True else None


def newest_straggler(run_dir: Path) -> str | None:
    """Return the watchdog's sentence about the newest attempt's slow rank; None without one."""
    return _why(_newest(run_dir, "stragglers")) or None


def steps_left_out(run_dir: Path) -> str | None:
    """Return the newest attempt's sentence about lines that `log_pattern` has skipped, if any."""
    return _why(_newest(run_dir, "steps")) or None


def _newest(run_dir: Path, name: str) -> dict[str, Any]:
    """Return the last record of the newest attempt's watchdog; empty without one."""
    for attempt in attempt_folders(run_dir)[-1:]:
        path = attempt / "watchdog" / f"{name}.jsonl"
        return next(last_objects(Span(path=path), _LONGEST_LINE), {})
    return {}


def _why(line: dict[str, Any]) -> str:
    return untrusted.shortened(_text(line.get("why")), _WHY)


def ask_watchdogs(exchange: Exchange, *, timeout_s: float = ANSWERS_S) -> Stacks:
    """Return the states of all ranks, from the watchdogs of all nodes.

    Raises:
        LauncherError: the run has no watchdog, or none has answered.
    """
    name = f"stacks-{time.time_ns()}"
    exchange.ask(name)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            stacks = read_answers(exchange.answers(name))
            if stacks.ranks and not stacks.missing:
                return stacks
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
    finally:
        exchange.withdraw(name)
    if not stacks.ranks:
        raise LauncherError(
            f"no rank has answered within {timeout_s:g} s: no rank runs, or their nodes hang"
        )
    return stacks


def read_answers(answers: Iterable[bytes]) -> Stacks:
    """Return the watchdogs' answers; unreadable parts are left out."""
    ranks: dict[int, RankStacks] = {}
    world_size = 0
    for answer in answers:
        try:
            report = untrusted.mapping(untrusted.parse_json(answer))
        except ValueError:
            continue
        world_size = max(world_size, untrusted.whole(report.get("world"), most=_MOST_RANKS) or 0)
        for found in map(untrusted.mapping, untrusted.sequence(report.get("ranks"))):
            rank = untrusted.whole(found.get("rank"), most=_MOST_RANKS)
            if rank is not None:
                ranks[rank] = _rank_of(found, rank=rank, node=_text(report.get("node")))
    return Stacks(ranks=tuple(ranks[rank] for rank in sorted(ranks)), world_size=world_size)


def _rank_of(found: dict[str, Any], *, rank: int, node: str) -> RankStacks:
    threads = untrusted.sequence(found.get("threads"))[:_MOST_THREADS]
    collectives = untrusted.mapping(found.get("collectives"))
    return RankStacks(
        rank=rank,
        node=node,
        pid=untrusted.whole(found.get("pid")) or 0,
        state=_STATES.get(_text(found.get("state")), ""),
        stack=_frames(found.get("stack")),
        threads=tuple(frames for each in threads if (frames := _frames(each))),
        collectives=tuple(_collective(key, collectives[key]) for key in sorted(collectives)),
    )


def _frames(stack: object) -> tuple[Frame, ...]:
    frames = map(untrusted.sequence, untrusted.sequence(stack)[:_MOST_FRAMES])
    return tuple(
        Frame(file=_text(frame[0]), line=untrusted.whole(frame[1]) or 0, function=_text(frame[2]))
        for frame in frames
        if len(frame) == 3
    )


def _collective(group: str, value: object) -> str:
    last = untrusted.mapping(value)
    number = untrusted.whole(last.get("number")) or 0
    return f"{_text(last.get('name'))} {number} of process group {control.printable(group)}"


def _text(value: object) -> str:
    return control.printable(value) if isinstance(value, str) else ""


def _numbered(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + _few(ranks)


def _few(names: Sequence[object], most: int = 16) -> str:
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"
