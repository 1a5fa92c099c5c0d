"""The definitions of a cluster's kinds: their CustomResourceDefinitions, read and not changed."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.kubernetes.client.connection import Connection, Denied, Missing, NotServed
from toolkit.kubernetes.workloads import Object, Place, plural_of
from toolkit.profile import KubernetesProfile

__all__ = ["definitions"]


def definitions(
    documents: Iterable[Object],
    profile: KubernetesProfile,
    *,
    api_client: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Object]:
    """Return the definitions of the kinds of objects, as far as the cluster shows them.

    A kind that is Kubernetes' own has none; reading them may be denied.

    Raises:
        SchedulerMissing: no cluster, or none that answers.
    """
    connection = Connection(profile, api_client=api_client, environ=environ)
    place = Place(
        api_version="apiextensions.k8s.io/v1",
        plural="customresourcedefinitions",
        kind="CustomResourceDefinition",
    )
    groups = {(str(d["apiVersion"]).rpartition("/")[0], str(d["kind"])) for d in documents}
    names = (f"{plural_of(kind)}.{group}" for group, kind in groups if _is_custom(group))
    objects: list[Object] = []
    for name in sorted(names):
        with contextlib.suppress(Missing, NotServed, Denied):
            objects.append(connection.ask("GET", place.path("", name)))
    return objects


def _is_custom(group: str) -> bool:
    """Whether an API group is not Kubernetes' own: those are a word, or NAME.k8s.io."""
    return "." in group and (not group.endswith(".k8s.io") or group.endswith(".x-k8s.io"))
