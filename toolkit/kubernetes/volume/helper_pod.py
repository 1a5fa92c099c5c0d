"""The helper pod of a transfer, derived from the run's pods, so that it fulfils policies. Pure.

It has the claim and nothing else: none of the run's secrets, devices, labels or network. So
Services, NetworkPolicies, controllers, and queries for state and logs do not take it for a pod of
the run.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.planning.pods import MANAGER

__all__ = ["CONTAINER", "LIMIT_S", "TRANSFER_LABEL", "run_dir_of", "transfer_pod"]

CONTAINER = "transfer"
"""The name of its container."""

TRANSFER_LABEL = f"{MANAGER}/transfer"
"""The label by which the pods of a run's transfers are found."""

LIMIT_S = 3600
"""After how many seconds it ends by itself, in case its creator was killed."""

_OF_POD = (
    *("serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations", "securityContext"),
    *("priorityClassName", "runtimeClassName"),
)
_OF_CONTAINER = ("image", "imagePullPolicy", "securityContext")
"""The labels that it shares with the pods of the run."""

_RESOURCES = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"cpu": "1", "memory": "512Mi"},
}


def run_dir_of(workload: Object, kind: Kind) -> str:
    """Return the path of the run directory in the pods of a run."""
    _, container = _pod_of(workload, kind)
    values = {one["name"]: one.get("value") for one in container.get("env") or ()}
    # Kubernetes would expand a single dollar, see toolkit/rendering/environment.py.
    return str(values["TRAIN_RUN_DIR"]).replace("$$", "$")


def transfer_pod(workload: Object, kind: Kind, *, word: str) -> dict[str, Any]:
    """Return a pod that has the volume with the run directory.

    Args:
        workload: The object that makes the pods of the run, rendered or as the server has it; it
            owns the pod where it is there already.
        kind: What it is.
        word: An id that distinguishes this transfer from others of the run.

    Raises:
        LauncherError: no volume outlives the pods.
    """
    spec, container = _pod_of(workload, kind)
    volume, mount = _volume_of(spec, container, run_dir_of(workload, kind))
    run = workload["metadata"]
    metadata: dict[str, Any] = {
        "name": f"{run['name']}-{CONTAINER}-{word}",
        "namespace": run["namespace"],
        "labels": {
            "app.kubernetes.io/name": CONTAINER,
            "app.kubernetes.io/managed-by": MANAGER,
            TRANSFER_LABEL: run["name"],
        },
    }
    if uid := run.get("uid"):
        owner = {"apiVersion": kind.api_version, "kind": kind.kind, "name": run["name"]}
        metadata["ownerReferences"] = [owner | {"uid": uid}]
    own = {
        "name": CONTAINER,
        # A shell that is the first process must say itself that it heeds SIGTERM.
        "command": ["/bin/sh", "-c", f"trap 'exit 0' TERM; sleep {LIMIT_S} & wait"],
        "resources": _RESOURCES,
        "volumeMounts": [mount],
    }
    made = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIMIT_S,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [own | _some(container, _OF_CONTAINER)],
        "volumes": [volume],
    }
    if nodes := _some(spec.get("affinity") or {}, ("nodeAffinity",)):
        made["affinity"] = nodes
    made |= _some(spec, _OF_POD)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": made}


def _pod_of(workload: Object, kind: Kind) -> tuple[Object, Object]:
    """Return the spec of a run's pods, and their container."""
    spec = _spec_in(workload["spec"], kind.container)
    if spec is None:
        raise LauncherError(f"{kind.kind} {workload['metadata']['name']} says nothing of its pods")
    container = next(one for one in spec["containers"] if one["name"] == kind.container)
    # A TrainJob has image and environment beside its changes of the runtime.
    return spec, {**_some(workload["spec"].get("trainer") or {}, ("image", "env")), **container}


def _spec_in(thing: Any, container: str) -> Object | None:
    """Return the first spec of a pod in an object that has a container of this name."""
    inner = thing if isinstance(thing, list) else ()
    if isinstance(thing, Mapping):
        containers = thing.get("containers")
        if isinstance(containers, list) and container in [one.get("name") for one in containers]:
            return thing
        inner = list(thing.values())
    specs = (_spec_in(one, container) for one in inner)
    return next((one for one in specs if one is not None), None)


def _volume_of(spec: Object, container: Object, run_dir: str) -> tuple[Object, Object]:
    """Return the volume that holds the run directory, and how it is mounted."""
    volumes = {one["name"]: one for one in spec.get("volumes") or ()}
    above = [
        mount
        for mount in container.get("volumeMounts") or ()
        if posixpath.commonpath([run_dir, mount["mountPath"]]) == mount["mountPath"].rstrip("/")
    ]
    mount: Object = max(above, key=lambda one: len(one["mountPath"]), default={})
    volume = volumes.get(mount.get("name"))
    if volume is None or "emptyDir" in volume:
        raise LauncherError(
            f"{run_dir} is in the pods alone and gone with them; name a runs_claim in the profile"
        )
    return volume, mount


def _some(thing: Object, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: thing[key] for key in keys if key in thing}
