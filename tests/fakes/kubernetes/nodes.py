"""Which node a pod gets, the capacity of each, and the images that it can pull."""

from collections.abc import Iterable
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity
from tests.fakes.kubernetes.selecting import selector_matches
from tests.fakes.kubernetes.wire import Object

__all__ = ["NODES", "node_for", "not_pulled", "not_scheduled", "tolerated_s"]

NODES = ("node-a", "node-b", "node-c")
_HOSTNAME = "kubernetes.io/hostname"

_CPUS = 1024
"""More than any node has; a pod that requests more fits nowhere, here and on real clusters."""


def not_scheduled(pod: Object) -> str:
    """Return why the scheduler finds no node for a pod; empty where it does."""
    asked = Decimal(0)
    for container in pod["spec"]["containers"]:
        requests = (container.get("resources") or {}).get("requests") or {}
        asked += parse_quantity(requests.get("cpu", 0))
    if asked <= _CPUS:
        if pod["spec"].get("nodeName"):
            return ""
        return "0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules."
    return (
        "0/3 nodes are available: 3 Insufficient cpu. preemption: 0/3 nodes are available: "
        "3 No preemption victims found for incoming pod."
    )


def node_for(pod: Object, pods: Iterable[Object], tainted: Iterable[str]) -> str:
    """Return the emptiest node for a pod; none where its required anti-affinity leaves none.

    Pods that are being deleted still count; a lost node is tainted.
    """
    rules = ((pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution", ()
    )
    placed = [one for one in pods if one["status"].get("phase") not in ("Succeeded", "Failed")]
    taken = set(tainted)
    for rule in rules:
        assert rule["topologyKey"] == _HOSTNAME
        taken |= {
            one["spec"]["nodeName"]
            for one in placed
            if "nodeName" in one["spec"]
            and selector_matches(one["metadata"].get("labels") or {}, rule["labelSelector"])
        }
    free = [name for name in NODES if name not in taken]
    loads = [one["spec"].get("nodeName") for one in placed]
    return min(free, key=loads.count, default="")


def tolerated_s(pod: Object) -> float:
    """Return how long a pod stays on a node that is unreachable (300 s by admission)."""
    for one in pod["spec"].get("tolerations") or ():
        if one.get("key") == "node.kubernetes.io/unreachable":
            return float(one.get("tolerationSeconds", float("inf")))
    return 300.0


def not_pulled(pod: Object) -> str:
    """Return why an image of a pod cannot be pulled: no host's name ends in `.invalid`."""
    for container in pod["spec"]["containers"]:
        host, _, rest = container["image"].partition("/")
        if rest and host.partition(":")[0].endswith(".invalid"):  # RFC 2606
            return (
                f'failed to pull and unpack image "{container["image"]}": failed to do request: '
                f"dial tcp: lookup {host}: no such host"
            )
    return ""
