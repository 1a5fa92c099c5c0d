"""Nodes that the cluster has lost while pods of a run were on them."""

from collections.abc import Iterable

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.pods import conditions_of, container_statuses, short_name
from toolkit.kubernetes.workloads import Object


def lost_node(cluster: Cluster, pods: Iterable[Object]) -> str:
    """Return which node of running pods is lost and since when; empty where all are ready.

    Kubernetes shows the pods of a lost node as running until they are replaced; only their
    condition Ready is false. Without the right to read nodes, the sentence names the pod.

    Raises:
        Away: the server does not answer.
    """
    for pod in pods:
        running = any(
            (status.get("state") or {}).get("running") for status in container_statuses(pod)
        )
        ready = _ready(pod)
        if not running or ready.get("status") != "False":
            continue
        name, where = str((pod.get("spec") or {}).get("nodeName") or ""), short_name(pod)
        try:
            node = cluster.node(name) if name else None
        except Away:
            raise
        except LauncherError:
            return f"{where} on node {name} is not ready since {ready.get('lastTransitionTime')}"
        if node is None:
            return f"node {name} of {where} is gone"
        own = _ready(node)
        if own.get("status") != "True":
            return (
                f"node {name} is NotReady since {own.get('lastTransitionTime')}, with {where} on it"
            )
    return ""


def _ready(thing: Object) -> Object:
    return next((c for c in conditions_of(thing) if c.get("type") == "Ready"), {})
