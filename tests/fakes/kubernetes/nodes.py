"""The capacity of the only node, and the images that it can pull."""

from tests.fakes.kubernetes.wire import Object

__all__ = ["not_pulled", "not_scheduled"]

_CPUS = 1024
"""More than any node has; a pod that requests more fits nowhere, here and on real clusters."""


def not_scheduled(pod: Object) -> str:
    """Return why the scheduler finds no node for a pod; empty where it does."""
    asked = 0.0
    for container in pod["spec"]["containers"]:
        text = str(((container.get("resources") or {}).get("requests") or {}).get("cpu", 0))
        asked += float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
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
