"""Objects with versions and a journal, their owners, and a clock.

Callers hold the lock `changed`; the exceptions are marked.
"""

import bisect
import copy
import datetime
import heapq
import itertools
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.fakes.kubernetes.resources import OPERATORS, RESOURCES, Resource, of_kind
from tests.fakes.kubernetes.wire import Object, Refusal

__all__ = ["Change", "Key", "Store", "controller_of", "stamp"]

JOURNAL = 20_000
"""Changes of a resource that are remembered at least."""


class Key(NamedTuple):
    """What an object is found by."""

    resource: Resource
    namespace: str
    name: str


class Change(NamedTuple):
    """An entry of the journal."""

    version: int
    what: str
    thing: Object
    before: Object | None


def stamp() -> str:
    """Return the time as objects have it: whole seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def controller_of(thing: Object) -> Object | None:
    """Return the reference to the owner that controls an object."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


class Store:
    """What etcd, the garbage collector and the queues of controllers are."""

    def __init__(self, *, namespaces: tuple[str, ...], without: tuple[str, ...]) -> None:
        self.namespaces = namespaces
        self.missing = frozenset(without)
        """API groups that are not there."""
        self.changed = threading.Condition(threading.RLock())
        self.things: dict[Resource, dict[tuple[str, str], Object]] = {r: {} for r in RESOURCES}
        self.journals: dict[Resource, list[Change]] = {r: [] for r in RESOURCES}
        self.oldest: dict[Resource, int] = dict.fromkeys(RESOURCES, 1000)
        """The version up to which a resource's journal is forgotten."""
        self.version = 1000
        self._last: dict[Key, Object] = {}
        self._owned: defaultdict[str, set[Key]] = defaultdict(set)
        self._uids: dict[str, Key] = {}
        self._dirty: dict[Key, None] = {}
        self._settling = False
        self._timers: list[tuple[float, int, Key]] = []
        self._ids = itertools.count(1)
        self._clock: threading.Thread | None = None
        self.closing = False
        for name in namespaces:
            labels = {"kubernetes.io/metadata.name": name}
            made: Object = {"apiVersion": "v1", "kind": "Namespace", "status": {"phase": "Active"}}
            with self.changed:
                self.put(
                    of_kind("Namespace"), made | {"metadata": {"name": name, "labels": labels}}
                )

    def is_served(self, group: str) -> bool:
        """Whether an API group is served."""
        return group not in self.missing

    @property
    def operators(self) -> frozenset[str]:
        """Return the groups of operators that are installed."""
        return OPERATORS - self.missing

    # Objects.

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return a live object, or None."""
        return self.things[resource].get((namespace if resource.namespaced else "", name))

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return a live object; to change it, change it and `put` it."""
        if (found := self.find(resource, namespace, name)) is None:
            raise Refusal(
                404,
                "NotFound",
                f'{resource.full} "{name}" not found',
                {"name": name, "group": resource.group, "kind": resource.plural},
            )
        return found

    def all(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        """Return the live objects of a resource, as a list has them."""
        things = sorted(self.things[resource].items(), key=lambda item: item[0])
        return [o for (ns, _), o in things if namespace in (None, ns)]

    def put(self, resource: Resource, thing: Object) -> Object:
        """Store an object as it is now, and notify all watches if anything changed."""
        metadata = thing["metadata"]
        if resource.namespaced:
            metadata.setdefault("namespace", "default")
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", stamp())
        key = self.key(resource, thing)
        before = self._last.get(key)
        if before is not None and before == thing and key[1:] in self.things[resource]:
            return thing
        if resource.generated:
            if before is None:
                metadata["generation"] = 1
            elif _content(before) != _content(thing):
                metadata["generation"] = before["metadata"].get("generation", 1) + 1
        self._note(resource, key, thing, "ADDED" if before is None else "MODIFIED")
        self.things[resource][key.namespace, key.name] = thing
        self._uids[metadata["uid"]] = key
        for owner in metadata.get("ownerReferences") or ():
            self._owned[owner["uid"]].add(key)
        self.touch(key)
        return thing

    def drop(self, resource: Resource, thing: Object) -> None:
        """Remove an object, and let the objects that it owns go."""
        key, uid = self.key(resource, thing), thing["metadata"]["uid"]
        if (
            self.things[resource]
            .get((key.namespace, key.name), {"metadata": {}})["metadata"]
            .get("uid")
            != uid
        ):
            return
        del self.things[resource][key.namespace, key.name]
        self._uids.pop(uid, None)
        self._note(resource, key, thing, "DELETED")
        self._last.pop(key, None)
        self.touch(key)
        for owner in thing["metadata"].get("ownerReferences") or ():
            self._owned[owner["uid"]].discard(key)
            if (owner_key := self._uids.get(owner["uid"])) is not None:
                self.touch(owner_key)
                self._finish_deletion(self.get(*owner_key), owner_key.resource)
        for child in self.owned(uid):
            found = self.get(*child)
            others = found["metadata"]["ownerReferences"]
            if not any(owner["uid"] in self._uids for owner in others):
                self.remove(child.resource, found)
        self._owned.pop(uid, None)

    def owned(self, uid: str) -> list[Key]:
        """Return what an object owns."""
        return sorted(
            (key for key in self._owned.get(uid, ()) if self.find(*key) is not None),
            key=lambda key: (key.resource.plural, key.namespace, key.name),
        )

    def controlled(self, uid: str) -> list[Key]:
        """Return what an object controls: not what is only deleted with it."""
        return [
            key
            for key in self.owned(uid)
            for owner in self.get(*key)["metadata"]["ownerReferences"]
            if owner["uid"] == uid and owner.get("controller")
        ]

    def remove(
        self,
        resource: Resource,
        thing: Object,
        *,
        propagation: str = "Background",
        grace_s: float | None = None,
    ) -> None:
        """Delete an object at a client's request."""
        if resource.kind == "Pod":
            self.end_pod(thing, grace_s)
            return
        metadata = thing["metadata"]
        if propagation == "Foreground":
            if "deletionTimestamp" not in metadata:
                metadata["deletionTimestamp"] = stamp()
                metadata.setdefault("finalizers", []).append("foregroundDeletion")
                self.put(resource, thing)
            for child in self.owned(metadata["uid"]):
                if (found := self.find(*child)) is not None:
                    self.remove(child.resource, found, propagation="Foreground")
            self._finish_deletion(thing, resource)
            return
        if metadata.get("finalizers"):
            metadata.setdefault("deletionTimestamp", stamp())
            self.put(resource, thing)
            return
        if propagation == "Orphan":
            for child in self.owned(metadata["uid"]):
                found = self.get(*child)
                found["metadata"]["ownerReferences"] = [
                    o for o in found["metadata"]["ownerReferences"] if o["uid"] != metadata["uid"]
                ]
                self._owned[metadata["uid"]].discard(child)
                self.put(child.resource, found)
        self.drop(resource, thing)

    def end_pod(self, pod: Object, grace_s: float | None) -> None:
        """Delete a pod; the kubelet overrides this to grant the grace period."""
        self.drop(of_kind("Pod"), pod)

    def _finish_deletion(self, thing: Object, resource: Resource) -> None:
        """Remove an object that was only waiting for the deletion of its dependents."""
        metadata = thing["metadata"]
        if "deletionTimestamp" not in metadata or self.owned(metadata["uid"]):
            return
        left = [f for f in metadata.get("finalizers") or () if f != "foregroundDeletion"]
        metadata["finalizers"] = left
        if not left:
            self.drop(resource, thing)

    def key(self, resource: Resource, thing: Object) -> Key:
        """Return what an object is found by."""
        metadata = thing["metadata"]
        return Key(resource, metadata["namespace"] if resource.namespaced else "", metadata["name"])

    def _note(self, resource: Resource, key: Key, thing: Object, what: str) -> None:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        kept = copy.deepcopy(thing)
        journal = self.journals[resource]
        journal.append(Change(self.version, what, kept, self._last.get(key)))
        self._last[key] = kept
        if len(journal) > 2 * JOURNAL:
            self.oldest[resource] = journal[-JOURNAL - 1].version
            del journal[:-JOURNAL]
        self.changed.notify_all()

    def since(self, resource: Resource, version: int) -> list[Change]:
        """Return the changes since a version."""
        journal = self.journals[resource]
        return journal[bisect.bisect_right(journal, version, key=lambda entry: entry.version) :]

    def forget(self) -> None:
        """Forget the past."""
        self.version += 1
        for resource in RESOURCES:
            self.journals[resource].clear()
            self.oldest[resource] = self.version
        self.changed.notify_all()

    def next_id(self) -> int:
        """Return a number that grows."""
        return next(self._ids)

    # Controllers: changed objects are reconciled until nothing changes any more.

    def touch(self, key: Key) -> None:
        """Let controllers look at an object, and at those that own it."""
        self._dirty[key] = None
        last = self._last.get(key)
        owner = controller_of(last) if last is not None else None
        if owner is not None and (owner_key := self._uids.get(owner["uid"])) is not None:
            self._dirty[owner_key] = None

    def look(self, key: Key) -> None:
        """Reconcile an object; controllers override this."""

    def settle(self) -> None:
        """Let controllers reconcile the changed objects."""
        if self._settling:
            return
        self._settling = True
        try:
            while self._dirty:
                key = next(iter(self._dirty))
                del self._dirty[key]
                self.look(key)
        finally:
            self._settling = False

    def later(self, delay_s: float, key: Key) -> None:
        """Let controllers look at an object in some time."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self.next_id(), key))
        if self._clock is None:
            self._clock = threading.Thread(target=self._tick)
            self._clock.start()
        self.changed.notify_all()

    def _tick(self) -> None:
        with self.changed:
            while not self.closing:
                now = time.monotonic()
                while self._timers and self._timers[0][0] <= now:
                    self._dirty[heapq.heappop(self._timers)[2]] = None
                self.settle()
                self.changed.wait(self._timers[0][0] - now if self._timers else None)

    def wait_for(self, promise: Callable[[], Any], timeout_s: float) -> bool:
        """Wait, with the lock held, until something holds or the cluster is closed."""
        return bool(self.changed.wait_for(lambda: self.closing or promise(), timeout_s))

    def close(self) -> None:
        """End the clock; without the lock."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self._clock is not None:
            self._clock.join()


def _content(thing: Object) -> Object:
    return {k: v for k, v in thing.items() if k not in ("metadata", "status")}
