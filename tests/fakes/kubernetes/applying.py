"""Server-side apply: the manager of each field, as servers record it in managedFields."""

import copy
from collections.abc import Iterator
from typing import Any

from tests.fakes.kubernetes.patching import merge_key
from tests.fakes.kubernetes.resources import Resource
from tests.fakes.kubernetes.wire import Object, Refusal

__all__ = ["Ownership"]

Path = tuple[str, ...]
_IDENTITY = (("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"))
_GIVEN = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")


class Ownership:
    """The fields of one object by manager: by server-side apply, and by other writes."""

    def __init__(self) -> None:
        self._applied: dict[str, set[Path]] = {}
        self._written: dict[str, set[Path]] = {}

    def changed(self, manager: str, before: Object, after: Object) -> None:
        """Record a manager's changes by PUT or by another kind of patch."""
        old, new = dict(_leaves(before)), dict(_leaves(after))
        mine = {path for path, value in new.items() if old.get(path, _leaves) != value}
        mine = {path for path in mine if path[0] != "status"}
        for kept in (*self._applied.values(), *self._written.values()):
            kept -= mine
            kept -= {path for path in old if path not in new}
        if mine:
            self._written.setdefault(manager, set()).update(mine)

    def apply(
        self, manager: str, found: Object, wanted: Object, *, force: bool, resource: Resource
    ) -> Object:
        """Return an object with the fields that a manager applies.

        Raises:
            Refusal: another manager has written something else there.
        """
        there, mine = dict(_leaves(found)), dict(_leaves(wanted))
        others = [
            (name, paths)
            for kept in (self._applied, self._written)
            for name, paths in kept.items()
            if kept is self._written or name != manager
        ]
        conflicts = [
            (name, path)
            for name, paths in others
            for path in mine
            if path in paths and there.get(path) != mine[path]
        ]
        if conflicts and not force:
            name = conflicts[0][0]
            fields = ", ".join(sorted(f".{'.'.join(path)}" for _, path in conflicts))
            raise Refusal(
                409,
                "Conflict",
                f"Apply failed with {len(conflicts)} conflict"
                f'{"s" * (len(conflicts) > 1)}: conflicts with "{name}" using '
                f"{resource.api_version}: {fields}",
            )
        for _, path in conflicts:
            for _, paths in others:
                paths.discard(path)
        merged: Object = _united(copy.deepcopy(found), wanted)
        held = set().union(*(paths for _, paths in others)) if others else set()
        for path in self._applied.get(manager, set()) - set(mine) - held:
            _remove(merged, path)
        self._applied[manager] = set(mine)
        return merged


def _leaves(value: Any, path: Path = (), name: str = "") -> Iterator[tuple[Path, Any]]:
    """Return the fields of an object that are owned one by one."""
    key = merge_key(name)
    if isinstance(value, dict) and value:
        for one, inner in value.items():
            here = (*path, one)
            if here not in _IDENTITY and not (path == ("metadata",) and one in _GIVEN):
                yield from _leaves(inner, here, one)
    elif key is not None and isinstance(value, list) and value:
        for entry in value:
            yield from _leaves(entry, (*path, f"{key}={entry.get(key)}"))
    else:
        yield path, value


def _united(found: Any, wanted: Any, name: str = "") -> Any:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key, value in wanted.items():
            found[key] = _united(found[key], value, key) if key in found else copy.deepcopy(value)
        return found
    key = merge_key(name)
    if key is not None and isinstance(found, list) and isinstance(wanted, list):
        for entry in wanted:
            same = [i for i, other in enumerate(found) if other.get(key) == entry.get(key)]
            if same:
                found[same[0]] = _united(found[same[0]], entry)
            else:
                found.append(copy.deepcopy(entry))
        return found
    return copy.deepcopy(wanted)


def _remove(thing: Any, path: Path) -> None:
    """Remove a field, and the mappings that are empty afterwards."""
    head, *rest = path
    if isinstance(thing, list):
        key, _, value = head.partition("=")
        at = [i for i, entry in enumerate(thing) if str(entry.get(key)) == value]
        if not at:
            return
        if rest:
            _remove(thing[at[0]], tuple(rest))
        if not rest or set(thing[at[0]]) <= {key}:
            del thing[at[0]]
    elif isinstance(thing, dict) and head in thing:
        if not rest:
            del thing[head]
            return
        _remove(thing[head], tuple(rest))
        if thing[head] in ({}, []):
            del thing[head]
