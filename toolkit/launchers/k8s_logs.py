"""The lines of all pods of a run, merged, through restarts and broken connections."""

import contextlib
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from toolkit.errors import LauncherError
from toolkit.launchers.k8s_api import Away, Cluster, Missing
from toolkit.launchers.k8s_status import short_name
from toolkit.launchers.torchrun_log import StopTraces

__all__ = ["read_lines"]

_POLL_S = 1.0
"""How often to ask which pods there are."""

_STAMPED = re.compile(
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?[-+:Z0-9]* ?(.*)", re.DOTALL
)

_Queue: TypeAlias = "queue.Queue[str | LauncherError]"


def read_lines(
    cluster: Cluster, job_name: str, *, prefixed: bool, ended: Callable[[], bool] | None
) -> Iterator[str]:
    """Yield the lines that the pods of a PyTorchJob have printed.

    Args:
        cluster: Where it runs.
        job_name: Its name.
        prefixed: Whether each line tells its pod.
        ended: Whether nothing more will be printed; lines are followed until then. None: the
            lines that are there now.
    """
    lines: _Queue = queue.Queue()
    logs: dict[str, _PodLog] = {}
    try:
        while True:
            # Asked first: what was printed before the end is still read.
            last_round = ended is None or ended()
            with contextlib.suppress(Away) if ended is not None else contextlib.nullcontext():
                for pod in cluster.pods(job_name):
                    metadata = pod["metadata"]
                    prefix = f"[{short_name(metadata)}] " if prefixed else ""
                    new = _PodLog(pod=metadata["name"], prefix=prefix)
                    log = logs.setdefault(metadata["uid"], new)
                    if ended is not None:
                        log.follow(cluster, list(_starts_of(pod)), lines)
                        continue
                    for start in _starts_of(pod):
                        with contextlib.suppress(Missing):
                            yield from log.shown(log.read(cluster, start, follow=False))
                        yield from log.rest()
            look_again = time.monotonic() + _POLL_S
            while any(log.active for log in logs.values()) or not lines.empty() or not last_round:
                with contextlib.suppress(queue.Empty):
                    line = lines.get(timeout=_POLL_S / 10)
                    if isinstance(line, LauncherError):
                        raise line
                    yield line
                if not last_round and time.monotonic() > look_again:
                    break
            if last_round:
                return
    finally:
        for log in logs.values():
            log.stop()


@dataclass(frozen=True, kw_only=True)
class _Start:
    """One start of a pod's container."""

    container_id: str
    previous: bool
    running: bool


@dataclass(kw_only=True)
class _PodLog:
    """What was read of a pod's log; its container may start several times, one after the other."""

    pod: str
    prefix: str
    stamp: bytes = b""
    """When the newest line that was read was printed; a pod's node has one clock."""

    same_stamp: int = 0
    """How many lines with that time were read."""

    complete: set[str] = field(default_factory=set)
    thread: threading.Thread | None = None
    response: Any = None
    stopping: threading.Event = field(default_factory=threading.Event)
    traces: StopTraces = field(default_factory=StopTraces)

    @property
    def active(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def follow(self, cluster: Cluster, starts: list[_Start], lines: "_Queue") -> None:
        """Read in the background the first start that has not been read to its end."""
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
            except (OSError, ValueError):
                if not self.stopping.is_set():
                    raise

        self.thread = threading.Thread(target=work, name=f"log-{self.pod}", daemon=True)
        self.thread.start()

    def read(self, cluster: Cluster, start: _Start, *, follow: bool) -> Iterator[str]:
        """Yield the lines that were not read before."""
        known, known_lines, seen = self.stamp, self.same_stamp, 0
        with cluster.log(self.pod, previous=start.previous, follow=follow) as self.response:
            for raw in _split(self.response):
                stamp, text = self.stamp, raw
                if match := _STAMPED.match(raw):
                    stamp = match[1] + (match[2] or b"").ljust(9, b"0")
                    text = match[3]
                if stamp <= known:
                    seen += stamp == known
                    if stamp < known or seen <= known_lines:
                        continue
                self.same_stamp = self.same_stamp + 1 if stamp == self.stamp else 1
                self.stamp = stamp
                yield text.decode(errors="replace")

    def shown(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield what people see of these lines."""
        for line in lines:
            yield from (self.prefix + one for one in self.traces.take(line))

    def rest(self) -> Iterator[str]:
        """Yield what was held back, since the container has come to its end."""
        yield from (self.prefix + one for one in self.traces.rest())

    def stop(self) -> None:
        """Make a blocked reader return, and wait for it."""
        self.stopping.set()
        connection = getattr(self.response, "connection", None)
        if self.active and (sock := getattr(connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self.thread is not None:
            self.thread.join(timeout=5)


def _starts_of(pod: Mapping[str, Any]) -> Iterator[_Start]:
    """Yield the starts of a pod's container whose logs the kubelet has, oldest first."""
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        for where in ("lastState", "state"):
            state = container.get(where) or {}
            running = state.get("running") is not None
            identity = (state.get("terminated") or {}).get("containerID") or (
                container.get("containerID") if running else None
            )
            if identity:
                previous = where == "lastState"
                yield _Start(container_id=identity, previous=previous, running=running)


def _split(response: Any) -> Iterator[bytes]:
    rest = b""
    for chunk in response.stream(amt=None, decode_content=False):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest
