"""A watch over all runs of a namespace and kind: one list, one connection, however many runs.

It goes on over closed connections, a server that is away, one that asks for patience (429), and
one that has forgotten where we were (410), after which everything is listed anew.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.client import answers
from toolkit.kubernetes.client.connection import LONGEST_PAUSE_S, Away, Expired, refusal
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.status import digest, state_of
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.runs.state import RunState
from toolkit.text import untrusted

__all__ = ["Change", "Watch", "lines_of", "watch_states"]

_FIRST_PAUSE_S = 0.5
_LINE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Change:
    """A run that has another state than before."""

    name: str
    """The object's name."""

    state: RunState | None
    """Its status from the object itself; None where it is gone."""

    reason: str = ""
    """Its reason."""


class Watch:
    """The objects of a kind that a selector picks, kept up to date.

    Only the parts that determine a state are kept, so that memory does not grow with time.
    """

    def __init__(self, cluster: Cluster, kind: Kind, selector: str) -> None:
        self._cluster = cluster
        self._kind = kind
        self._selector = selector
        self._version = ""
        self._response: Any = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._error: LauncherError | None = None
        self.objects: dict[str, Object] = {}

    def start(self) -> None:
        """List, and watch from there on in the background.

        Raises:
            LauncherError: the server refuses to list, or does not answer.
        """
        self._list()
        self._thread = threading.Thread(target=self._keep, name="watch", daemon=True)
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        """Whether it still learns of changes; not where the server refuses to watch."""
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> Mapping[str, Object]:
        """Return the objects by name, as they were a moment ago.

        Raises:
            LauncherError: the server is away, or refuses to go on.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            return dict(self.objects)

    def wait(self, timeout_s: float) -> None:
        """Wait until something has changed, or for that long."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        connection = getattr(self._response, "connection", None)
        if (sock := getattr(connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _keep(self) -> None:
        try:
            for _ in self.events():
                pass
        except LauncherError as error:
            self._note(error)
        except (OSError, ValueError, AttributeError):
            if not self._closed.is_set():  # else the response was closed under the reader's hands
                raise

    def events(self) -> Iterator[tuple[str, Object | None]]:
        """Yield each object that has changed, by name, and None in the place of one that is gone.

        Raises:
            LauncherError: the server refuses to go on.
        """
        pause_s = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                if not self._version:
                    yield from self._list()
                for name, obj in self._watch():
                    pause_s = _FIRST_PAUSE_S
                    yield name, obj
                self._note(None)
                wait_s = 0.0 if pause_s == _FIRST_PAUSE_S else pause_s
            except Expired:
                self._version, wait_s = "", 0.0
            except Away as error:
                self._note(error)
                wait_s = error.retry_after_s or pause_s
            if not self._closed.is_set():
                self._cluster.connection.sleep(min(max(wait_s, 0.05), LONGEST_PAUSE_S))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _list(self) -> list[tuple[str, Object | None]]:
        """Read everything anew; return the changes since then."""
        items, version = self._cluster.objects(self._kind, self._selector)
        objects: dict[str, Object] = {
            str(item["metadata"]["name"]): digest(self._kind, item) for item in items
        }
        with self._changed:
            before, self.objects, self._version = self.objects, objects, version
            self._error = None
            self._changed.notify_all()
        gone: list[tuple[str, Object | None]] = [(n, None) for n in before if n not in objects]
        return gone + [(n, one) for n, one in objects.items() if before.get(n) != one]

    def _watch(self) -> Iterator[tuple[str, Object | None]]:
        """Yield what changes until the server ends the watch."""
        with self._cluster.changes(self._kind, self._selector, self._version) as self._response:
            if self._closed.is_set():
                return  # the connection may have been closed before this response
            self._note(None)
            for line in lines_of(self._response):
                kind, thing = _event_of(line)
                if kind == "ERROR":
                    code = untrusted.whole(thing.get("code"), least=400, most=599)
                    raise refusal(code or 500, json.dumps(thing).encode(), {})
                metadata = untrusted.mapping(thing.get("metadata"))
                self._version = str(metadata.get("resourceVersion") or "")
                if kind == "BOOKMARK":
                    continue
                thing = answers.one(thing)
                name = str(thing["metadata"]["name"])
                gone = kind == "DELETED"
                with self._changed:
                    if gone:
                        self.objects.pop(name, None)
                    else:
                        self.objects[name] = digest(self._kind, thing)
                    self._changed.notify_all()
                yield name, None if gone else self.objects[name]

    def _note(self, error: LauncherError | None) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


def watch_states(cluster: Cluster, kind: Kind, selector: str) -> Iterator[Change]:
    """Yield the state of each run that a selector picks, and each change of it, for ever.

    Raises:
        LauncherError: the server refuses.
    """
    states: dict[str, tuple[RunState, str]] = {}
    watch = Watch(cluster, kind, selector)
    try:
        for name, obj in watch.events():
            if obj is None:
                if states.pop(name, None) is not None:
                    yield Change(name=name, state=None)
            elif (now := state_of(kind, obj)) != states.get(name):
                states[name] = now
                yield Change(name=name, state=now[0], reason=now[1])
    finally:
        watch.close()


def _event_of(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return the type of a watch's event, and its object.

    Raises:
        LauncherError: the line does not hold an event.
    """
    try:
        event = untrusted.mapping(untrusted.parse_json(line))
    except ValueError:
        event = {}
    if not isinstance(event.get("object"), dict):
        raise LauncherError("the API server's watch has sent what is no event")
    return str(event.get("type")), event["object"]


def lines_of(response: Any) -> Iterator[bytes]:
    """Yield the lines of a response as they come."""
    rest = b""
    for chunk in response.stream(amt=None, decode_content=False):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if len(rest) > _LINE_BYTES:
            raise LauncherError("the API server sends a line without an end")
    if rest:
        yield rest
