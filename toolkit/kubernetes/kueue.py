"""Why Kueue lets a run wait, in words that say whether waiting helps. Pure.

Kueue writes nothing on the object itself: it keeps a Workload for it, whose conditions hold the
reason (Kueue 0.19, seen on a cluster; the messages are its own).
"""

import re
from collections.abc import Iterable

from toolkit.kubernetes.pods import conditions_of
from toolkit.kubernetes.workloads import Object

__all__ = ["QUEUE_LABEL", "queue_reason", "workload_for"]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""The label of objects that wait in a LocalQueue."""

_MEANINGS = (
    (r"LocalQueue .* doesn't exist", "unknown queue"),
    (r"(Local|Cluster)Queue .* (is inactive|is stopped|doesn't exist)", "held queue"),
    (r"namespace doesn't match ClusterQueue selector", "the queue does not take this namespace"),
    (r"insufficient quota .*maximum capacity", "never fits"),
    (r"unavailable in ClusterQueue", "never fits"),
    (r"insufficient unused quota", "waits for quota"),
)
"""What Kueue's words come down to; the first that is found counts."""


def workload_for(obj: Object, workloads: Iterable[Object]) -> Object | None:
    """Return the Workload that Kueue keeps for an object."""
    uid = obj["metadata"].get("uid")
    for workload in workloads:
        owners = workload["metadata"].get("ownerReferences") or ()
        if any(owner.get("uid") == uid for owner in owners):
            return workload
    return None


def queue_reason(queue: str, workload: Object | None) -> str:
    """Return why an object waits in a queue.

    Args:
        queue: The name of its LocalQueue.
        workload: Kueue's Workload for it; None if it does not exist.
    """
    if workload is None:
        return f"waits in queue {queue!r}; Kueue has no Workload for it yet"
    by_type = {condition["type"]: condition for condition in conditions_of(workload)}
    reserved, evicted = by_type.get("QuotaReserved", {}), by_type.get("Evicted", {})
    if workload.get("spec", {}).get("active") is False:
        return f"queue {queue!r}: held: somebody has deactivated its Workload"
    before = ""
    if evicted.get("status") == "True":
        before = f"evicted by Kueue ({evicted.get('reason', '')}: {evicted.get('message', '')}); "
    if reserved.get("status") == "True":
        return f"queue {queue!r}: {before}has its quota, waits for admission"
    words = str(reserved.get("message") or "")
    meaning = next((means for text, means in _MEANINGS if re.search(text, words)), "waits")
    return f"queue {queue!r}: {before}{meaning}" + (f": {words}" if words else "")
