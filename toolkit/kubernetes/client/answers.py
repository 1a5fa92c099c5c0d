"""The fields that are read from answers of the API server, and their required types.

An answer may come from a proxy, a broken aggregated API, or a hostile server.
Fields of another type are dropped, as if they were missing; an answer that lacks a required field
is refused.
"""

import contextlib
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.workloads import Object
from toolkit.text import untrusted

ANY = "*"
"""The form of each value of a mapping whose keys are names."""

_CONDITION = {"type!": str, "status": str, "reason": str, "message": str, "lastTransitionTime": str}
_ENDED = {"exitCode": int, "reason": str, "message": str, "finishedAt": str, "containerID": str}
_STATE = {
    "waiting": {"reason": str, "message": str},
    "running": {"startedAt": str},
    "terminated": _ENDED,
}
_CONTAINER = {"name": str, "containerID": str, "state": _STATE, "lastState": _STATE}
_COUNTS = {"ready": int, "succeeded": int, "failed": int, "active": int}

_OBJECT: dict[str, Any] = {
    "kind": str,
    "apiVersion": str,
    "metadata!": {
        "name!": str,
        "uid": str,
        "resourceVersion": str,
        "creationTimestamp": str,
        "deletionTimestamp": str,
        "labels": {ANY: str},
        "annotations": {ANY: str},
        "ownerReferences": [{"uid": str, "name": str, "kind": str}],
    },
    "spec": {
        "suspend": bool,
        "active": bool,
        "parallelism": int,
        "pytorchReplicaSpecs": {ANY: {"replicas": int}},
        "trainer": {"numNodes": int},
        "replicatedJobs": [{"template!": {"spec!": {"parallelism": int}}}],
    },
    "status": {
        "phase": str,
        "reason": str,
        "message": str,
        "restarts": int,
        **_COUNTS,
        "conditions": [_CONDITION],
        "containerStatuses": [_CONTAINER],
        "initContainerStatuses": [_CONTAINER],
        "replicatedJobsStatus": [{"name": str, **_COUNTS}],
        "jobsStatus": [{"name": str, **_COUNTS}],
        "replicaStatuses": {ANY: _COUNTS},
    },
    # Of an event.
    "involvedObject": {"name": str, "kind": str, "uid": str},
    "type": str,
    "reason": str,
    "message": str,
    "lastTimestamp": str,
    "eventTime": str,
}


class _Misfit(Exception):
    """A value is of another type than it has to be."""


def one(answer: Any) -> Object:
    """Return an object.

    Raises:
        LauncherError: the answer is none.
    """
    try:
        obj: Object = _fitted(answer, _OBJECT)
    except _Misfit:
        what = type(answer).__name__
        raise LauncherError(
            f"the API server has answered with what is no object of Kubernetes: {what}"
        ) from None
    return obj


def listed(answer: Any) -> tuple[list[Object], str]:
    """Return the objects of a list, and its version.

    Raises:
        LauncherError: the answer is not a list, or an item is not an object.
    """
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list):
        raise LauncherError("the API server has answered with what is no list of objects")
    version = untrusted.mapping(answer.get("metadata")).get("resourceVersion")
    return [one(item) for item in items], version if isinstance(version, str) else ""


def _fitted(value: Any, form: Any) -> Any:
    """Return a value without the parts that do not have the form.

    Raises:
        _Misfit: nothing of the value has it.
    """
    kind: Any = type(form) if isinstance(form, dict | list) else form
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _Misfit
    if isinstance(form, list):
        items = []
        for item in value:
            with contextlib.suppress(_Misfit):
                items.append(_fitted(item, form[0]))
        return items
    if not isinstance(form, dict):
        return value
    if any(name.endswith("!") and name[:-1] not in value for name in form):
        raise _Misfit
    fields = {}
    for key, inner in value.items():
        field_form = form.get(f"{key}!", form.get(key, form.get(ANY)))
        try:
            fields[key] = inner if field_form is None else _fitted(inner, field_form)
        except _Misfit:
            if f"{key}!" in form:
                raise
    return fields
