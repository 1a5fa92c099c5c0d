"""The merged log lines of all pods of a run, while pods start, restart and are replaced.

Reading a pod's log survives container restarts and broken connections.
"""

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Missing, hang_up, lines_of
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.pods import attempt_of, container_statuses
from toolkit.kubernetes.workloads import Object, WorkloadKind
from toolkit.runs.records.log_reader import LogFilter, LogView

_POLL_S = 1.0
"""Poll interval of the list of pods, in seconds."""

_MOST_WAITING = 10_000
"""Maximum number of buffered lines of all pods; the others stay on the server meanwhile."""

_LAST_ROUNDS = 4
"""Maximum number of polls for the remaining logs of ended pods."""

STAMPED = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?[-+:Z0-9]* ?(.*)", re.DOTALL
)
"""A line with its timestamp, in UTC (Go's RFC3339Nano)."""

_Lines: TypeAlias = "queue.Queue[str | LauncherError]"


@dataclass(frozen=True, kw_only=True)
class _ContainerStart:
    container_id: str
    previous: bool
    running: bool


@dataclass(kw_only=True)
class _PodLog:
    """Read position in a pod's log, over all starts of its container."""

    pod: str
    container: str
    filter: LogFilter
    stamp: bytes = b""
    """Timestamp of the newest line read; a pod's node has one clock."""

    same_stamp: int = 0
    """Number of lines read with that timestamp."""

    ended: frozenset[str] = frozenset()
    """The container starts that are known to have ended."""

    complete: set[str] = field(default_factory=set)
    """The container starts with a completely read log."""

    thread: threading.Thread | None = None
    response: Any = None
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def active(self) -> bool:
        """Whether a background thread reads the log."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def behind(self) -> bool:
        """Whether the log of an ended start is not completely read."""
        return not self.ended <= self.complete

    def follow(self, cluster: Cluster, starts: list[_ContainerStart], lines: _Lines) -> None:
        """Read the log of the first incomplete start in the background."""
        self.ended = frozenset(start.container_id for start in starts if not start.running)
        unread = [start for start in starts if start.container_id not in self.complete]
        if self.active or not unread:
            return
        start = unread[0]

        def work() -> None:
            try:
                for line in self.filter.shown(self.read(cluster, start, follow=True)):
                    self.hand(lines, line)
                # For a running container, an early close looks the same: ask again.
                if not start.running:
                    self.complete.add(start.container_id)
                    for line in self.filter.shown((), ended=True):
                        self.hand(lines, line)
            except Away:
                pass  # the next round tries again
            except Missing:
                self.complete.add(start.container_id)
            except LauncherError as error:
                self.hand(lines, error)
            except (OSError, ValueError, AttributeError):
                if not self.stopping.is_set():
                    raise

        self.thread = threading.Thread(target=work, name=f"log-{self.pod}", daemon=True)
        self.thread.start()

    def hand(self, lines: _Lines, line: str | LauncherError) -> None:
        """Hand over a line once the buffer has room, unless the reader has stopped."""
        while not self.stopping.is_set():
            with contextlib.suppress(queue.Full):
                lines.put(line, timeout=_POLL_S / 2)
                return

    def read(self, cluster: Cluster, start: _ContainerStart, *, follow: bool) -> Iterator[str]:
        """Yield the lines not read before."""
        last_stamp, known_lines, seen = self.stamp, self.same_stamp, 0
        log = cluster.log(self.pod, self.container, previous=start.previous, follow=follow)
        with log as self.response:
            for raw in lines_of(self.response):
                stamp, text = self.stamp, raw
                if match := STAMPED.match(raw):
                    stamp = match[1] + (match[2] or b"").ljust(9, b"0")
                    text = match[3]
                if stamp <= last_stamp:
                    seen += stamp == last_stamp
                    if stamp < last_stamp or seen <= known_lines:
                        continue
                self.same_stamp = self.same_stamp + 1 if stamp == self.stamp else 1
                self.stamp = stamp
                yield text.decode(errors="replace")

    def stop(self) -> None:
        """Make a blocked reader return, and wait for it."""
        self.stopping.set()
        if self.active:
            hang_up(self.response)
        if self.thread is not None:
            self.thread.join(timeout=5)


@dataclass(frozen=True, kw_only=True)
class Round:
    """The pods at one moment."""

    pods: Sequence[Object]
    """The pods, in the display order of their lines."""

    ended: bool = True
    """Whether the pods will print nothing more."""


def read_lines(
    cluster: Cluster,
    kind: WorkloadKind,
    view: LogView,
    look: Callable[[], Round],
    prefix: Callable[[Object], str],
) -> Iterator[str]:
    """Yield the log lines of the pods that the view selects.

    `look` returns the current pods, and `prefix` the prefix of a pod's lines.
    """
    lines: _Lines = queue.Queue(_MOST_WAITING)
    logs: dict[str, _PodLog] = {}
    last_round = not view.follow
    rounds = 0
    try:
        while True:
            with contextlib.suppress(Away) if view.follow else contextlib.nullcontext():
                seen = look()
                pods = seen.pods
                last_round = last_round or seen.ended
                if view.attempt is not None:
                    attempts = [attempt_of(pod) for pod in pods]  # None: not counted
                    last_round = last_round or any((n or 0) > view.attempt for n in attempts)
                    pods = [p for p in pods if attempt_of(p) in (view.attempt, None)]
                for pod in pods:
                    metadata = pod["metadata"]
                    new = _PodLog(
                        pod=metadata["name"],
                        container=kind.container,
                        filter=LogFilter(view, prefix(pod)),
                    )
                    log = logs.setdefault(metadata["uid"], new)
                    starts = list(_starts_of(pod, kind.container))
                    if view.follow:
                        log.follow(cluster, starts, lines)
                        continue
                    for start in starts:
                        with contextlib.suppress(Missing):
                            yield from log.filter.shown(log.read(cluster, start, follow=False))
                        yield from log.filter.shown((), ended=True)
            look_again = time.monotonic() + _POLL_S
            reading = most = 0
            while (
                (reading := sum(log.active for log in logs.values()))
                or not lines.empty()
                or not last_round
            ):
                if reading < most:  # a container has ended; its successor may start soon
                    look_again = min(look_again, time.monotonic() + _POLL_S / 5)
                most = reading
                with contextlib.suppress(queue.Empty):
                    for taken in range(_MOST_WAITING):
                        line = lines.get(timeout=0 if taken else _POLL_S / 20)
                        if isinstance(line, LauncherError):
                            raise line
                        yield line
                if not last_round and time.monotonic() > look_again:
                    break
            # A container that was being read may have restarted before all had ended.
            if last_round:
                rounds += 1
                if rounds == _LAST_ROUNDS or not any(log.behind for log in logs.values()):
                    return
    finally:
        for log in logs.values():
            log.stop()


def _starts_of(pod: Object, container: str) -> Iterator[_ContainerStart]:
    """Yield the starts of a pod's container that still have logs, oldest first."""
    for status in container_statuses(pod, container):
        for where in ("lastState", "state"):
            state = status.get(where) or {}
            running = state.get("running") is not None
            identity = (state.get("terminated") or {}).get("containerID") or (
                status.get("containerID") if running else None
            )
            if identity:
                previous = where == "lastState"
                yield _ContainerStart(container_id=identity, previous=previous, running=running)
