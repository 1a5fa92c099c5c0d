"""Opens runs again: recorded ones, interrupted submissions, and runs of others in the cluster.

A submission is written down first (toolkit/runs/submission_journal.py). If the client is killed or
gets no answer, the run is opened later by this record: its existing objects are listed, and
half-created ones are completed.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import LauncherError, RunNotFound
from toolkit.kubernetes.client.connection import Connection, Denied, NotServed
from toolkit.kubernetes.client.resources import Cluster, selector_of
from toolkit.kubernetes.local_state import LocalState
from toolkit.kubernetes.pods import label_of, seconds_of
from toolkit.kubernetes.run import KubernetesRun
from toolkit.kubernetes.submission import TOGETHER, complete, withdraw
from toolkit.kubernetes.sweep import KubernetesSweep
from toolkit.kubernetes.workloads import KINDS, RunObjects, WorkloadKind, is_of, objects_by_run
from toolkit.planning.pods import RUN_LABEL, SWEEP_LABEL
from toolkit.profile import KubernetesProfile
from toolkit.runs.registry import OBJECT_URI, RunRecord
from toolkit.runs.submission_journal import Intent
from toolkit.text import untrusted

_FILE_BYTES = 1 << 34
"""The arguments of a call; they are as large as the user's pickles."""


def opened(
    record: RunRecord,
    cluster: Cluster,
    kind: WorkloadKind,
    environ: Mapping[str, str],
    *,
    begun: float | None = None,
) -> KubernetesRun:
    """Return the handle of a run, or of a sweep, with `begun` as in `KubernetesRun`."""
    is_sweep = bool(LocalState(record.name, environ).points())
    run_class = KubernetesSweep if is_sweep else KubernetesRun
    return run_class(record, cluster, kind, environ, begun=begun)


def interrupted(
    run: KubernetesRun, intent: Intent, profile: KubernetesProfile
) -> tuple[list[RunObjects], list[RunObjects]]:
    """Return the objects of an interrupted submission by run, and the runs without a workload.

    Raises:
        LauncherError: its local files are gone, or the API server does not answer.
    """
    cluster, kind, folder = run.cluster, run.kind, run.local.folder
    try:
        files = {
            str(path): untrusted.read_bytes(folder / str(path), limit=_FILE_BYTES, below=folder)
            for path in intent.data["files"]
        }
    except (KeyError, OSError, TypeError) as error:
        raise LauncherError(
            f"what was to be submitted as {run.local.name} is gone: {error}"
        ) from error
    runs = objects_by_run(run.local.manifest(profile, files), kind, files)
    if len(runs) > 1:
        try:
            items, _ = cluster.objects(kind, selector_of(SWEEP_LABEL, [run.local.name]))
        except Denied:  # the right to submit need not include the right to list
            pass
        else:
            names = {item["metadata"]["name"] for item in items}
            return runs, [objects for objects in runs if objects.name not in names]
    pairs = [(objects, cluster.get(kind, objects.name)) for objects in runs]
    return runs, [
        objects for objects, obj in pairs if obj is None or not is_of(objects.workload, obj)
    ]


def tidy(
    run: KubernetesRun, runs: Sequence[RunObjects], missing: Sequence[RunObjects], *, settled: bool
) -> None:
    """Complete each half-created run, and delete companions of runs that were never created.

    Runs are made some at a time, in order: only the last of them can be half done.
    """
    absent = {objects.name for objects in missing}
    last = max((n for n, objects in enumerate(runs) if objects.name not in absent), default=0)
    start = last - last % TOGETHER
    for objects in runs[start : start + 2 * TOGETHER]:
        if objects.name not in absent:
            obj = run.cluster.get(run.kind, objects.name)
            if obj is not None and (objects.companions or objects.payload):
                complete(run.cluster, objects, obj)
        elif settled:
            withdraw(run.cluster, objects)


def run_in_cluster(
    uri: str, *, api_client: Any = None, environ: Mapping[str, str] = os.environ
) -> KubernetesRun:
    """Return the handle of a run in the current context's cluster that any client has submitted.

    The URI is `k8s://NAMESPACE/NAME`.

    Raises:
        RunNotFound: the cluster has no such object, or one that nothing of ours has rendered.
        LauncherError: the cluster cannot be queried.
    """
    match = OBJECT_URI.fullmatch(uri)
    assert match is not None, uri
    namespace, name = match["namespace"], match["name"]
    profile = KubernetesProfile(name="current", namespace=namespace)
    cluster = Cluster(Connection(profile, api_client=api_client, environ=environ))
    denied: list[LauncherError] = []
    for workload, kind in KINDS.items():
        try:
            obj = cluster.get(kind, name)
        except NotServed:
            continue
        except Denied as error:
            denied.append(error)
            continue
        if obj is None:
            continue
        if label_of(obj, RUN_LABEL) != name:
            raise RunNotFound(
                f"{uri}: this {workload} has no label {RUN_LABEL}; only what this toolkit has "
                "rendered can be asked about"
            )
        profile_facts = {"workload": workload, "context": cluster.connection.context}
        record = RunRecord(
            uri=uri,
            name=name,
            job=label_of(obj, "app.kubernetes.io/name") or name,
            profile=profile.model_copy(update=profile_facts).model_dump(mode="json"),
            created=seconds_of(obj["metadata"].get("creationTimestamp")),
        )
        return KubernetesRun(record, cluster, kind, environ)
    if denied:
        raise denied[0]
    raise RunNotFound(
        f"no run {uri!r}: nothing of this name was submitted from here, and namespace "
        f"{namespace!r} has no {', '.join(KINDS)} called {name!r}"
    )
