"""A watch over all objects of a namespace and kind: one list, one connection, however many objects.

It survives closed connections, an unreachable or overloaded server (429), and an expired version
(410), after which it lists all objects again.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.client import connection
from toolkit.kubernetes.client.resources import Cluster, checked
from toolkit.kubernetes.workloads import ApiResource, Object
from toolkit.text import untrusted


class ObjectWatch:
    """The objects of a kind that match a selector, kept up to date.

    `digest` reduces each object to its relevant parts, so that memory stays bounded.
    """

    def __init__(
        self,
        cluster: Cluster,
        resource: ApiResource,
        selector: str,
        digest: Callable[[Object], Object],
    ) -> None:
        self._cluster = cluster
        self._resource = resource
        self._selector = selector
        self._digest = digest
        self._version = ""
        self._response: Any = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._error: LauncherError | None = None
        self.objects: dict[str, Object] = {}

    def start(self) -> None:
        """List the objects, then watch them in the background; the list may raise LauncherError."""
        self._list()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        """Whether the watch still receives changes; False if the server refuses to watch."""
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> Mapping[str, Object]:
        """Return the latest known objects by name; raise if the server is away."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return dict(self.objects)

    def wait(self, timeout_s: float) -> None:
        """Wait until something has changed, or until the timeout."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        connection.hang_up(self._response)
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _follow(self) -> None:
        try:
            for _ in self.events():
                pass
        except LauncherError as error:
            self._note(error)
        except (OSError, ValueError, AttributeError):
            if not self._closed.is_set():  # else `close` has closed the response
                raise

    def events(self) -> Iterator[tuple[str, Object | None]]:
        """Yield the name of each changed object and the object; None for a deleted one.

        It raises LauncherError if the server refuses to continue.
        """
        pause_s = connection.FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                if not self._version:
                    yield from self._list()
                for name, obj in self._watch():
                    pause_s = connection.FIRST_PAUSE_S
                    yield name, obj
                self._note(None)
                wait_s = 0.0 if pause_s == connection.FIRST_PAUSE_S else pause_s
            except connection.Expired:
                self._version, wait_s = "", 0.0
            except connection.Away as error:
                self._note(error)
                wait_s = error.retry_after_s or pause_s
            if not self._closed.is_set():
                self._cluster.connection.sleep(min(max(wait_s, 0.05), connection.LONGEST_PAUSE_S))
            pause_s = min(pause_s * 2, connection.LONGEST_PAUSE_S)

    def _list(self) -> list[tuple[str, Object | None]]:
        """List all objects again, and return the changes."""
        items, version = self._cluster.objects(self._resource, self._selector)
        objects = {str(item["metadata"]["name"]): self._digest(item) for item in items}
        with self._changed:
            before, self.objects, self._version = self.objects, objects, version
            self._error = None
            self._changed.notify_all()
        gone: list[tuple[str, Object | None]] = [(n, None) for n in before if n not in objects]
        return gone + [(n, obj) for n, obj in objects.items() if before.get(n) != obj]

    def _watch(self) -> Iterator[tuple[str, Object | None]]:
        """Yield what changes until the server ends the watch."""
        with self._cluster.changes(self._resource, self._selector, self._version) as self._response:
            if self._closed.is_set():
                return  # the connection may have been closed before this response
            self._note(None)
            for line in connection.lines_of(self._response):
                try:
                    event = untrusted.mapping(untrusted.parse_json(line))
                except ValueError:
                    event = {}
                kind, thing = str(event.get("type")), event.get("object")
                if not isinstance(thing, dict):
                    raise LauncherError(
                        "the API server's watch sent something that is not an event"
                    )
                if kind == "ERROR":
                    code = untrusted.whole(thing.get("code"), least=400, most=599)
                    raise connection.refusal(code or 500, json.dumps(thing).encode(), {})
                metadata = untrusted.mapping(thing.get("metadata"))
                self._version = str(metadata.get("resourceVersion") or "")
                if kind == "BOOKMARK":
                    continue
                obj = checked(thing)
                name = str(obj["metadata"]["name"])
                with self._changed:
                    if kind == "DELETED":
                        self.objects.pop(name, None)
                    else:
                        self.objects[name] = self._digest(obj)
                    self._changed.notify_all()
                yield name, self.objects.get(name)

    def _note(self, error: LauncherError | None) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
