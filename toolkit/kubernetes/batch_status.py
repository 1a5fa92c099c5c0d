"""Where many runs of a namespace and kind stand: one list of them, and one of each kind of cause.

One list returns the states. Causes are queried only for runs that wait or have failed: one list of
pods, and one of events, Jobs or Kueue's Workloads if these may hold the cause.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away
from toolkit.kubernetes.client.resources import Cluster, selector_of
from toolkit.kubernetes.status import (
    Evidence,
    is_suspended,
    judge,
    queue_of,
    state_of,
    stuck_objects,
)
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.planning.pods import RUN_LABEL
from toolkit.runs.state import RunState, RunStatus

__all__ = ["FOR_LIST", "FOR_ONE", "FOR_WAIT", "evidence_of", "statuses"]


FOR_ONE = frozenset((RunState.PENDING, RunState.RUNNING, RunState.FAILED))
"""The states whose causes are queried for `status` of a single run."""

FOR_LIST = frozenset((RunState.PENDING, RunState.FAILED))
"""Those of a list of runs."""

FOR_WAIT = frozenset((RunState.FAILED,))
"""The states whose causes are queried while a caller waits for many runs."""


def statuses(
    cluster: Cluster,
    kind: Kind,
    objects: Mapping[str, Object],
    names: Sequence[str],
    *,
    causes: frozenset[RunState],
) -> list[RunStatus | None]:
    """Return where runs stand by name; None for one that has no object.

    Args:
        cluster: Where they are.
        kind: What they are.
        objects: The objects that there are, by name.
        names: The names of the runs' objects.
        causes: The states whose causes are queried.

    Raises:
        Away: the server does not answer.
    """
    present = {name: objects[name] for name in names if name in objects}
    evidence = evidence_of(cluster, kind, present, causes=causes)
    return [
        judge(kind, present[name], evidence.get(name)) if name in present else None
        for name in names
    ]


def evidence_of(
    cluster: Cluster,
    kind: Kind,
    objects: Mapping[str, Object],
    *,
    causes: frozenset[RunState] = FOR_ONE,
) -> dict[str, Evidence]:
    """Return the objects that hold the causes: why runs wait, run badly or have failed.

    Without the right to list pods, events or Workloads the states are still returned.

    Raises:
        Away: the server does not answer.
    """
    states = {name: state_of(kind, obj)[0] for name, obj in objects.items()}
    states = {name: state for name, state in states.items() if state in causes}
    held = {n for n in states if is_suspended(objects[n]) and not states[n].final}
    asked = [name for name in states if name not in held]
    pods: defaultdict[str, list[Object]] = defaultdict(list)
    if asked:
        for pod in _allowed(lambda: cluster.pods(selector_of(RUN_LABEL, asked))):
            pods[str((pod["metadata"].get("labels") or {}).get(RUN_LABEL))].append(pod)
    stuck = {n: stuck_objects(kind, objects[n], pods.get(n, ())) for n in asked}
    failed = [n for n in asked if states[n] is RunState.FAILED]
    queued: list[Object] = []
    if any(queue_of(objects[name]) for name in held):
        queued = list(_allowed(cluster.queued))
    events = _events(cluster, {name for names in stuck.values() for name in names})
    jobs: list[Object] = []
    if failed and kind.jobs:
        jobs = list(_allowed(lambda: cluster.jobs_of(failed)))
    return {
        name: Evidence(
            pods=pods.get(name, ()),
            warnings=[event for one in stuck.get(name, ()) for event in events.get(one, ())],
            jobs=[job for job in jobs if _jobset_of(job) == name],
            queued=queued,
        )
        for name in states
    }


def _events(cluster: Cluster, names: Collection[str]) -> dict[str, list[Object]]:
    """Return the warnings about objects by their names; of many by one list."""
    by_name: dict[str, list[Object]] = {}
    if len(names) <= 2:
        for name in names:
            by_name[name] = list(_allowed(partial(cluster.warnings, name)))
        return by_name
    for event in _allowed(cluster.warnings):
        about = event.get("involvedObject") or {}
        by_name.setdefault(str(about.get("name")), []).append(event)
    return by_name


def _jobset_of(job: Object) -> str:
    return str((job["metadata"].get("labels") or {}).get("jobset.sigs.k8s.io/jobset-name"))


def _allowed(question: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        return question()
    except Away:
        raise
    except LauncherError:
        return []
