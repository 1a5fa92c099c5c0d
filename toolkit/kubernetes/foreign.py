"""Runs that were not submitted from here: by `kubectl apply`, or by another user."""

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from toolkit.errors import LauncherError, RunNotFound
from toolkit.kubernetes.client.connection import Connection, Denied, NotServed
from toolkit.kubernetes.client.resources import Cluster
from toolkit.kubernetes.run import KubernetesRun
from toolkit.kubernetes.workloads import KINDS, Object
from toolkit.planning.pods import RUN_LABEL
from toolkit.profile import KubernetesProfile
from toolkit.runs.registry import RunRecord

__all__ = ["is_uri", "run_in_cluster"]

_URI = re.compile(
    r"k8s://(?P<namespace>[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)/(?P<name>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)"
)


def is_uri(name: str) -> bool:
    """Whether a name is the URI of a run in a namespace."""
    return _URI.fullmatch(name) is not None


def run_in_cluster(
    uri: str, *, api_client: Any = None, environ: Mapping[str, str] = os.environ
) -> KubernetesRun:
    """Return the handle of a run in the current context's cluster that any client has submitted.

    Args:
        uri: `k8s://NAMESPACE/NAME`.
        api_client: A `kubernetes.client.ApiClient`; by kubeconfig or in the cluster without.
        environ: Where KUBECONFIG is looked for.

    Raises:
        RunNotFound: the cluster has no such object, or one that nothing of ours has rendered.
        LauncherError: the cluster cannot be queried.
    """
    match = _URI.fullmatch(uri)
    assert match is not None, uri
    namespace, name = match["namespace"], match["name"]
    profile = KubernetesProfile(name="current", namespace=namespace)
    cluster = Cluster(Connection(profile, api_client=api_client, environ=environ))
    hidden: list[LauncherError] = []
    for workload, kind in KINDS.items():
        try:
            obj = cluster.get(kind, name)
        except NotServed:
            continue
        except Denied as error:
            hidden.append(error)
            continue
        if obj is None:
            continue
        labels = obj["metadata"].get("labels") or {}
        if labels.get(RUN_LABEL) != name:
            raise RunNotFound(
                f"{uri}: this {workload} has no label {RUN_LABEL}; only what this toolkit has "
                "rendered can be asked about"
            )
        profile_facts = {"workload": workload, "context": cluster.connection.context}
        record = RunRecord(
            uri=uri,
            name=name,
            job=str(labels.get("app.kubernetes.io/name", name)),
            profile=profile.model_copy(update=profile_facts).model_dump(mode="json"),
            created=_created(obj),
        )
        return KubernetesRun(record, cluster, kind, environ)
    if hidden:
        raise hidden[0]
    raise RunNotFound(
        f"no run {uri!r}: nothing of this name was submitted from here, and namespace "
        f"{namespace!r} has no {', '.join(KINDS)} called {name!r}"
    )


def _created(obj: Object) -> float:
    try:
        return datetime.fromisoformat(str(obj["metadata"].get("creationTimestamp"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0
