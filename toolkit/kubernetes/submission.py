"""Creates the objects of a run exactly once, even if answers are lost."""

import contextlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from toolkit.errors import LauncherError
from toolkit.kubernetes import workloads
from toolkit.kubernetes.client.connection import FIRST_PAUSE_S, Away, Conflict, Denied, NotServed
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.volume import placed
from toolkit.kubernetes.workloads import KINDS, ApiResource, Object, RunObjects, WorkloadKind
from toolkit.runs.long_operation import Report, operation
from toolkit.runs.records.submission_journal import UnknownOutcome

TOGETHER = 16
"""Batch size of a sweep's submission: at most this many runs are half-created if the process is
killed."""

_AT_ONCE = 8
"""Number of concurrent submissions; API servers allow a user about ten requests in flight."""

_ATTEMPTS = 6

_PATIENCE = 240
"""Number of polls, every half second, until a deleted run is gone."""

_RUNTIME_ATTEMPTS = 4
_NO_RUNTIME = re.compile(r"(?i)runtime.*(must be created|not found|unsupported|unknown)")
"""The message of Trainer's webhook about an unknown runtime."""

_NO_NAMESPACE = re.compile(r'namespaces "[^"]*" not found')
_RBAC = re.compile(r" cannot (create|patch|get) resource ")


def submit_all(
    cluster: Cluster, runs: Sequence[RunObjects], *, goes_on: Callable[[], None] = lambda: None
) -> None:
    """Create runs in order, several at a time; if one is refused, delete all of them.

    `goes_on` is called periodically.

    Raises:
        UnknownOutcome: it is unknown which runs were created.
        LauncherError: the server refused; the message has its first error.
    """
    with operation(f"submitting {len(runs)} runs", long=len(runs) > TOGETHER) as report:
        _submit_all(cluster, runs, goes_on, report)


def _submit_all(
    cluster: Cluster, runs: Sequence[RunObjects], goes_on: Callable[[], None], report: Report
) -> None:
    def attempt(run: RunObjects) -> LauncherError | None:
        try:
            with placed(cluster, run.kind, run.workload, run.apart):
                _submit(cluster, run)
        except LauncherError as error:
            return error
        return None

    made: list[RunObjects] = []
    count = len(runs)
    for start in range(0, count, TOGETHER):
        goes_on()
        batch = runs[start : start + TOGETHER]
        errors: list[LauncherError] = []
        with ThreadPoolExecutor(min(_AT_ONCE, len(batch)), "submit") as pool:
            for run, error in zip(batch, pool.map(attempt, batch), strict=True):
                if error is None:
                    made.append(run)
                    report(len(made), count, f"{len(made)} of {count}")
                else:
                    errors.append(error)
        if not errors:
            continue
        left = 0
        for run in made:
            try:
                if (obj := cluster.get(run.kind, run.name)) is not None:
                    cluster.delete(run.kind, obj, changed=True)
            except LauncherError:
                left += 1
        unclear = next((error for error in errors if isinstance(error, UnknownOutcome)), None)
        if left and not unclear:
            raise UnknownOutcome(
                f"{errors[0]}; {left} of {len(made)} created objects could not be deleted"
            )
        raise unclear or errors[0]


def _submit(cluster: Cluster, run: RunObjects) -> None:
    """Create the objects of a run, the workload last; if it is refused, nothing remains."""
    existing = cluster.connection.patiently(
        lambda: _existing(cluster, run.kind, run.name), attempts=_ATTEMPTS
    )
    if existing is not None and not workloads.is_of(run.workload, existing):
        raise Conflict(
            f'Kubernetes refused: {run.kind.plural} "{run.name}" already exists, and is not '
            "this run"
        )
    made: list[Object] = []
    body = run.workload
    try:
        for body in run.companions:
            made.append(_apply(cluster, workloads.resource_of(body), body))
        body = run.workload
        workload = _apply_workload(cluster, run)
        made.append(workload)
        for body in run.payloads:
            _create_payload(cluster, run, workload, body)
    except (Away, UnknownOutcome):
        raise  # it is unknown which objects were created
    except LauncherError as error:
        for thing in made:
            with contextlib.suppress(LauncherError):
                cluster.delete(workloads.resource_of(thing), thing, changed=True)
        if isinstance(error, Denied) and body is not run.workload:
            # Without permission to create the workload, a fix for its companions does not help.
            try:
                cluster.apply(run.kind, run.workload, dry_run=True)
            except Denied as denial:
                if _RBAC.search(denial.answer):
                    error, body = denial, run.workload
            except LauncherError:
                pass
        raise _explained(error, cluster, run.kind, body) from error
    _adopt(cluster, run, workload)


def complete(cluster: Cluster, run: RunObjects, workload: Object) -> None:
    """Create the missing objects of a run after an interrupted submission."""
    _adopt(cluster, run, workload)
    for payload in run.payloads:
        _create_payload(cluster, run, workload, payload)


def _adopt(cluster: Cluster, run: RunObjects, workload: Object) -> None:
    """Make a run the owner of its companions, as far as the server permits."""
    for document in run.companions:
        # The run was created, even if its companions will not be deleted with it.
        with contextlib.suppress(LauncherError):
            body = workloads.owned(document, run.kind, workload)
            _apply(cluster, workloads.resource_of(body), body)


def _create_payload(cluster: Cluster, run: RunObjects, workload: Object, payload: Object) -> None:
    """Create a ConfigMap of a run, unless one of this name exists.

    Without permission to read it, its owner cannot be checked; the pods verify its content by the
    checksums in the workload.

    Raises:
        LauncherError: the server refused.
        UnknownOutcome: the server has not answered in all attempts.
    """
    body = workloads.owned(payload, run.kind, workload)
    try:
        with contextlib.suppress(Conflict):
            cluster.connection.patiently(
                lambda: cluster.create(workloads.resource_of(body), body), attempts=_ATTEMPTS
            )
    except Away as error:
        raise UnknownOutcome(f"{error} ({_ATTEMPTS} attempts)") from error


def withdraw(cluster: Cluster, run: RunObjects) -> None:
    """Delete the companions of a run that was never created, as far as the server permits."""
    for document in run.companions:
        with contextlib.suppress(LauncherError):
            resource = workloads.resource_of(document)
            obj = cluster.get(resource, document["metadata"]["name"])
            if obj is not None and workloads.is_of(document, obj):
                cluster.delete(resource, obj, changed=True)


def remove(cluster: Cluster, run: RunObjects) -> None:
    """Delete an ended run and wait until it is gone; raise LauncherError after a timeout."""
    kind, name = run.kind, run.name
    for _ in range(_PATIENCE):
        obj = cluster.get(kind, name)
        if obj is None:
            return
        if not obj["metadata"].get("deletionTimestamp"):
            cluster.delete(kind, obj, changed=True)
        cluster.connection.sleep(FIRST_PAUSE_S)
    raise LauncherError(f"the {kind.kind} {name} is still being deleted; try again later")


def _apply_workload(cluster: Cluster, run: RunObjects) -> Object:
    """Create the workload; wait a moment for a runtime that was just created."""
    for attempt in range(_RUNTIME_ATTEMPTS):
        try:
            return _apply(cluster, run.kind, run.workload)
        except LauncherError as error:
            if run.kind.kind != "TrainJob" or not _NO_RUNTIME.search(error.answer):
                raise
            refusal = error
        cluster.connection.sleep(FIRST_PAUSE_S * 2**attempt)
    name = run.workload["spec"]["runtimeRef"]["name"]
    raise LauncherError(
        f"{refusal}; `kubectl apply -n {cluster.namespace} -k k8s/base/trainer` brings the runtime "
        f"{name!r}, or name another one: training_runtime in the profile"
    ) from refusal


def _apply(cluster: Cluster, resource: ApiResource, body: Object) -> Object:
    """Create an object, unless this run has already created it.

    Raises:
        LauncherError: the server refused, or the object belongs to another run.
        UnknownOutcome: the server has not answered in all attempts, and the object is missing.
    """
    name = body["metadata"]["name"]

    def apply() -> Object:
        try:
            return cluster.apply(resource, body)
        except Conflict:
            # Another client changes it, or an earlier attempt with a lost answer has just arrived.
            existing = _existing(cluster, resource, name)
            if existing is not None and workloads.is_of(body, existing):
                return existing
            raise

    try:
        return cluster.connection.patiently(apply, attempts=_ATTEMPTS)
    except Away as error:
        with contextlib.suppress(LauncherError):
            existing = cluster.get(resource, name)
            if existing is not None and workloads.is_of(body, existing):
                return existing
        raise UnknownOutcome(f"{error} ({_ATTEMPTS} attempts)") from error


def _existing(cluster: Cluster, resource: ApiResource, name: str) -> Object | None:
    """Return an object; None also without permission to read it."""
    try:
        return cluster.get(resource, name)
    except (Denied, NotServed):
        return None


def _explained(
    error: LauncherError, cluster: Cluster, kind: WorkloadKind, refused: Object
) -> LauncherError:
    """Add the meaning of a refusal and the fix, if the server's message lacks them."""
    match error:
        case NotServed() if refused["kind"] == kind.kind:
            groups: set[str] = set()
            with contextlib.suppress(LauncherError):
                groups = cluster.groups()
            others = [
                name
                for name, other in KINDS.items()
                # Every cluster has Jobs.
                if other is not kind
                and (not other.operator or other.api_version.partition("/")[0] in groups)
            ]
            return NotServed(
                f"the cluster knows no {kind.kind} ({error}): {kind.operator} is not installed "
                f"there; write workload: {' or '.join(others)} in the profile, or ask its "
                "administrators"
            )
        case NotServed():
            return NotServed(
                f"the cluster knows no {refused['kind']} ({error}): what makes use of it is not "
                "installed there; leave gang_scheduler out of the profile"
            )
        case _ if _NO_NAMESPACE.search(error.answer):
            return type(error)(
                f"{error}; correct `namespace` in the profile, or have it made: "
                "`kubectl apply -k k8s/base` makes one called training"
            )
        case Denied() if refused["kind"] == "NetworkPolicy":
            return Denied(
                f"{error}; leave the NetworkPolicy out with network_policy: false in the profile, "
                "or ask for the right to make one"
            )
        case Denied() if refused["kind"] == "Service":
            return Denied(
                f"{error}; name a headless Service that is there already: service: training in the "
                "profile, if k8s/base has made the namespace"
            )
        case Denied() if _RBAC.search(error.answer):
            return Denied(
                f"{error}; you may not submit in namespace {cluster.namespace!r}: k8s/base has a "
                "Role with all that submitting needs, which its administrators can bind to you"
            )
    return error
