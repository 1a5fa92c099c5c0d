"""The capacity of the only node, and the images that it can pull."""

from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity
from tests.fakes.kubernetes.wire import Object

__all__ = ["not_pulled", "not_scheduled"]

_CPUS = 1024
"""More than any node has; a pod that requests more fits nowhere, here and on real clusters."""


def not_scheduled(pod: Object) -> str:
    """Return why the scheduler finds no node for a pod; empty where it does."""
    asked = Decimal(0)
    for container in pod["spec"]["containers"]:
        requests = (container.get("resources") or {}).get("requests") or {}
        asked += parse_quantity(requests.get("cpu", 0))  # type: ignore[no-untyped-call]
    if asked <= _CPUS:
        return ""
    return (
        "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: "
        "1 No preemption victims found for incoming pod."
    )


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
