"""Lists, in parts, and watches."""

import base64
import json
import time
from collections.abc import Iterator

from tests.fakes.kubernetes.resources import Resource
from tests.fakes.kubernetes.selecting import is_selected
from tests.fakes.kubernetes.store import Change, Store
from tests.fakes.kubernetes.wire import Object, Query, Refusal, Request, status_object

__all__ = ["Reading", "chosen"]

BOOKMARK_S = 10.0
"""Seconds without a change after which a watch gets a bookmark (a real server: a minute)."""


class Reading(Store):
    """Answers lists and watches."""

    def __init__(self, *, namespaces: tuple[str, ...], without: tuple[str, ...]) -> None:
        super().__init__(namespaces=namespaces, without=without)
        self.watches = 0
        """Watches that are open."""
        self._marks = 0

    def bookmark(self) -> None:
        """Send a bookmark on all watches that want them."""
        with self.changed:
            self._marks += 1
            self.changed.notify_all()

    def listed(self, resource: Resource, namespace: str | None, request: Request) -> Object:
        query = request.query
        version, after = str(self.version), None
        if query.get("continue"):
            token = json.loads(base64.urlsafe_b64decode(query["continue"]))
            version, after = token["version"], tuple(token["after"])
            if int(version) < self.oldest[resource]:
                raise Refusal(
                    410,
                    "Expired",
                    "The provided continue parameter is too old to display a "
                    "consistent list result. You can start a new list without the continue "
                    "parameter.",
                )
        found = [o for o in self.all(resource, namespace) if chosen(o, query)]
        if after is not None:
            found = [o for o in found if tuple(self.key(resource, o)[1:]) > after]
        metadata: Object = {"resourceVersion": version}
        limit = int(query.get("limit") or 0)
        if limit and len(found) > limit:
            last = self.key(resource, found[limit - 1])
            token = {"version": version, "after": list(last[1:])}
            metadata["continue"] = base64.urlsafe_b64encode(json.dumps(token).encode()).decode()
            metadata["remainingItemCount"] = len(found) - limit
            found = found[:limit]
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": found,
        }

    def watched(
        self, resource: Resource, namespace: str | None, request: Request
    ) -> Iterator[bytes]:
        query, bookmarks = request.query, request.is_on("allowWatchBookmarks")
        first: list[Object] = []
        asked = query.get("resourceVersion") or "0"
        if asked == "0" or request.is_on("sendInitialEvents"):
            first = [o for o in self.all(resource, namespace) if chosen(o, query)]
            asked = str(self.version)
        since, marks = int(asked), self._marks
        opening = [_line({"type": "ADDED", "object": o}) for o in first]
        if request.is_on("sendInitialEvents") and bookmarks:
            opening.append(_mark(resource, since, {"k8s.io/initial-events-end": "true"}))
        end = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
        self.watches += 1

        def events() -> Iterator[bytes]:
            nonlocal since, marks
            yield from opening
            quiet_until = time.monotonic() + BOOKMARK_S
            while True:
                with self.changed:
                    oldest = self.oldest[resource]
                    new, now = self.since(resource, since), time.monotonic()
                    due = self._marks > marks or now > quiet_until
                    version = self.version
                    if not new and not due and since >= oldest:
                        if self.closing or now >= end:
                            return
                        self.changed.wait(min(end, quiet_until) - now)
                        continue
                if since < oldest:
                    words = f"too old resource version: {since} ({oldest})"
                    yield _line({"type": "ERROR", "object": status_object(410, "Expired", words)})
                    return
                for change in new:
                    if (event := _seen(change, namespace, query)) is not None:
                        yield _line(event)
                if due and bookmarks:
                    yield _mark(resource, version, {})
                since, marks, quiet_until = version, self._marks, now + BOOKMARK_S

        def counted() -> Iterator[bytes]:
            try:
                yield from events()
            finally:
                with self.changed:
                    self.watches -= 1
                    self.changed.notify_all()

        return counted()


def chosen(thing: Object, query: Query) -> bool:
    """Whether an object matches a query."""
    try:
        return is_selected(thing, query)
    except ValueError as error:
        raise Refusal(400, "BadRequest", str(error)) from None


def _seen(change: Change, namespace: str | None, query: Query) -> Object | None:
    """Return a change as one sees it whose selector an object may enter and leave."""
    if namespace not in (None, change.thing["metadata"].get("namespace", "")):
        return None
    now = change.what != "DELETED" and chosen(change.thing, query)
    before = change.before is not None and chosen(change.before, query)
    if now:
        return {"type": "MODIFIED" if before else "ADDED", "object": change.thing}
    return {"type": "DELETED", "object": change.thing} if before else None


def _mark(resource: Resource, version: int, annotations: Object) -> bytes:
    metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    thing = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
    return _line({"type": "BOOKMARK", "object": thing})


def _line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"
