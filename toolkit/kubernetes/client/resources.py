"""The few requests that a run sends to its cluster; they return plain data."""

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import (
    TIMEOUT_S,
    Conflict,
    Connection,
    Denied,
    Missing,
    NotServed,
)
from toolkit.kubernetes.pods import index_of
from toolkit.kubernetes.workloads import JOBSET_LABEL, KINDS, ApiResource, Object, WorkloadKind
from toolkit.planning.pods import MANAGER, WORKLOAD_LABEL
from toolkit.profile import KubernetesProfile
from toolkit.text import untrusted

PODS = ApiResource(api_version="v1", kind="Pod")
EVENTS = ApiResource(api_version="v1", kind="Event")
NODES = ApiResource(api_version="v1", kind="Node")
_DEFINITIONS = ApiResource(api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition")

_QUEUE_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
"""Kueue 0.15 and newer; older versions have only the second."""

_LOG_TIMEOUT_S = (5.0, 300.0)
"""Connect and read timeouts of a log: a rank may print nothing for a long time."""

_WATCH_S = 240
"""Server-side timeout of a watch; the next watch continues from the same version."""

_MOST_NAMED = 100
"""Maximum number of runs in a selector; a longer one may not fit into a URL."""

_WRITE = {"fieldManager": MANAGER, "fieldValidation": "Strict"}


class Cluster:
    """A namespace of a cluster."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.namespace = connection.namespace
        self._queue_version = 0

    def apply(self, resource: ApiResource, body: Object, *, dry_run: bool = False) -> Object:
        """Create or update an object by server-side apply of `body`, and return it.

        In a dry run the server only validates it, and other managers may own its fields.

        Raises:
            Conflict: another manager has set one of the fields to another value.
            LauncherError: the server refused; its words are in the message.
        """
        metadata = body["metadata"]
        answer = self.connection.ask(
            "PATCH",
            resource.path(metadata.get("namespace", self.namespace), metadata["name"]),
            query=_WRITE | ({"dryRun": "All", "force": "true"} if dry_run else {}),
            body=body,
        )
        return checked(answer)

    def create(self, resource: ApiResource, body: Object, *, dry_run: bool = False) -> None:
        """Create an object; in a dry run the server only validates it.

        Raises:
            Conflict: an object of this name exists.
            LauncherError: the server refused; its words are in the message.
        """
        path = resource.path(body["metadata"].get("namespace", self.namespace))
        query = _WRITE | ({"dryRun": "All"} if dry_run else {})
        self.connection.ask("POST", path, query=query, body=body)

    def get(self, resource: ApiResource, name: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        with contextlib.suppress(Missing):
            return checked(self.connection.ask("GET", resource.path(self.namespace, name)))
        return None

    def delete(self, resource: ApiResource, obj: Object, *, changed: bool = False) -> bool:
        """Delete an object if it is unchanged since it was read, or in any version if `changed`.

        Its pods get their grace period. Returns False if the object has changed and must be read
        again.
        """
        metadata = obj["metadata"]
        keys = ("uid",) if changed else ("uid", "resourceVersion")
        if missing := [key for key in keys if key not in metadata]:
            raise LauncherError(
                f"{metadata['name']} is not deleted: the API server does not report its "
                f"{' and '.join(missing)}"
            )
        # Foreground: the object exists until its pods have ended, so every client can see it stop.
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {key: metadata[key] for key in keys},
        }
        try:
            path = resource.path(self.namespace, metadata["name"])
            self.connection.ask("DELETE", path, body=body)
        except Missing:
            return True
        except Conflict:
            return False
        return True

    def objects(self, resource: ApiResource, selector: str) -> tuple[list[Object], str]:
        """Return the objects that match a label selector, and the version of the list."""
        return self._list(resource, {"labelSelector": selector})

    def pods(self, selector: str) -> list[Object]:
        """Return the pods that match a selector, ordered by index."""
        return sorted(self.objects(PODS, selector)[0], key=index_of)

    def failed_pods(self, selector: str) -> list[Object]:
        """Return the failed pods that match a selector."""
        query = {"labelSelector": selector, "fieldSelector": "status.phase=Failed"}
        return self._list(PODS, query)[0]

    def jobs_of(self, runs: Collection[str]) -> list[Object]:
        """Return the Jobs between JobSets and their pods."""
        return self.objects(KINDS["Job"], selector_of(JOBSET_LABEL, runs))[0]

    def warnings(self, name: str = "") -> list[Object]:
        """Return the warning events of an object, or of the namespace, oldest first."""
        selector = "type=Warning" + (name and f",involvedObject.name={name}")
        events, _ = self._list(EVENTS, {"fieldSelector": selector})
        return sorted(events, key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "")

    def queued(self) -> list[Object]:
        """Return Kueue's Workloads of the namespace; none without Kueue."""
        while self._queue_version < len(_QUEUE_VERSIONS):
            version = _QUEUE_VERSIONS[self._queue_version]
            with contextlib.suppress(NotServed):
                return self._list(ApiResource(api_version=version, kind="Workload"), {})[0]
            self._queue_version += 1
        return []

    def changes(
        self, resource: ApiResource, selector: str, version: str
    ) -> contextlib.AbstractContextManager[Any]:
        """Open a watch from a version of the list: a response with one event per line."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout_s = (_LOG_TIMEOUT_S[0], _WATCH_S + 60.0)
        path = resource.path(self.namespace)
        return self.connection.open("GET", path, query=query, timeout_s=timeout_s)

    def groups(self) -> set[str]:
        """Return the API groups that the cluster has."""
        groups = untrusted.mapping(self.connection.ask("GET", "/apis")).get("groups")
        rows = groups if isinstance(groups, list) else []
        return {str(group.get("name")) for group in rows if isinstance(group, dict)}

    def log(
        self,
        pod: str,
        container: str,
        *,
        previous: bool,
        follow: bool = False,
        most: int | None = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """Open the log of a container, each line with its time, as a response to stream.

        `previous` opens the log of the previous container start, `follow` streams until the
        container has ended, and `most` limits the log to its last lines.

        Raises:
            Missing: the pod or the log of its container is gone.
        """
        query = {"container": container, "timestamps": "true"}
        query |= {"previous": "true"} if previous else {}
        query |= {"follow": "true"} if follow else {}
        query |= {} if most is None else {"tailLines": str(most)}
        path = PODS.path(self.namespace, pod) + "/log"
        timeout_s = _LOG_TIMEOUT_S if follow else TIMEOUT_S
        return self.connection.open("GET", path, query=query, timeout_s=timeout_s)

    def _list(self, resource: ApiResource, query: Mapping[str, str]) -> tuple[list[Object], str]:
        """Return the objects of a list, and its version; raise LauncherError for anything else."""
        answer = self.connection.ask("GET", resource.path(self.namespace), query=query)
        items = answer.get("items") if isinstance(answer, dict) else None
        if not isinstance(items, list):
            raise LauncherError("the API server's answer is not a list of objects")
        version = untrusted.mapping(answer.get("metadata")).get("resourceVersion")
        return [checked(item) for item in items], version if isinstance(version, str) else ""


def selector_of(label: str, names: Collection[str]) -> str:
    """Return the selector of objects that have one of these names as label."""
    if len(names) == 1:
        return f"{label}={next(iter(names))}"
    return f"{label} in ({','.join(names)})" if len(names) <= _MOST_NAMED else label


def pod_selector_of(kind: WorkloadKind, selector: str) -> str:
    """Return the pod selector for workloads of a kind; `selector` matches their runs.

    Workloads of two kinds may have the same name. Pods of earlier versions have no kind label.
    """
    others = ",".join(sorted(KINDS.keys() - {kind.kind}))
    return f"{selector},{WORKLOAD_LABEL} notin ({others})"


def definitions(
    documents: Iterable[Object], profile: KubernetesProfile, *, api_client: Any = None
) -> list[Object]:
    """Return the CustomResourceDefinitions of the objects' kinds, as far as they are readable.

    Built-in kinds have none; RBAC may deny reading the others.

    Raises:
        SchedulerMissing: no cluster, or none that answers.
    """
    connection = Connection(profile, api_client=api_client)
    kinds = {(str(d["apiVersion"]).rpartition("/")[0], str(d["kind"])) for d in documents}
    objects: list[Object] = []
    for group, kind in sorted(kinds):
        # Built-in groups are a single word, or NAME.k8s.io.
        if "." in group and (not group.endswith(".k8s.io") or group.endswith(".x-k8s.io")):
            plural = ApiResource(api_version=group, kind=kind).plural
            path = _DEFINITIONS.path("", f"{plural}.{group}")
            with contextlib.suppress(Missing, NotServed, Denied):
                objects.append(connection.ask("GET", path))
    return objects


# ---- The fields that are read from answers of the API server, and their required types
#
# An answer may come from a proxy, a broken aggregated API, or a hostile server. Fields of a wrong
# type are dropped, as if they were missing; an answer without a required field is refused.

_ANY = "*"
"""The schema of all values in a mapping with arbitrary keys."""

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
        "labels": {_ANY: str},
        "annotations": {_ANY: str},
        "ownerReferences": [{"uid": str, "name": str, "kind": str}],
    },
    "spec": {
        "suspend": bool,
        "active": bool,
        "parallelism": int,
        "pytorchReplicaSpecs": {_ANY: {"replicas": int}},
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
        "replicaStatuses": {_ANY: _COUNTS},
    },
    # Events.
    "involvedObject": {"name": str, "kind": str, "uid": str},
    "type": str,
    "reason": str,
    "message": str,
    "lastTimestamp": str,
    "eventTime": str,
}


class _Misfit(Exception):
    """A value is of another type than it has to be."""


def checked(answer: Any) -> Object:
    """Return an object.

    Raises:
        LauncherError: the answer is not an object.
    """
    try:
        obj: Object = _fitted(answer, _OBJECT)
    except _Misfit:
        what = type(answer).__name__
        raise LauncherError(f"the API server's answer is not a Kubernetes object: {what}") from None
    return obj


def _fitted(value: Any, form: Any) -> Any:
    """Return a value without the parts that violate the schema; raise _Misfit if all of it does."""
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
        field_form = form.get(f"{key}!", form.get(key, form.get(_ANY)))
        try:
            fields[key] = inner if field_form is None else _fitted(inner, field_form)
        except _Misfit:
            if f"{key}!" in form:
                raise
    return fields
