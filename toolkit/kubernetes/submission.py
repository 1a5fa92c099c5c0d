"""Makes the objects of a run, once, even where answers get lost on the way."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import LONGEST_PAUSE_S, Away, Conflict, Denied, NotServed
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.objects import Group, is_of
from toolkit.kubernetes.volume import placed
from toolkit.kubernetes.workloads import KINDS, Kind, Object, Place, place_of

__all__ = [
    "TOGETHER",
    "Unclear",
    "adopt",
    "complete",
    "remove",
    "submit",
    "submit_all",
    "withdraw",
]

T = TypeVar("T")

TOGETHER = 16
"""Batch size of a sweep's submission: at most this many runs are half-created if the process is
killed."""

_AT_ONCE = 8
"""How many of them at a time; API servers let one user have some ten requests in flight."""

_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.5

_PATIENCE = 240
"""How often to poll whether a deleted run is gone, every half second."""

_RUNTIME_ATTEMPTS = 4
_NO_RUNTIME = re.compile(r"(?i)runtime.*(must be created|not found|unsupported|unknown)")
"""The message of Trainer's webhook about a runtime that it has not seen yet."""

_NO_NAMESPACE = re.compile(r'namespaces "[^"]*" not found')
_RBAC = re.compile(r" cannot (create|patch|get) resource ")


class Unclear(Away):
    """The outcome is unknown, or objects were left behind."""


def submit_all(
    cluster: Cluster,
    kind: Kind,
    groups: Sequence[Group],
    *,
    goes_on: Callable[[], None] = lambda: None,
) -> None:
    """Make runs, several at a time; if one is refused, all are taken back.

    Args:
        cluster: Where.
        kind: What they are.
        groups: The runs, in the order in which they are to come.
        goes_on: Called now and then, while it goes on.

    Raises:
        Unclear: it is unknown which of them have arrived.
        LauncherError: the server refused; its words about the first are in the message.
    """

    def attempt(group: Group) -> LauncherError | None:
        try:
            with placed(cluster, kind, group.workload, group.apart):
                submit(cluster, kind, group)
        except LauncherError as error:
            return error
        return None

    made: list[Group] = []
    for start in range(0, len(groups), TOGETHER):
        goes_on()
        batch = groups[start : start + TOGETHER]
        with ThreadPoolExecutor(min(_AT_ONCE, len(batch)), "submit") as pool:
            attempts = list(zip(batch, pool.map(attempt, batch), strict=True))
        made += [group for group, error in attempts if error is None]
        if errors := [error for _, error in attempts if error is not None]:
            _take_back(cluster, kind, made, errors)


def _take_back(
    cluster: Cluster, kind: Kind, made: Sequence[Group], errors: Sequence[LauncherError]
) -> None:
    """Delete the created objects, and raise the first error, or one of an unknown outcome."""
    left = 0
    for group in made:
        try:
            if (obj := cluster.get(kind, group.name)) is not None:
                cluster.delete(kind, obj, changed=True)
        except LauncherError:
            left += 1
    error = next((error for error in errors if isinstance(error, Unclear)), errors[0])
    if left and not isinstance(error, Unclear):
        raise Unclear(f"{error}; {left} of {len(made)} that were made could not be taken back")
    raise error


def submit(cluster: Cluster, kind: Kind, group: Group) -> None:
    """Make the objects of a run, the workload last; if it is refused, nothing is left.

    Raises:
        LauncherError: the server refused; its words are in the message.
        SchedulerMissing: no server, or none that answers.
    """
    existing = _patiently(cluster, lambda: _there(cluster, kind, group.name))
    if existing is not None and not is_of(group.workload, existing):
        raise Conflict(
            f'Kubernetes refused: {kind.plural} "{group.name}" already exists, and is not this run'
        )
    made: list[Object] = []
    asked = group.workload
    try:
        for asked in group.companions:
            made.append(_apply(cluster, place_of(asked), asked))
        asked = group.workload
        workload = _apply_workload(cluster, kind, asked)
        made.append(workload)
        if group.payload is not None:
            asked = group.payload
            _create(cluster, _owned(asked, kind, group, workload))
    except Away:
        raise  # it is unknown which objects have arrived
    except LauncherError as error:
        for thing in made:
            with contextlib.suppress(LauncherError):
                cluster.delete(place_of(thing), thing, changed=True)
        raise _explained(error, cluster, kind, asked) from error
    adopt(cluster, kind, group, workload)


def adopt(cluster: Cluster, kind: Kind, group: Group, workload: Object) -> None:
    """Let the companions of a run go with it, as far as the server lets us."""
    for document in group.companions:
        # The run is under way: that its companions outlive it is no reason to say it were not.
        with contextlib.suppress(LauncherError):
            _apply(cluster, place_of(document), _owned(document, kind, group, workload))


def complete(cluster: Cluster, kind: Kind, group: Group, workload: Object) -> None:
    """Make what a run is still without, whose submission was cut short.

    Raises:
        LauncherError: the server refused.
    """
    adopt(cluster, kind, group, workload)
    if group.payload is not None:
        _create(cluster, _owned(group.payload, kind, group, workload))


def _owned(document: Object, kind: Kind, group: Group, workload: Object) -> Object:
    """Return an object that is deleted with the run."""
    owner = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": group.name,
        "uid": workload["metadata"]["uid"],
    }
    return {**document, "metadata": {**document["metadata"], "ownerReferences": [owner]}}


def withdraw(cluster: Cluster, group: Group) -> None:
    """Delete the companions of a run that never was, as far as the server lets us."""
    for document in group.companions:
        with contextlib.suppress(LauncherError):
            place = place_of(document)
            obj = cluster.get(place, document["metadata"]["name"])
            if obj is not None and is_of(document, obj):
                cluster.delete(place, obj, changed=True)


def remove(cluster: Cluster, kind: Kind, name: str) -> None:
    """Delete an ended run, and wait until it is gone.

    Raises:
        LauncherError: it does not go.
    """
    for _ in range(_PATIENCE):
        obj = cluster.get(kind, name)
        if obj is None:
            return
        if not obj["metadata"].get("deletionTimestamp"):
            cluster.delete(kind, obj, changed=True)
        cluster.connection.sleep(_FIRST_PAUSE_S)
    raise LauncherError(f"the {kind.kind} {name} is being deleted and does not go; try again later")


def _apply_workload(cluster: Cluster, kind: Kind, body: Object) -> Object:
    """Make the object that makes the pods; wait a moment for a runtime that was made just now."""
    pause_s = _FIRST_PAUSE_S
    for _ in range(_RUNTIME_ATTEMPTS):
        try:
            return _apply(cluster, kind, body)
        except LauncherError as error:
            if kind.kind != "TrainJob" or not _NO_RUNTIME.search(str(error)):
                raise
            failed = error
        cluster.connection.sleep(pause_s)
        pause_s *= 2
    name = body["spec"]["runtimeRef"]["name"]
    raise LauncherError(
        f"{failed}; `kubectl apply -n {cluster.namespace} -k k8s/base/trainer` brings the runtime "
        f"{name!r}, or name another one: training_runtime in the profile"
    ) from failed


def _apply(cluster: Cluster, place: Place, body: Object) -> Object:
    """Make an object, or find that it has been made.

    Raises:
        LauncherError: the server refused, or the object belongs to another run.
        Unclear: the server has not answered in all attempts, and the object is not there.
    """
    name = body["metadata"]["name"]

    def apply() -> Object:
        try:
            return cluster.apply(place, body)
        except Conflict:
            # Somebody works on it, or an attempt whose answer was lost has just arrived.
            if (existing := _there(cluster, place, name)) is not None and is_of(body, existing):
                return existing
            raise

    try:
        return _patiently(cluster, apply)
    except Away as error:
        with contextlib.suppress(LauncherError):
            if (existing := cluster.get(place, name)) is not None and is_of(body, existing):
                return existing
        raise Unclear(f"{error} ({_ATTEMPTS} attempts)") from error


def _create(cluster: Cluster, body: Object) -> None:
    """Make an object, or find that there is one of its name.

    Without the right to read it, its owner cannot be checked: the pods verify its content
    (`checksums`).

    Raises:
        LauncherError: the server refused.
        Unclear: the server has not answered in all attempts.
    """
    try:
        with contextlib.suppress(Conflict):
            _patiently(cluster, lambda: cluster.create(place_of(body), body))
    except Away as error:
        raise Unclear(f"{error} ({_ATTEMPTS} attempts)") from error


def _patiently(cluster: Cluster, question: Callable[[], T]) -> T:
    """Retry with back-off until a deadline; give up at once if the connection is refused."""
    for pause_s in _pauses():
        try:
            return question()
        except Away as error:
            if pause_s is None or not error.connected:
                raise
            wait_s = pause_s if error.retry_after_s is None else error.retry_after_s
            cluster.connection.sleep(min(wait_s, LONGEST_PAUSE_S))
    raise AssertionError("the last attempt raises")


def _pauses() -> Iterator[float | None]:
    for attempt in range(_ATTEMPTS - 1):
        yield _FIRST_PAUSE_S * 2**attempt
    yield None


def _there(cluster: Cluster, place: Place, name: str) -> Object | None:
    """Return an object; None also where we may make objects and not look at them."""
    try:
        return cluster.get(place, name)
    except (Denied, NotServed):
        return None


def _explained(
    error: LauncherError, cluster: Cluster, kind: Kind, refused: Object
) -> LauncherError:
    """Say what a refusal means, and the way out, where there is more to say than the server did."""
    what = refused["kind"]
    match error:
        case NotServed() if what == kind.kind:
            return NotServed(
                f"the cluster knows no {kind.kind} ({error}): {kind.operator} is not installed "
                f"there; write workload: {_others(cluster, kind)} in the profile, or ask its "
                "administrators"
            )
        case NotServed():
            return NotServed(
                f"the cluster knows no {what} ({error}): what makes use of it is not "
                "installed there; leave gang_scheduler out of the profile"
            )
        case _ if _NO_NAMESPACE.search(str(error)):
            return type(error)(
                f"{error}; correct `namespace` in the profile, or have it made: "
                "`kubectl apply -k k8s/base` makes one called training"
            )
        case Denied() if what == "NetworkPolicy":
            return Denied(
                f"{error}; leave the NetworkPolicy out with network_policy: false in the profile, "
                "or ask for the right to make one"
            )
        case Denied() if what == "Service":
            return Denied(
                f"{error}; name a headless Service that is there already: service: training in the "
                "profile, if k8s/base has made the namespace"
            )
        case Denied() if _RBAC.search(str(error)):
            return Denied(f"{error}; k8s/base has a Role with all that submitting needs")
    return error


def _others(cluster: Cluster, kind: Kind) -> str:
    """Return which other workloads the cluster knows; a Job any does."""
    groups: set[str] = set()
    with contextlib.suppress(LauncherError, KeyError):
        groups = cluster.groups()
    others = [
        name
        for name, other in KINDS.items()
        if other is not kind and (not other.operator or other.api_version.split("/")[0] in groups)
    ]
    return " or ".join(others)
