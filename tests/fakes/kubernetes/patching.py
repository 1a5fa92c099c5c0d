"""Merge patch (RFC 7386), JSON patch (RFC 6902), and Kubernetes' strategic merge patch."""

import copy
from typing import Any

from tests.fakes.kubernetes.wire import Object, Refusal

__all__ = ["laid_over", "merge_key", "patched"]

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "replicatedJobs": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
    "conditions": "type",
    "runtimePatches": "manager",
}
"""The key that identifies the entries of a list (k8s.io/api, patchMergeKey and listMapKey)."""


def merge_key(name: str) -> str | None:
    """Return the key that identifies the entries of a list; None if the list is one value."""
    return _KEYS.get(name)


def patched(found: Object, patch: Any, content_type: str) -> Object:
    """Return an object after a patch.

    Raises:
        Refusal: the patch cannot be applied.
    """
    if content_type == "application/json-patch+json":
        return _json_patched(found, patch)
    if content_type == "application/strategic-merge-patch+json":
        merged: Object = laid_over(found, patch)
        return merged
    if content_type != "application/merge-patch+json":
        words = "the body of the request was in an unknown format - accepted media types include: "
        kinds = "application/json-patch+json, application/merge-patch+json, application/apply-patch"
        raise Refusal(415, "UnsupportedMediaType", f"{words}{kinds}+yaml")
    merged = _merged(found, patch)
    return merged


def _merged(found: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return copy.deepcopy(result)


def laid_over(found: Any, patch: Any, name: str = "") -> Any:
    """Return a value after a strategic merge patch: lists merge by the key of their entries."""
    if isinstance(found, dict) and isinstance(patch, dict):
        result = copy.deepcopy(found)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = laid_over(result.get(key), value, key)
        return result
    key = merge_key(name)
    if key is not None and isinstance(found, list) and isinstance(patch, list):
        merged = copy.deepcopy(found)
        for one in patch:
            at = [i for i, other in enumerate(merged) if other.get(key) == one.get(key)]
            if at:
                merged[at[0]] = laid_over(merged[at[0]], one)
            else:
                merged.append(copy.deepcopy(one))
        return merged
    return copy.deepcopy(patch)


def _json_patched(found: Object, patch: Any) -> Object:
    document: Any = {"": copy.deepcopy(found)}
    for step in patch:
        try:
            _apply_step(document, step)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise Refusal(422, "Invalid", f"the server rejected our request: {error!r}") from None
    result: Object = document[""]
    return result


def _apply_step(document: Any, step: Object) -> None:
    verb = step["op"]
    value = copy.deepcopy(step.get("value"))
    if verb in ("move", "copy"):
        value = copy.deepcopy(_look_up(document, step["from"]))
        if verb == "move":
            _apply_step(document, {"op": "remove", "path": step["from"]})
        verb = "add"
    if verb == "test":
        if _look_up(document, step["path"]) != value:
            raise ValueError(f"testing path {step['path']} value failed")
        return
    *parents, last = _steps(step["path"])
    target = document
    for one in parents:
        target = target[int(one)] if isinstance(target, list) else target[one]
    if isinstance(target, list):
        at = len(target) if last == "-" else int(last)
        if verb == "add":
            target.insert(at, value)
        elif verb == "remove":
            del target[at]
        else:
            target[at] = value
    elif verb == "remove":
        del target[last]
    else:
        if verb == "replace":
            target[last]  # a missing value cannot be replaced
        target[last] = value


def _look_up(document: Any, path: str) -> Any:
    for one in _steps(path):
        document = document[int(one)] if isinstance(document, list) else document[one]
    return document


def _steps(path: str) -> list[str]:
    return [one.replace("~1", "/").replace("~0", "~") for one in path.split("/")]
