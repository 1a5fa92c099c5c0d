"""The few requests that a run sends to its cluster, with answers as plain data."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.client import answers
from toolkit.kubernetes.client.connection import Conflict, Connection, Missing, NotServed
from toolkit.kubernetes.pods import index_of
from toolkit.kubernetes.workloads import KINDS, Kind, Object, Place
from toolkit.planning.pods import MANAGER

__all__ = ["Cluster", "selector_of"]

PODS = Place(api_version="v1", plural="pods", kind="Pod")
EVENTS = Place(api_version="v1", plural="events", kind="Event")

_QUEUE_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
"""Kueue 0.15 and newer; older ones know the second alone."""

_LOG_TIMEOUT_S = (5.0, 300.0)
"""A rank may be silent for long; the reader requests the next part after so many bytes."""

_WATCH_S = 240
"""How long the server lets a watch be; then it is opened anew, from where it was."""

_MOST_NAMED = 100
"""How many runs a selector names; a longer one may not fit into a URL."""


class Cluster:
    """A namespace of a cluster."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.namespace = connection.namespace
        self._queue_version = 0

    @property
    def identity(self) -> tuple[str, ...]:
        """A key that distinguishes this namespace from those of other clusters."""
        return (*self.connection.identity, self.namespace)

    def apply(self, place: Place, body: Object, *, dry_run: bool = False) -> dict[str, Any]:
        """Lay our fields over an object, or make it, and return it (server-side apply).

        Args:
            place: Its kind.
            body: The object, with our fields alone.
            dry_run: Whether the server only validates the object; then whose fields they are, is
                no matter.

        Raises:
            Conflict: another manager has set one of the fields to another value.
            LauncherError: the server refused; its words are in the message.
        """
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return answers.one(
            self.connection.ask(
                "PATCH",
                place.path(
                    body["metadata"].get("namespace", self.namespace), body["metadata"]["name"]
                ),
                query=query | ({"dryRun": "All", "force": "true"} if dry_run else {}),
                body=body,
                content_type="application/apply-patch+yaml",
            )
        )

    def create(self, place: Place, body: Object) -> None:
        """Make an object.

        Raises:
            Conflict: there is one of this name.
            LauncherError: the server refused; its words are in the message.
        """
        path = place.path(body["metadata"].get("namespace", self.namespace))
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        self.connection.ask("POST", path, query=query, body=body)

    def get(self, place: Place, name: str) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist."""
        try:
            obj = self.connection.ask("GET", place.path(self.namespace, name))
        except Missing:
            return None
        return answers.one(obj)

    def delete(self, place: Place, obj: Object, *, changed: bool = False) -> bool:
        """Delete an object as it was read; its pods get their grace.

        Args:
            place: Its kind.
            obj: The object.
            changed: Whether it may have changed since it was read.

        Returns:
            Whether it is done; False where the object has changed, so that it must be read again.
        """
        metadata = obj["metadata"]
        kept = ("uid",) if changed else ("uid", "resourceVersion")
        if missing := [key for key in kept if key not in metadata]:
            raise LauncherError(
                f"{metadata['name']} is not deleted: the API server does not tell its "
                f"{' and '.join(missing)}"
            )
        wanted = {key: metadata[key] for key in kept}
        # Foreground: the object stays until the pods have ended, so that all can see it stop.
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": wanted,
        }
        path = place.path(self.namespace, metadata["name"])
        try:
            self.connection.ask("DELETE", path, body=body)
        except Missing:
            return True
        except Conflict:
            return False
        return True

    def objects(self, kind: Kind, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Return the objects that a selector of labels picks, and the version of the list."""
        return self._list(kind, {"labelSelector": selector})

    def pods(self, selector: str) -> list[dict[str, Any]]:
        """Return the pods that a selector picks, by their index."""
        return sorted(self._list(PODS, {"labelSelector": selector})[0], key=index_of)

    def jobs_of(self, runs: Collection[str]) -> list[dict[str, Any]]:
        """Return the Jobs between JobSets and their pods."""
        selector = selector_of("jobset.sigs.k8s.io/jobset-name", runs)
        return self._list(KINDS["Job"], {"labelSelector": selector})[0]

    def warnings(self, name: str = "") -> list[dict[str, Any]]:
        """Return the warning events about an object, or all of the namespace, oldest first."""
        selector = "type=Warning" + (name and f",involvedObject.name={name}")
        return sorted(self._list(EVENTS, {"fieldSelector": selector})[0], key=_when)

    def queued(self) -> list[dict[str, Any]]:
        """Return Kueue's Workloads of the namespace; none without Kueue."""
        while self._queue_version < len(_QUEUE_VERSIONS):
            version = _QUEUE_VERSIONS[self._queue_version]
            place = Place(api_version=version, plural="workloads", kind="Workload")
            with contextlib.suppress(NotServed):
                return self._list(place, {})[0]
            self._queue_version += 1
        return []

    @contextlib.contextmanager
    def changes(self, kind: Kind, selector: str, version: str) -> Iterator[Any]:
        """Open a watch: a response that holds an event per line, from a version of the list on."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout_s = (_LOG_TIMEOUT_S[0], _WATCH_S + 60.0)
        path = kind.path(self.namespace)
        with self.connection.open("GET", path, query=query, timeout_s=timeout_s) as response:
            yield response

    def groups(self) -> set[str]:
        """Return the API groups that the cluster has."""
        answer = self.connection.ask("GET", "/apis")
        groups = answer.get("groups") if isinstance(answer, dict) else None
        named = groups if isinstance(groups, list) else []
        return {str(group.get("name")) for group in named if isinstance(group, dict)}

    def log(
        self, pod: str, container: str, *, previous: bool, follow: bool, most: int | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Open the log of a container, each line with its time, as a response to stream.

        Args:
            pod: The pod.
            container: Its container.
            previous: Whether that of its start before is wanted.
            follow: Whether it goes on until the container has ended.
            most: How many of the last lines are wanted; all where it is None.

        Raises:
            Missing: the pod or the log of its container is gone.
        """
        query = {"container": container, "timestamps": "true"}
        query |= {"previous": "true"} if previous else {}
        query |= {} if most is None else {"tailLines": str(most)}
        path = PODS.path(self.namespace, pod) + "/log"
        if not follow:
            return self.connection.open("GET", path, query=query)
        query["follow"] = "true"
        return self.connection.open("GET", path, query=query, timeout_s=_LOG_TIMEOUT_S)

    def _list(self, place: Place, query: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        return answers.listed(self.connection.ask("GET", place.path(self.namespace), query=query))


def selector_of(label: str, names: Collection[str]) -> str:
    """Return the selector of objects whose label is one of these names."""
    if len(names) == 1:
        return f"{label}={next(iter(names))}"
    return f"{label} in ({','.join(names)})" if len(names) <= _MOST_NAMED else label


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
