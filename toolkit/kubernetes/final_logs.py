"""What the pods of a run have printed before they failed, as far as the cluster still has it."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.delivered_files import is_delivery
from toolkit.kubernetes.failure import Line, Printed, first_failure, of_conditions, seconds_of
from toolkit.kubernetes.pod_log import STAMPED
from toolkit.kubernetes.pods import attempt_of, disruption, newest_of, short_name
from toolkit.kubernetes.watcher import lines_of
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.runs.failure import Failure

__all__ = ["failure_of"]

_MOST_LINES = 10_000
"""Lines of a pod that are read: a rank that fails ends its run within seconds."""


def failure_of(
    cluster: Cluster, kind: Kind, obj: Object, selector: str, attempt: int | None
) -> Failure | None:
    """Return what failed first in a run that has failed; None if it is unknown.

    A log that cannot be read any more is replaced by its end, which Kubernetes keeps with the pod;
    if the pod is gone as well, from the object's conditions.

    Args:
        cluster: Where it runs.
        kind: What it is.
        obj: Its object.
        selector: Of its pods.
        attempt: Which attempt; the newest where it is None.

    Raises:
        Away: the server does not answer.
    """
    pods = newest_of(_seen(cluster, selector))
    newest = max((attempt_of(pod) or 0 for pod in pods), default=0)
    wanted = newest if attempt is None else attempt
    those = [pod for pod in pods if (attempt_of(pod) or 0) == wanted and not disruption(pod)]
    ended = [one for pod in those if (one := _printed(cluster, kind, pod)) is not None]
    if (failure := first_failure(ended)) is not None or ended or attempt not in (None, 0):
        return failure
    return of_conditions([obj, *_jobs(cluster, kind, obj)])


def _seen(cluster: Cluster, selector: str) -> list[dict[str, Any]]:
    try:
        return cluster.pods(selector)
    except Away:
        raise
    except LauncherError:  # the right to submit need not include the right to see pods
        return []


def _jobs(cluster: Cluster, kind: Kind, obj: Object) -> list[dict[str, Any]]:
    try:
        return cluster.jobs_of([str(obj["metadata"]["name"])]) if kind.jobs else []
    except Away:
        raise
    except LauncherError:
        return []


def _printed(cluster: Cluster, kind: Kind, pod: Object) -> Printed | None:
    """Return what a pod's container has printed; None where it has not ended badly."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status.get("name", kind.container) != kind.container:
            continue
        state = status.get("state") or {}
        ended = state.get("terminated")
        previous = ended is None and "waiting" in state
        if previous:
            ended = (status.get("lastState") or {}).get("terminated")
        if not ended or not (ended.get("exitCode") or ended.get("reason") == "OOMKilled"):
            continue
        return Printed(
            pod=short_name(pod),
            attempt=attempt_of(pod) or 0,
            exit_code=int(ended.get("exitCode") or 0),
            reason=str(ended.get("reason") or ""),
            ended=seconds_of(ended),
            lines=_log(cluster, kind, pod["metadata"]["name"], previous=previous)
            or _told(str(ended.get("message") or "")),
        )
    return None


def _log(cluster: Cluster, kind: Kind, name: str, *, previous: bool) -> list[Line]:
    """Return the end of a log; nothing where it is gone, or not for us."""
    try:
        with cluster.log(
            name, kind.container, previous=previous, follow=False, most=_MOST_LINES
        ) as response:
            return list(_read(lines_of(response)))
    except Away:
        raise
    except LauncherError:
        return []


def _told(message: str) -> list[Line]:
    return list(_read(line.encode() for line in message.splitlines()))


def _read(lines: Iterable[bytes]) -> Iterator[Line]:
    for raw in lines:
        time, text = None, raw
        if match := STAMPED.match(raw):
            whole = datetime.fromisoformat(f"{match[1].decode()}+00:00").timestamp()
            time = whole + float(b"0." + (match[2] or b"0"))
            text = match[3]
        if not is_delivery(line := text.decode(errors="replace")):
            yield time, line
