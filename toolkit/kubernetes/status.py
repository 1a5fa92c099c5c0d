"""The status and reason of runs, from their objects, pods, events and Kueue's Workloads.

One list returns the states of all runs of a namespace and kind. Causes are queried only for waiting
and failed runs: one list of pods, and one of events, Jobs or Workloads if they may contain the
cause. `status_of` is pure.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, unless_refused
from toolkit.kubernetes.client.resources import NODES, Cluster, pod_selector_of, selector_of
from toolkit.kubernetes.client.watcher import ObjectWatch
from toolkit.kubernetes.pods import (
    FATAL,
    attempt_of,
    conditions_of,
    container_statuses,
    disruption,
    failed_for_good,
    first_death,
    is_running,
    is_starting,
    label_of,
    pods_of_last_start,
    sentence,
    short_name,
    trouble,
    true_conditions,
)
from toolkit.kubernetes.workloads import JOBSET_LABEL, Object, WorkloadKind
from toolkit.planning.pods import RUN_LABEL
from toolkit.runs.state import RunState, RunStatus

FOR_ONE = frozenset((RunState.PENDING, RunState.RUNNING, RunState.FAILED))
"""States with a query for the cause in `status` of a single run."""

FOR_LIST = frozenset((RunState.PENDING, RunState.FAILED))
"""States with a query for the cause in a list of runs."""

FOR_WAIT = frozenset((RunState.FAILED,))
"""States with a query for the cause while a caller waits for many runs."""

STARTS_AGAIN = "starts again"
"""The reason of a run between two starts, if nothing else is known."""

_OUT_OF_TIME = ("DeadlineExceeded", "active longer than specified deadline")
"""Texts that report an exceeded deadline: a reason, and the Training Operator's message."""

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""The label of objects with a LocalQueue."""

_UIDS = re.compile(r" ?\((?:Job)?UID: [^()]{1,200}\)")
"""The UIDs in Kueue's messages about a preempting workload (Kueue 0.19)."""

_BY_SOMEBODY = "its Workload was deactivated by hand"

_QUEUE_MEANINGS = (
    (r"LocalQueue .* doesn't exist", "unknown queue"),
    (r"(Local|Cluster)Queue (.* )?(is inactive|is stopped|doesn't exist)", "held queue"),
    (r"namespace doesn't match ClusterQueue selector", "the queue does not take this namespace"),
    (r"insufficient quota .*maximum capacity", "never fits"),
    (r"unavailable in ClusterQueue", "never fits"),
    (r"insufficient unused quota", "waits for quota"),
)
"""The meaning of Kueue's messages (Kueue 0.19, seen on a cluster); the first match counts.

Kueue writes them to the conditions of its Workload for an object, never to the object."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence from other objects than the workload itself."""

    pods: Sequence[Object] = ()
    warnings: Sequence[Object] = ()
    """Warning events about the objects that `stuck_objects` names, oldest first."""

    jobs: Sequence[Object] = ()
    """The Jobs between the workload and its pods."""

    queued: Mapping[str, Object] | None = None
    """Kueue's Workloads by the uids of their owners; None if they are not readable."""

    lost: str = ""
    """The lost node of a running pod, and since when."""


def evidence_of(
    cluster: Cluster,
    kind: WorkloadKind,
    objects: Mapping[str, Object],
    *,
    causes: frozenset[RunState] = FOR_ONE,
    with_failed_pods: bool = True,
) -> dict[str, Evidence]:
    """Return the evidence, by name, why runs in the states `causes` wait, struggle or have failed.

    For the other runs, `with_failed_pods` adds pods that have failed permanently; some kinds of
    workload show such a failure minutes later.

    Without permission to list pods, events or Workloads, the states are still returned.

    Raises:
        Away: the server does not answer.
    """
    states = {name: state_of(kind, obj)[0] for name, obj in objects.items()}
    unsure = [n for n, state in states.items() if state is RunState.RUNNING not in causes]
    held = {n for n in states if is_suspended(objects[n]) and not states[n].final}
    waits = RunState.PENDING in causes
    states = {n: s for n, s in states.items() if s in causes or (waits and n in held)}
    held &= states.keys()
    active = [name for name in states if name not in held]
    pods: defaultdict[str, list[Object]] = defaultdict(list)
    if active:
        selector = pod_selector_of(kind, selector_of(RUN_LABEL, active))
        for pod in unless_refused(lambda: cluster.pods(selector)) or []:
            pods[label_of(pod, RUN_LABEL)].append(pod)
    queued: Mapping[str, Object] | None = None
    if any(label_of(objects[name], _QUEUE_LABEL) for name in held):
        workloads = unless_refused(cluster.queued)
        queued = None if workloads is None else by_owner(workloads)
    stuck = {name: stuck_objects(kind, objects[name], pods.get(name, ())) for name in active}
    names = {name for stuck_names in stuck.values() for name in stuck_names}
    events: defaultdict[str, list[Object]] = defaultdict(list)
    if len(names) <= 2:
        for name in names:
            events[name] = unless_refused(partial(cluster.warnings, name)) or []
    else:
        for event in unless_refused(cluster.warnings) or []:
            events[str((event.get("involvedObject") or {}).get("name"))].append(event)
    jobs: defaultdict[str, list[Object]] = defaultdict(list)
    failed = [name for name in active if states[name] is RunState.FAILED]
    if failed and kind.jobs:
        for job in unless_refused(lambda: cluster.jobs_of(failed)) or []:
            jobs[label_of(job, JOBSET_LABEL)].append(job)
    ended: defaultdict[str, list[Object]] = defaultdict(list)
    if unsure and kind.replaces_failed and with_failed_pods:
        selector = pod_selector_of(kind, selector_of(RUN_LABEL, unsure))
        for pod in unless_refused(lambda: cluster.failed_pods(selector)) or []:
            if failed_for_good(pod):
                ended[label_of(pod, RUN_LABEL)].append(pod)
    return {name: Evidence(pods=own) for name, own in ended.items() if name in unsure} | {
        name: Evidence(
            pods=pods[name],
            warnings=[event for stuck_name in stuck.get(name, ()) for event in events[stuck_name]],
            jobs=jobs[name],
            queued=queued,
            lost=_lost_node(cluster, kind, pods[name]) if not states[name].final else "",
        )
        for name in states
    }


def by_owner(things: Iterable[Object]) -> dict[str, Object]:
    """Return objects by the uids of their owners; the first for each owner."""
    owned: dict[str, Object] = {}
    for thing in things:
        for owner in thing["metadata"].get("ownerReferences") or ():
            owned.setdefault(str(owner.get("uid")), thing)
    return owned


def _lost_node(cluster: Cluster, kind: WorkloadKind, pods: Iterable[Object]) -> str:
    """Return the lost node of a running pod and since when; empty if all are ready.

    Kubernetes shows the pods of a lost node as running until the node is back or removed; only
    their condition Ready is false. Without permission to read nodes, the sentence names the pod.
    The pods of a PyTorchJob have fixed names, so the lost pod blocks its replacement.
    """
    for pod in pods:
        states = (status.get("state") or {} for status in container_statuses(pod))
        ready = _ready(pod)
        if not any(state.get("running") for state in states) or ready.get("status") != "False":
            continue
        name, where = str((pod.get("spec") or {}).get("nodeName") or ""), short_name(pod)
        advice = ""
        if pod["metadata"].get("deletionTimestamp"):
            if kind.replaces_failed:
                continue
            own = pod["metadata"]["name"]
            advice = f"; if it is down, `kubectl delete pod {own} --force` lets {where} be replaced"
        try:
            node = cluster.get(NODES, name) if name else None
        except Away:
            raise
        except LauncherError:
            since = ready.get("lastTransitionTime")
            return f"{where} on node {name} is not ready since {since}{advice}"
        if node is None:
            return f"node {name} of {where} is gone"
        condition = _ready(node)
        if condition.get("status") != "True":
            since = condition.get("lastTransitionTime")
            return f"node {name} is NotReady since {since}, with {where} on it{advice}"
    return ""


def _ready(thing: Object) -> Object:
    return next((c for c in conditions_of(thing) if c.get("type") == "Ready"), {})


def status_of(kind: WorkloadKind, obj: Object, evidence: Evidence | None = None) -> RunStatus:
    """Return the state of an object, with the most specific reason."""
    evidence = evidence or Evidence()
    state, reason = state_of(kind, obj)
    if state is RunState.SUCCEEDED:
        return RunStatus(state=state)
    if state is RunState.FAILED:
        return _failed(obj, reason, evidence)
    if obj["metadata"].get("deletionTimestamp"):
        return RunStatus(state=RunState.RUNNING, reason="being stopped")
    if any(map(failed_for_good, evidence.pods)):  # the object shows it after a few replacements
        words = next(
            (w for pod in evidence.pods if failed_for_good(pod) and (w := trouble(pod))), ""
        )
        return (
            RunStatus(state=RunState.FAILED, reason=words) if words else _failed(obj, "", evidence)
        )
    if state is RunState.UNKNOWN:
        return RunStatus(state=state, reason=reason)
    if is_suspended(obj):
        if queue := label_of(obj, _QUEUE_LABEL):
            if evidence.queued is None:
                return RunStatus(state=state, reason=f"waits in queue {queue!r}")
            own = evidence.queued.get(str(obj["metadata"].get("uid")))
            reason = queue_reason(queue, own)
            # Kueue releases the quota once the stopped pods are gone.
            if own and {"Evicted", "QuotaReserved"} <= true_conditions(own).keys():
                state = RunState.RUNNING
        return RunStatus(state=state, reason=reason)
    if any(is_running(pod) or attempt_of(pod) for pod in evidence.pods):
        state = RunState.RUNNING
    return RunStatus(state=state, reason=_trouble(evidence) or reason or _restarts(obj, evidence))


def state_of(kind: WorkloadKind, obj: Object) -> tuple[RunState, str]:
    """Return state and reason from the object alone."""
    by_type = true_conditions(obj)
    for name, state in kind.conditions.items():
        if (condition := by_type.get(name)) is not None and state is not None:
            quiet = name in ("Created", "Running") or state is RunState.SUCCEEDED
            reason = condition.get("message") or condition.get("reason") or name
            if name == "Created" and any(c["type"] == "Running" for c in conditions_of(obj)):
                return RunState.RUNNING, STARTS_AGAIN  # it ran before
            if name == "RestartingJobSet":
                reason = f"starts again (restart {(obj.get('status') or {}).get('restarts') or 1})"
            return state, "" if quiet else reason
    if strange := sorted(set(by_type) - set(kind.conditions)):
        return RunState.UNKNOWN, f"the {kind.kind} says {', '.join(strange)}"
    status = obj.get("status") or {}
    counts = status.get(kind.counts) or () if kind.counts else (status,)
    started = any(count.get("ready") or count.get("succeeded") for count in counts)
    if restarts := status.get("restarts"):
        return RunState.RUNNING, "" if started else f"starts again (restart {restarts})"
    if started or (not kind.counts and status.get("failed")):
        return RunState.RUNNING, ""
    return RunState.PENDING, ""  # no controller has seen it yet, or its pods cannot be created


def stuck_objects(kind: WorkloadKind, obj: Object, pods: Sequence[Object]) -> list[str]:
    """Return the names of the objects with events that explain a delayed start."""
    if state_of(kind, obj)[0] is not RunState.PENDING or is_suspended(obj):
        return []
    if not pods:
        name = str(obj["metadata"]["name"])
        # The Job that cannot create its pods; the JobSet of a TrainJob has the TrainJob's name.
        return [name, f"{name}-node-0"] if kind.jobs else [name]
    return [str(pod["metadata"]["name"]) for pod in pods if is_starting(pod)][:1]


def queue_reason(queue: str, workload: Object | None) -> str:
    """Return why an object waits in a LocalQueue, and whether waiting helps.

    `workload` is Kueue's Workload for the object; None if it does not exist.
    """
    if workload is None:
        return f"waits in queue {queue!r}; Kueue has no Workload for it yet"
    by_type = {condition["type"]: condition for condition in conditions_of(workload)}
    reserved, evicted = by_type.get("QuotaReserved", {}), by_type.get("Evicted", {})
    why, words = (_UIDS.sub("", str(c.get("message") or "")) for c in (evicted, reserved))
    if workload.get("spec", {}).get("active") is False:
        by_itself = str(evicted.get("reason")).startswith("DeactivatedDueTo")
        who = f"Kueue has deactivated its Workload: {why}" if by_itself else _BY_SOMEBODY
        return f"queue {queue!r}: held: {who}"
    before = ""
    if is_evicted := evicted.get("status") == "True":
        before = f"evicted by Kueue ({sentence('', {**evicted, 'message': why})}); "
    if reserved.get("status") == "True":
        then = "its pods are being stopped" if is_evicted else "has its quota, waits for admission"
        return f"queue {queue!r}: {before}{then}"
    meaning = next((means for text, means in _QUEUE_MEANINGS if re.search(text, words)), "waits")
    more = "" if is_evicted and words == why else words  # Kueue repeats the message at first
    return f"queue {queue!r}: {before}{meaning}" + (f": {more}" if more else "")


def is_suspended(obj: Object) -> bool:
    """Whether an object creates no pods, since a queue or a user holds it."""
    return bool((obj.get("spec") or {}).get("suspend")) or "Suspended" in true_conditions(obj)


def _failed(obj: Object, message: str, evidence: Evidence) -> RunStatus:
    """Return how a run failed: by itself, by preemption, or by its deadline."""
    ends = [
        sentence("", end)
        for thing in (obj, *evidence.jobs)
        if (end := true_conditions(thing).get("Failed")) is not None
    ]
    late = next((w for w in (message, *ends) if any(text in w for text in _OUT_OF_TIME)), "")
    death = first_death(pod for pod in evidence.pods if not disruption(pod))
    last = pods_of_last_start(evidence.pods)
    taken = next((text for pod in last if (text := disruption(pod))), "")
    state, causes = RunState.PREEMPTED, [message, taken]
    if late:
        causes = [message, "" if late == message else late]
    elif not taken or (death is not None and death.exit_code == FATAL):
        state = RunState.FAILED
        causes = [message.removesuffix(".") if death else message, str(death or "")]
    return RunStatus(state=state, reason="; ".join(filter(None, causes)))


def _restarts(obj: Object, evidence: Evidence) -> str:
    """Return how often a run has restarted; empty for a run without restarts."""
    status = obj.get("status") or {}
    of_pods = [attempt_of(pod) or 0 for pod in evidence.pods]
    containers = (one for pod in evidence.pods for one in container_statuses(pod))
    of_containers = [int(one.get("restartCount") or 0) for one in containers]
    restarts = max([status.get("restarts") or 0, *of_pods, *of_containers])
    if restarts:
        return f"restart {restarts}"
    if failed := status.get("failed"):  # of a Job
        return f"{failed} {'pod has' if failed == 1 else 'pods have'} failed and been replaced"
    return ""


def _trouble(evidence: Evidence) -> str:
    """Return why a run does not run, or why it restarted."""
    if evidence.lost:
        return evidence.lost
    if words := next((text for pod in evidence.pods if (text := trouble(pod))), ""):
        return words
    if not evidence.warnings:
        return ""
    latest = evidence.warnings[-1]
    name = (latest.get("involvedObject") or {}).get("name")
    pod = next((pod for pod in evidence.pods if pod["metadata"]["name"] == name), None)
    return sentence(short_name(pod) if pod else "", latest)


def digest(kind: WorkloadKind, obj: Object) -> Object:
    """Return only the parts of an object that determine its state."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    identity = ("name", "uid", "deletionTimestamp", "ownerReferences")
    queue = label_of(obj, _QUEUE_LABEL)
    return {
        "metadata": {key: metadata[key] for key in identity if key in metadata}
        | {"labels": {_QUEUE_LABEL: queue} if queue else {}},
        "spec": {"suspend": bool((obj.get("spec") or {}).get("suspend"))},
        "status": {
            key: status[key]
            for key in ("conditions", "restarts", "ready", "succeeded", "failed", kind.counts)
            if key in status
        },
    }


@dataclass(frozen=True, kw_only=True)
class Change:
    """A run with a changed state."""

    name: str
    state: RunState | None
    """The state from the object itself; None if the object is gone."""

    reason: str = ""


def changes_of(cluster: Cluster, kind: WorkloadKind, selector: str) -> Iterator[Change]:
    """Yield the state of each run that matches a selector, then every change, without end.

    Raises:
        LauncherError: the server refuses.
    """
    states: dict[str, tuple[RunState, str]] = {}
    started: dict[str, object] = {}
    watch = ObjectWatch(cluster, kind, selector, partial(digest, kind))
    try:
        for name, obj in watch.events():
            if obj is None:
                if states.pop(name, None) is not None:
                    yield Change(name=name, state=None)
                continue
            now, uid = state_of(kind, obj), obj["metadata"].get("uid")
            if now[0] is RunState.RUNNING:
                started[name] = uid
            elif now[0] is RunState.PENDING and uid and started.get(name) == uid:
                now = now if is_suspended(obj) else (RunState.RUNNING, STARTS_AGAIN)
            if now != states.get(name):
                states[name] = now
                yield Change(name=name, state=now[0], reason=now[1])
    finally:
        watch.close()
