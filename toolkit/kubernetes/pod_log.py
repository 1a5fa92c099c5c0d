"""The log of one pod, through the restarts of its container and broken connections."""

import contextlib
import queue
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Missing
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.watcher import lines_of
from toolkit.kubernetes.workloads import Object
from toolkit.runs.log_reader import LogView, StopTraces

__all__ = ["STAMPED", "Lines", "PodLog", "Start", "starts_of"]

STAMPED = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?[-+:Z0-9]* ?(.*)", re.DOTALL
)
"""A line with its time, which the API server gives in UTC (Go's RFC3339Nano)."""

Lines: TypeAlias = "queue.Queue[str | LauncherError]"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a pod's container."""

    container: str
    container_id: str
    previous: bool
    running: bool


@dataclass(kw_only=True)
class PodLog:
    """The part of a pod's log that was read; its container may start several times."""

    pod: str
    prefix: str
    view: LogView
    stamp: bytes = b""
    """When the newest line that was read was printed; a pod's node has one clock."""

    same_stamp: int = 0
    """How many lines with that time were read."""

    ended: frozenset[str] = frozenset()
    """The starts that are known to have ended."""

    complete: set[str] = field(default_factory=set)
    """Those of them that were read to their end."""

    thread: threading.Thread | None = None
    response: Any = None
    stopping: threading.Event = field(default_factory=threading.Event)
    traces: StopTraces = field(default_factory=StopTraces)

    @property
    def active(self) -> bool:
        """Whether it is being read in the background."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def behind(self) -> bool:
        """Whether a start that has ended was not read to its end yet."""
        return not self.ended <= self.complete

    def follow(self, cluster: Cluster, starts: list[Start], lines: Lines) -> None:
        """Read in the background the first start that has not been read to its end."""
        self.ended = frozenset(start.container_id for start in starts if not start.running)
        unread = [start for start in starts if start.container_id not in self.complete]
        if self.active or not unread:
            return
        start = unread[0]

        def work() -> None:
            try:
                for line in self.shown(self.read(cluster, start, follow=True)):
                    lines.put(line)
                # Of one that was running, a connection that closed early looks the same: ask again.
                if not start.running:
                    self.complete.add(start.container_id)
                    for line in self.rest():
                        lines.put(line)
            except Away:
                pass  # the next round tries again
            except Missing:
                self.complete.add(start.container_id)
            except LauncherError as error:
                lines.put(error)
            except (OSError, ValueError, AttributeError):
                if not self.stopping.is_set():
                    raise

        self.thread = threading.Thread(target=work, name=f"log-{self.pod}", daemon=True)
        self.thread.start()

    def read(self, cluster: Cluster, start: Start, *, follow: bool) -> Iterator[str]:
        """Yield the lines that were not read before."""
        last_stamp, known_lines, seen = self.stamp, self.same_stamp, 0
        log = cluster.log(self.pod, start.container, previous=start.previous, follow=follow)
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

    def shown(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield what people see of these lines."""
        for line in lines:
            yield from self._told(self.traces.take(line))

    def rest(self) -> Iterator[str]:
        """Yield the lines that were held back, after the container's end."""
        yield from self._told(self.traces.rest())

    def _told(self, lines: list[str]) -> Iterator[str]:
        return (self.prefix + line for line in self.view.of_ranks(iter(lines)))

    def stop(self) -> None:
        """Make a blocked reader return, and wait for it."""
        self.stopping.set()
        connection = getattr(self.response, "connection", None)
        if self.active and (sock := getattr(connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self.thread is not None:
            self.thread.join(timeout=5)


def starts_of(pod: Object, container: str) -> Iterator[Start]:
    """Yield the starts of a pod's container whose logs the kubelet has, oldest first."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status.get("name", container) != container:
            continue
        for where in ("lastState", "state"):
            state = status.get(where) or {}
            running = state.get("running") is not None
            identity = (state.get("terminated") or {}).get("containerID") or (
                status.get("containerID") if running else None
            )
            if identity:
                previous = where == "lastState"
                yield Start(
                    container=container,
                    container_id=identity,
                    previous=previous,
                    running=running,
                )
