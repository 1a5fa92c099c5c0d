"""The cluster that tests run on: the fake one, or a real one that somebody lends.

With KUBECONFIG set and TOOLKIT_TEST_CLUSTER=1, `cluster_under_test()` yields a real cluster behind
the few methods that tests need of both. What it takes:

- a namespace of its own (TOOLKIT_TEST_NAMESPACE, `default` without), in which a claim `runs` can be
  written by all nodes and the user may do what k8s/base grants, and delete pods and evict them;
- an image with the toolkit's `train` (TOOLKIT_TEST_IMAGE) where jobs are to train;
- the operators of the kinds that are tested: `has(KIND)` asks for them.

What only the fake can do is not here: faults, `expire()`, `run`/`finish`/`log`, statuses by hand,
Pod Security of a namespace, `root`. Tests that need those take `FakeKubernetes` themselves.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.cluster.fake import FakeKubernetes
from tests.cluster.resources import WORKLOADS, of_kind
from tests.cluster.wire import Object

__all__ = ["ClusterUnderTest", "RealCluster", "cluster_under_test"]

MANAGER = "torch-deploy-toolkit-tests"


class ClusterUnderTest(Protocol):
    """What tests may ask of either cluster."""

    def api_client(self) -> Any: ...

    def kubeconfig(self, path: Path) -> Path: ...

    def apply(self, text: str) -> list[Object]: ...

    def job(self, name: str, namespace: str = ..., *, kind: str | None = ...) -> Object: ...

    def pods(self, name: str) -> list[Object]: ...

    def delete(self, name: str, namespace: str = ..., *, kind: str | None = ...) -> None: ...

    def evict(self, pod_name: str) -> None: ...

    def kill(self, pod_name: str) -> None: ...


class RealCluster:
    """A namespace of a real cluster."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        from kubernetes import config
        from kubernetes.dynamic import DynamicClient

        self._file = environ["KUBECONFIG"]
        self.namespace = environ.get("TOOLKIT_TEST_NAMESPACE", "default")
        connect: Any = config.new_client_from_config  # the client says nothing of its type
        self._client = connect(self._file)
        self._dynamic: Any = DynamicClient(self._client)  # type: ignore[no-untyped-call]
        self._made: list[tuple[str, str]] = []

    def api_client(self) -> Any:
        """Return a client."""
        return self._client

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig."""
        shutil.copy(self._file, path)
        return path

    def has(self, kind: str) -> bool:
        """Tell whether a kind is served."""
        resource = of_kind(kind)
        found = self._dynamic.resources.search(api_version=resource.api_version, kind=kind)
        return bool(found)

    def apply(self, text: str) -> list[Object]:
        """Apply the documents of a manifest on the server's side; `clean` deletes them again."""
        made = []
        for body in filter(None, yaml.safe_load_all(text)):
            applied = self._api(body["kind"]).server_side_apply(
                body=body,
                namespace=body["metadata"].get("namespace", self.namespace),
                field_manager=MANAGER,
                force_conflicts=True,
            )
            self._made.append((body["kind"], body["metadata"]["name"]))
            made.append(applied.to_dict())
        return made

    def job(self, name: str, namespace: str = "", *, kind: str | None = None) -> Object:
        """Return a workload."""
        from kubernetes.client import ApiException

        for one in (kind,) if kind else WORKLOADS:
            with contextlib.suppress(ApiException):
                found = self._api(one).get(name=name, namespace=namespace or self.namespace)
                return dict(found.to_dict())
        raise LookupError(f"no workload {name}")

    def pods(self, name: str) -> list[Object]:
        """Return a workload's pods, by name."""
        found = self._api("Pod").get(
            namespace=self.namespace, label_selector=f"torch-deploy-toolkit/run={name}"
        )
        return sorted(found.to_dict()["items"], key=lambda pod: str(pod["metadata"]["name"]))

    def delete(self, name: str, namespace: str = "", *, kind: str | None = None) -> None:
        """Delete a workload, or another object where its kind is named."""
        kind = kind or str(self.job(name, namespace)["kind"])
        self._api(kind).delete(name=name, namespace=namespace or self.namespace)

    def evict(self, pod_name: str) -> None:
        """Evict a pod."""
        from kubernetes import client

        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=pod_name))
        client.CoreV1Api(self._client).create_namespaced_pod_eviction(
            pod_name, self.namespace, body
        )

    def kill(self, pod_name: str) -> None:
        """End a pod's container at once; a real one cannot be killed from outside but deleted."""
        self._api("Pod").delete(
            name=pod_name, namespace=self.namespace, body={"gracePeriodSeconds": 0}
        )

    def clean(self) -> None:
        """Delete what was applied."""
        from kubernetes.client import ApiException

        for kind, name in reversed(self._made):
            with contextlib.suppress(ApiException):
                self._api(kind).delete(
                    name=name, namespace=self.namespace, body={"propagationPolicy": "Background"}
                )

    def _api(self, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=of_kind(kind).api_version, kind=kind)


@contextlib.contextmanager
def cluster_under_test(
    *, environ: Mapping[str, str] = os.environ, **fake: Any
) -> Iterator[ClusterUnderTest]:
    """Yield the cluster that tests run on.

    Args:
        environ: Where KUBECONFIG and TOOLKIT_TEST_CLUSTER are looked for.
        fake: Arguments of `FakeKubernetes`, where it is that one.
    """
    if environ.get("TOOLKIT_TEST_CLUSTER") == "1" and environ.get("KUBECONFIG"):
        real = RealCluster(environ)
        try:
            yield real
        finally:
            real.clean()
            real.api_client().close()
        return
    with FakeKubernetes(**fake) as server:
        yield server
