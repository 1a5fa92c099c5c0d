"""The pod that files go through, from its making to its end."""

import contextlib
import secrets
from collections.abc import Iterator, Mapping

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Conflict
from toolkit.kubernetes.client.resources import PODS, Cluster
from toolkit.kubernetes.pods import sentence, trouble
from toolkit.kubernetes.volume.files import ATTEMPTS, PAUSE_S, Files, explained
from toolkit.kubernetes.volume.helper_pod import CONTAINER, run_dir_of, transfer_pod
from toolkit.kubernetes.workloads import Kind, Object

__all__ = ["placed", "runs", "transfer"]

_PATIENCE = 600
"""How often to look whether the pod runs: its image must come, and a node have room."""


@contextlib.contextmanager
def transfer(cluster: Cluster, kind: Kind, workload: Object) -> Iterator[Files]:
    """Make a pod that has the run directory of a run, and delete it at the end.

    Args:
        cluster: Where.
        kind: What the run is.
        workload: Its object, rendered or as the server has it.

    Raises:
        LauncherError: the server refuses, or the pod does not run.
    """
    pod = transfer_pod(workload, kind, word=secrets.token_hex(3))
    name = str(pod["metadata"]["name"])
    try:
        with explained():
            _make(cluster, pod)
            _until_it_runs(cluster, name)
        yield Files(cluster, name, CONTAINER, run_dir_of(workload, kind))
    finally:
        _delete(cluster, name)


@contextlib.contextmanager
def placed(
    cluster: Cluster, kind: Kind, workload: Object, files: Mapping[str, bytes]
) -> Iterator[None]:
    """Have files in the run directory of a run that is to be submitted; if that fails, no longer.

    Args:
        cluster: Where.
        kind: What the run is.
        workload: Its object as it is rendered.
        files: The files, by their paths in the run directory; without any, nothing is done.

    Raises:
        LauncherError: they cannot be written; nothing is left.
    """
    if not files:
        yield
        return
    with transfer(cluster, kind, workload) as there:
        submitting = False
        try:
            for name, content in files.items():
                there.write(name, content)
            submitting = True
            yield
        except BaseException as error:
            if submitting and isinstance(error, Away):
                raise  # it is unknown whether the run has arrived
            for name in files:
                with contextlib.suppress(LauncherError):
                    there.remove(name)
            raise


def _make(cluster: Cluster, pod: Object) -> None:
    """Make a pod, once."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            cluster.connection.ask("POST", PODS.path(cluster.namespace), body=pod)
            return
        except Conflict:
            return  # the name is unique: an answer was lost
        except Away as error:
            if attempt == ATTEMPTS or not error.connected:
                raise
            cluster.connection.sleep(error.retry_after_s or PAUSE_S)


def _until_it_runs(cluster: Cluster, name: str) -> None:
    """Wait for a pod.

    Raises:
        LauncherError: it has ended, or does not run after a long time.
    """
    who, reason = f"pod {name}, through which files go to the claim,", ""
    for attempt in range(_PATIENCE):
        if (pod := cluster.get(PODS, name)) is None:
            raise LauncherError(f"{who} was deleted before it ran")
        if runs(pod):
            return
        status = pod.get("status") or {}
        if status.get("phase") in ("Succeeded", "Failed"):
            why = sentence("", status) or trouble(pod) or f"it has {status['phase'].lower()}"
            raise LauncherError(f"{who} has ended: {why}")
        reason = trouble(pod).partition(": ")[2]
        cluster.connection.sleep(min(0.1 * 1.1**attempt, 1.0))
    with contextlib.suppress(LauncherError):
        reason = reason or next((sentence("", e) for e in reversed(cluster.warnings(name))), "")
    raise LauncherError(f"{who} does not run" + (f": {reason}" if reason else ""))


def runs(pod: Object) -> bool:
    """Whether a pod runs and is not being deleted."""
    phase = (pod.get("status") or {}).get("phase")
    return phase == "Running" and not pod["metadata"].get("deletionTimestamp")


def _delete(cluster: Cluster, name: str) -> None:
    """Delete a pod, as far as the server lets us; else it ends by itself."""
    for _ in range(ATTEMPTS):
        try:
            cluster.connection.ask("DELETE", PODS.path(cluster.namespace, name))
            return
        except Away:
            cluster.connection.sleep(PAUSE_S)
        except LauncherError:
            return
