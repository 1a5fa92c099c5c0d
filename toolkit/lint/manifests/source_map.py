"""From a place in a rendered manifest back to the key of the job that has led to it. Pure."""

from toolkit.text.manifests import View
from toolkit.text.yaml_reader import KeyPath

__all__ = ["key_of"]

_QUEUE = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class")
_KEYS: dict[str, KeyPath] = {
    "activeDeadlineSeconds": ("time_limit",),
    "args": ("args",),
    "backoffLimit": ("retries", "requeue"),
    "backoffLimitPerIndex": ("retries", "requeue"),
    "completions": ("resources", "nnodes"),
    "hostPath": ("mounts",),
    "image": ("image",),
    "maxReplicas": ("resources", "nnodes"),
    "maxRestarts": ("retries", "requeue"),
    "minReplicas": ("resources", "nnodes"),
    "name": ("name",),
    "nfs": ("mounts",),
    "nprocPerNode": ("resources", "nproc_per_node"),
    "numNodes": ("resources", "nnodes"),
    "numProcPerNode": ("resources", "nproc_per_node"),
    "parallelism": ("resources", "nnodes"),
    "priorityClassName": ("kubernetes", "priority_class"),
    "replicas": ("resources", "nnodes"),
    "sizeLimit": ("resources", "shm"),
    "terminationGracePeriodSeconds": ("stop", "grace"),
    "volumeMounts": ("mounts",),
    "volumes": ("mounts",),
}
"""The last key of a place whose origin is known, and the key of the job."""

_RESOURCES: dict[str, KeyPath] = {
    "cpu": ("resources", "cpus_per_node"),
    "memory": ("resources", "memory"),
}


def key_of(at: View) -> KeyPath:
    """Return the job's key behind a place of a rendered manifest; empty where it is none's.

    It need not be there: then the job leaves it to the profile, or to what follows from others.
    """
    path = at.path
    if "env" in path:
        index = path.index("env")
        name = at.manifest.view.at(*path[: index + 2]).text("name")
        return ("env", name) if name else ("env",)
    if path[-2:-1] in (("requests",), ("limits",)):
        return _RESOURCES.get(str(path[-1]), ("resources", "gpus_per_node"))
    if path[-1:] in ((_QUEUE[0],), (_QUEUE[1],)):
        return ("kubernetes", "queue")
    for key in reversed(path):
        if isinstance(key, str) and key in _KEYS:
            return _KEYS[key]
    return ()
