"""Files of a run directory to and from the claim, through a helper pod.

The helper pod is derived from the run's pods, so that it fulfils policies. It has the claim and
nothing else: none of the run's secrets, devices, labels or network. So Services, NetworkPolicies,
controllers, and queries for state and logs do not take it for a pod of the run.
"""

import contextlib
import posixpath
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import FIRST_PAUSE_S, Away, Conflict, Denied, Missing
from toolkit.kubernetes.client.resources import PODS, Cluster
from toolkit.kubernetes.pods import sentence, trouble
from toolkit.kubernetes.volume.files import ATTEMPTS, Files, explained
from toolkit.kubernetes.workloads import Object, WorkloadKind, documents_of, owned
from toolkit.planning.pods import MANAGER
from toolkit.profile import KubernetesProfile

if TYPE_CHECKING:
    from toolkit.kubernetes.run import KubernetesRun

TRANSFER_LABEL = f"{MANAGER}/transfer"
"""The label by which the pods of a run's transfers are found."""

_CONTAINER = "transfer"

_LIMIT_S = 3600
"""After how many seconds a helper pod ends by itself, in case its creator was killed."""

_PATIENCE = 600
"""How often to look whether the pod runs: its image must come, and a node have room."""

_OF_POD = (
    *("serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations", "securityContext"),
    *("priorityClassName", "runtimeClassName"),
)
_OF_CONTAINER = ("image", "imagePullPolicy", "securityContext")
"""The fields that it shares with the pods of the run."""

_RESOURCES = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"cpu": "1", "memory": "512Mi"},
}


@contextlib.contextmanager
def placed(
    cluster: Cluster, kind: WorkloadKind, workload: Object, files: Mapping[str, bytes]
) -> Iterator[None]:
    """Have files in the run directory of a run that is to be submitted; if that fails, no longer.

    The files are given by their paths in the run directory; without any, nothing is done.

    Raises:
        LauncherError: they cannot be written; nothing is left.
    """
    if not files:
        yield
        return
    with transfer(cluster, kind, workload) as run_directory:
        submitting = False
        try:
            for name, content in files.items():
                run_directory.write(name, content)
            submitting = True
            yield
        except BaseException as error:
            if submitting and isinstance(error, Away):
                raise  # it is unknown whether the run has arrived
            for name in files:
                with contextlib.suppress(LauncherError):
                    run_directory.remove(name)
            raise


def fetch(run: "KubernetesRun", targets: Mapping[str, Path]) -> set[str]:
    """Copy files of a run's run directory here, each whole or not at all.

    They are read in a pod of the run while one runs, else in one that is made for it. The targets
    are local paths by those in the run directory. Returns the ones that are not there.

    Raises:
        LauncherError: they cannot be read, or nothing outlives the pods.
    """
    cluster, kind = run.cluster, run.kind
    workload = cluster.get(kind, run.object_name)
    if workload is None:
        manifest = run.local.manifest(KubernetesProfile.model_validate(run.record.profile))
        workload = next(
            document
            for document in documents_of(manifest)
            if (document["kind"], document["metadata"]["name"]) == (kind.kind, run.object_name)
        )
    running: list[Object] = []
    with contextlib.suppress(Denied):
        running = [pod for pod in cluster.pods(run.selector) if _runs(pod)]
    for pod in running[:1]:
        name = str(pod["metadata"]["name"])
        with contextlib.suppress(Missing):  # it has ended just now
            return _copied(
                Files(cluster, name, kind.container, run_dir_of(workload, kind)), targets
            )
    with transfer(cluster, kind, workload) as files:
        return _copied(files, targets)


def _copied(files: Files, targets: Mapping[str, Path]) -> set[str]:
    missing = set()
    for name, path in targets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(3)}")
        try:
            with draft.open("wb") as out:
                complete = files.fetch(name, out)
            if complete:
                draft.replace(path)
            else:
                missing.add(name)
        finally:
            draft.unlink(missing_ok=True)
    return missing


@contextlib.contextmanager
def transfer(cluster: Cluster, kind: WorkloadKind, workload: Object) -> Iterator[Files]:
    """Make a pod that has the run directory of a workload, and delete it at the end.

    Raises:
        LauncherError: the server refuses, or the pod does not run.
    """
    pod = transfer_pod(workload, kind, word=secrets.token_hex(3))
    name = str(pod["metadata"]["name"])
    connection, path = cluster.connection, PODS.path(cluster.namespace)
    try:
        with explained():
            with contextlib.suppress(Conflict):  # the name is unique: an answer was lost
                connection.patiently(
                    lambda: connection.ask("POST", path, body=pod), attempts=ATTEMPTS
                )
            _until_it_runs(cluster, name)
        yield Files(cluster, name, _CONTAINER, run_dir_of(workload, kind))
    finally:
        for _ in range(ATTEMPTS):  # if none succeeds, the pod ends by itself
            try:
                connection.ask("DELETE", f"{path}/{name}")
            except Away:
                connection.sleep(FIRST_PAUSE_S)
                continue
            except LauncherError:
                pass  # it is gone, or may not be deleted
            break


def _until_it_runs(cluster: Cluster, name: str) -> None:
    """Wait for a pod; raise LauncherError if it has ended, or does not run after a long time."""
    subject, reason = f"pod {name}, through which files go to the claim,", ""
    for attempt in range(_PATIENCE):
        if (pod := cluster.get(PODS, name)) is None:
            raise LauncherError(f"{subject} was deleted before it ran")
        if _runs(pod):
            return
        status = pod.get("status") or {}
        if status.get("phase") in ("Succeeded", "Failed"):
            why = sentence("", status) or trouble(pod) or f"it has {status['phase'].lower()}"
            raise LauncherError(f"{subject} has ended: {why}")
        reason = trouble(pod).partition(": ")[2]
        cluster.connection.sleep(min(0.1 * 1.1**attempt, 1.0))
    with contextlib.suppress(LauncherError):
        reason = reason or next((sentence("", e) for e in reversed(cluster.warnings(name))), "")
    raise LauncherError(f"{subject} does not run" + (f": {reason}" if reason else ""))


def _runs(pod: Object) -> bool:
    """Whether a pod runs and is not being deleted."""
    phase = (pod.get("status") or {}).get("phase")
    return phase == "Running" and not pod["metadata"].get("deletionTimestamp")


def transfer_pod(workload: Object, kind: WorkloadKind, *, word: str) -> Object:
    """Return a pod that has the volume with the run directory.

    Args:
        workload: The object that makes the pods of the run, rendered or as the server has it; it
            owns the pod where it is there already.
        kind: Its kind.
        word: An id that distinguishes this transfer from others of the run.

    Raises:
        LauncherError: no volume outlives the pods.
    """
    spec, container = _pod_of(workload, kind)
    run_dir = run_dir_of(workload, kind)
    above = [
        mount
        for mount in container.get("volumeMounts") or ()
        if posixpath.commonpath([run_dir, mount["mountPath"]]) == mount["mountPath"].rstrip("/")
    ]
    mount: Object = max(above, key=lambda mount: len(mount["mountPath"]), default={})
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
    volume = volumes.get(mount.get("name"))
    if volume is None or "emptyDir" in volume:
        raise LauncherError(
            f"{run_dir} is in the pods alone and gone with them; name a runs_claim in the profile"
        )
    run = workload["metadata"]
    labels = {
        "app.kubernetes.io/name": _CONTAINER,
        "app.kubernetes.io/managed-by": MANAGER,
        TRANSFER_LABEL: run["name"],
    }
    name = f"{run['name']}-{_CONTAINER}-{word}"
    helper = {
        "name": _CONTAINER,
        # A shell that is the first process must say itself that it heeds SIGTERM.
        "command": ["/bin/sh", "-c", f"trap 'exit 0' TERM; sleep {_LIMIT_S} & wait"],
        "resources": _RESOURCES,
        "volumeMounts": [mount],
    }
    pod_spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _LIMIT_S,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [helper | _some(container, _OF_CONTAINER)],
        "volumes": [volume],
    }
    if nodes := _some(spec.get("affinity") or {}, ("nodeAffinity",)):
        pod_spec["affinity"] = nodes
    pod_spec |= _some(spec, _OF_POD)
    metadata = {"name": name, "namespace": run["namespace"], "labels": labels}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
    return owned(pod, kind, workload) if "uid" in run else pod


def run_dir_of(workload: Object, kind: WorkloadKind) -> str:
    """Return the path of the run directory in the pods of a run."""
    _, container = _pod_of(workload, kind)
    values = {entry["name"]: entry.get("value") for entry in container.get("env") or ()}
    # Kubernetes would expand a single dollar, see toolkit/rendering/environment.py.
    return str(values["TRAIN_RUN_DIR"]).replace("$$", "$")


def _pod_of(workload: Object, kind: WorkloadKind) -> tuple[Object, Object]:
    """Return the spec of a run's pods, and their container."""
    spec = _spec_in(workload["spec"], kind.container)
    if spec is None:
        raise LauncherError(f"{kind.kind} {workload['metadata']['name']} says nothing of its pods")
    container = next(c for c in spec["containers"] if c["name"] == kind.container)
    # A TrainJob has image and environment beside its changes of the runtime.
    return spec, {**_some(workload["spec"].get("trainer") or {}, ("image", "env")), **container}


def _spec_in(thing: Any, container: str) -> Object | None:
    """Return the first spec of a pod in an object that has a container of this name."""
    inner = thing if isinstance(thing, list) else ()
    if isinstance(thing, Mapping):
        containers = thing.get("containers")
        if isinstance(containers, list) and container in [c.get("name") for c in containers]:
            return thing
        inner = list(thing.values())
    specs = (_spec_in(value, container) for value in inner)
    return next((spec for spec in specs if spec is not None), None)


def _some(thing: Object, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: thing[key] for key in keys if key in thing}
