"""The cluster that tests run on: the fake one, or the real one of KUBECONFIG.

With KUBECONFIG set and TOOLKIT_TEST_CLUSTER=1, `cluster_under_test()` yields a real cluster behind
the few methods that tests need of both. CONTRIBUTING.md lists what the cluster needs.

The name and the label `app.kubernetes.io/name` of every object that tests make there begin with
`tag`, new for each session, so that `clean` finds all of them, and nothing else.

What only the fake can do is not here: faults, `expire()`, `run`/`finish`/`log`, statuses by hand,
clocks, `root`. Tests that need those take `FakeKubernetes` themselves.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from tests.fakes.kubernetes.fake import FakeKubernetes
from tests.fakes.kubernetes.resources import WORKLOADS, of_kind
from tests.fakes.kubernetes.wire import Object

__all__ = [
    "CLAIM",
    "ClusterUnderTest",
    "FakeCluster",
    "RealCluster",
    "cluster_under_test",
    "is_real",
]

MANAGER = "torch-deploy-toolkit-tests"
CLAIM = "runs"
RUNTIME = "torch-deploy-toolkit"

_NAME_LABEL = "app.kubernetes.io/name"
_LEFT = (*WORKLOADS, "Pod", "NetworkPolicy", "Service", "ConfigMap")
"""What may bear the tag: what makes others comes first."""

_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")

_PROBE = """\
exec 2>&1
command -v torchrun >/dev/null || { echo "the image has no torchrun"; exit 1; }
python3 -c 'import sys, importlib.util as i; sys.exit(i.find_spec("train") is None)' ||
  { echo "the image has no package train: make image"; exit 1; }
mkdir "$1" && rmdir "$1" || { echo "user 1000 cannot write to the claim"; exit 1; }
"""
"""Checks the image once; several lines, so that its paths stay as they are."""

_OPERATORS = {
    "PyTorchJob": "Kubeflow Training Operator is not installed",
    "TrainJob": "Kubeflow Trainer is not installed",
    "JobSet": "the JobSet controller is not installed",
    "Workload": "Kueue is not installed",
}


class ClusterUnderTest(Protocol):
    """The methods that both clusters have."""

    tag: str
    """What the names of all jobs in tests begin with."""

    patience_s: float
    """How long a test waits for something that must happen."""

    pause_s: float
    """How long between two looks."""

    @property
    def namespace(self) -> str: ...

    @property
    def image(self) -> str: ...

    def api_client(self) -> Any: ...

    def kubeconfig(self, path: Path) -> Path: ...

    def lacks(self, kind: str) -> str: ...

    def refuses_root(self) -> bool: ...

    def apply(self, text: str) -> list[Object]: ...

    def objects(self, kind: str) -> list[Object]: ...

    def job(self, name: str, namespace: str = ..., *, kind: str | None = ...) -> Object: ...

    def pods(self, name: str) -> list[Object]: ...

    def delete(self, name: str, namespace: str = ..., *, kind: str | None = ...) -> None: ...

    def evict(self, pod_name: str) -> None: ...

    def kill(self, pod_name: str) -> None: ...

    def read(self, path: str) -> str: ...


class FakeCluster(FakeKubernetes):
    """The fake, whose pods run as processes of this machine."""

    tag = "t"
    patience_s = 600.0
    pause_s = 0.05
    image = "localhost/train:1"

    @property
    def namespace(self) -> str:
        """Return the namespace of the tests."""
        return self.namespaces[0]

    def lacks(self, kind: str) -> str:
        """Return why a kind cannot be tested; empty where it can."""
        return "" if of_kind(kind).group not in self.missing else _OPERATORS[kind]

    def refuses_root(self) -> bool:
        """Whether Pod Security "restricted" holds in the namespace."""
        labels = self.object("Namespace", self.namespace)["metadata"]["labels"]
        return bool(labels.get("pod-security.kubernetes.io/enforce") == "restricted")

    def objects(self, kind: str) -> list[Object]:
        """Return the objects of a kind that tests have made."""
        return [one for one in self.objects_of(kind) if _tag_of(one) == self.tag]

    def read(self, path: str) -> str:
        """Return a file of the claim.

        Raises:
            FileNotFoundError: there is none.
        """
        return (self.root / "claims" / CLAIM / path).read_text()


class RealCluster:
    """A namespace of a real cluster.

    Raises:
        AssertionError: an environment that names no cluster.
    """

    patience_s = 900.0
    pause_s = 1.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        from kubernetes import client, config
        from kubernetes.dynamic import DynamicClient

        assert environ.get("KUBECONFIG"), "TOOLKIT_TEST_CLUSTER=1 takes a cluster: set KUBECONFIG"
        self._image = environ.get("TOOLKIT_TEST_IMAGE", "")
        self._unfit: str | None = None
        """Why the image or the claim cannot be used; None before the first check."""
        self._file = environ["KUBECONFIG"]
        self.namespace = environ.get("TOOLKIT_TEST_NAMESPACE", "training")
        letters = "".join(secrets.choice("bcdfghjklmnpqrstvwxz") for _ in range(5))
        self.tag = f"toolkit-test-{letters}"
        connect: Any = config.new_client_from_config  # the client has no type annotations
        self._client = connect(self._file)
        self._core: Any = client.CoreV1Api(self._client)
        self._dynamic: Any = DynamicClient(self._client)
        self._served: dict[str, bool] = {}
        self._applied: list[tuple[str, str]] = []
        self._readers = 0

    @property
    def image(self) -> str:
        """Return the image whose `train` is tested; without one the test is skipped."""
        if not self._image:
            pytest.skip("TOOLKIT_TEST_IMAGE names no image with torchrun and train")
        if self._unfit is None:
            self._unfit = self._look_into_image()
        assert not self._unfit, self._unfit
        return self._image

    def api_client(self) -> Any:
        """Return a client."""
        return self._client

    def kubeconfig(self, path: Path) -> Path:
        """Return the kubeconfig, which may be several files."""
        return Path(self._file)

    def lacks(self, kind: str) -> str:
        """Return why a kind cannot be tested; empty where it can."""
        from kubernetes.client import ApiException

        if not self._is_served(kind):
            return f"{_OPERATORS[kind]} on this cluster"
        if kind == "TrainJob":
            try:
                self._api("TrainingRuntime").get(name=RUNTIME, namespace=self.namespace)
            except ApiException as error:
                if error.status == 404:
                    how = f"kubectl apply -n {self.namespace} -k k8s/base/trainer"
                    return f"no TrainingRuntime {RUNTIME} here: {how}"
        return ""

    def refuses_root(self) -> bool:
        """Whether Pod Security "restricted" holds in the namespace, if that can be read."""
        from kubernetes.client import ApiException

        with contextlib.suppress(ApiException):
            labels = self._core.read_namespace(self.namespace).metadata.labels or {}
            return bool(labels.get("pod-security.kubernetes.io/enforce") == "restricted")
        return False

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
            self._applied.append((body["kind"], body["metadata"]["name"]))
            made.append(applied.to_dict())
        return made

    def objects(self, kind: str) -> list[Object]:
        """Return what this session's tests have made of a kind."""
        found = self._api(kind).get(
            namespace=self.namespace, label_selector=f"{_NAME_LABEL}={self.tag}"
        )
        return list(found.to_dict()["items"])

    def job(self, name: str, namespace: str = "", *, kind: str | None = None) -> Object:
        """Return a workload."""
        from kubernetes.client import ApiException
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        for one in (kind,) if kind else WORKLOADS:
            with contextlib.suppress(ApiException, ResourceNotFoundError):
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
        body = {"propagationPolicy": "Background"}  # without it, the pods of a Job would stay
        self._api(kind).delete(name=name, namespace=namespace or self.namespace, body=body)

    def evict(self, pod_name: str) -> None:
        """Evict a pod."""
        from kubernetes import client

        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=pod_name))
        self._core.create_namespaced_pod_eviction(pod_name, self.namespace, body)

    def kill(self, pod_name: str) -> None:
        """End a pod's container at once; a real one cannot be killed from outside but deleted."""
        self._core.delete_namespaced_pod(pod_name, self.namespace, grace_period_seconds=0)

    def read(self, path: str) -> str:
        """Return a file of the claim, as a pod prints it that mounts it.

        Raises:
            FileNotFoundError: there is none.
        """
        code, printed = self._run("cat", f"/runs/{path}")
        if code:
            raise FileNotFoundError(printed)
        return printed

    def clean(self) -> None:
        """Request the deletion of all objects that this session's tests have made so far."""
        from kubernetes.client import ApiException

        marked = [
            (kind, str(one["metadata"]["name"]))
            for kind in _LEFT
            if self._is_served(kind)
            for one in self.objects(kind)
            if not one["metadata"].get("deletionTimestamp")
        ]
        for kind, name in [*reversed(self._applied), *marked]:
            try:
                self.delete(name, kind=kind)
            except ApiException as error:  # some went with others
                if error.status != 404:
                    raise
        self._applied.clear()

    def close(self) -> None:
        """Delete the remaining objects, wait until they are gone, and delete the run directories.

        Raises:
            AssertionError: something does not go; its names.
        """
        try:
            self.clean()
            deadline = time.monotonic() + self.patience_s
            while left := self._left():
                assert time.monotonic() < deadline, f"left behind in {self.namespace}: {left}"
                time.sleep(self.pause_s)
            if self._unfit == "":
                code, said = self._run("sh", "-c", 'rm -rf "$1"*', "sh", f"/runs/{self.tag}")
                assert code == 0, f"run directories of {self.tag} are left on {CLAIM}: {said}"
        finally:
            self._client.close()

    def _left(self) -> list[str]:
        return [
            f"{kind}/{one['metadata']['name']}"
            for kind in _LEFT
            if self._is_served(kind)
            for one in self.objects(kind)
        ]

    def _look_into_image(self) -> str:
        """Return what an image or the claim lacks, before all tests wait for it."""
        try:
            code, said = self._run("sh", "-c", _PROBE, "sh", f"/runs/{self.tag}-probe")
        except AssertionError as error:
            return str(error)
        return said if code else ""

    def _run(self, *command: str) -> tuple[int, str]:
        """Run a command in a pod that mounts the claim; return its exit status and its output.

        Raises:
            AssertionError: the pod does not run; why.
        """
        self._readers += 1
        name = f"{self.tag}-reader-{self._readers}"
        body = _reader(name, self.tag, self._image, command)
        self._core.create_namespaced_pod(self.namespace, body)
        try:
            deadline = time.monotonic() + self.patience_s
            while True:
                status = self._core.read_namespaced_pod(name, self.namespace).status
                if status.phase in ("Succeeded", "Failed"):
                    break
                for one in status.container_statuses or ():
                    waiting = one.state.waiting
                    pulls = waiting is None or waiting.reason not in _NO_IMAGE
                    assert pulls, f"{self._image}: {waiting.reason}: {waiting.message}"
                assert time.monotonic() < deadline, f"pod {name} does not run: {status}"
                time.sleep(min(self.pause_s, 0.2))
            # As it came: the client would make Python of what looks like JSON.
            log = self._core.read_namespaced_pod_log(name, self.namespace, _preload_content=False)
            code: int = status.container_statuses[0].state.terminated.exit_code
            return code, log.data.decode()
        finally:
            self._core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    def _is_served(self, kind: str) -> bool:
        if kind not in self._served:  # each question of something unknown is a dozen
            api_version = of_kind(kind).api_version
            found = self._dynamic.resources.search(api_version=api_version, kind=kind)
            self._served[kind] = bool(found)
        return self._served[kind]

    def _api(self, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=of_kind(kind).api_version, kind=kind)


def _reader(name: str, tag: str, image: str, command: tuple[str, ...]) -> Object:
    """Return a pod that mounts the claim, and keeps to Pod Security "restricted"."""
    return {
        "metadata": {"name": name, "labels": {_NAME_LABEL: tag}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "reader",
                    "image": image,
                    "command": list(command),
                    "resources": {
                        "requests": {"cpu": "100m", "memory": "64Mi"},
                        "limits": {"cpu": "100m", "memory": "64Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
                }
            ],
            "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }


def _tag_of(thing: Object) -> str | None:
    tag: str | None = (thing["metadata"].get("labels") or {}).get(_NAME_LABEL)
    return tag


def is_real(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether tests are to run on a real cluster."""
    return environ.get("TOOLKIT_TEST_CLUSTER") == "1"


@contextlib.contextmanager
def cluster_under_test(
    *, environ: Mapping[str, str] = os.environ, **fake: Any
) -> Iterator[ClusterUnderTest]:
    """Yield the cluster that tests run on.

    Args:
        environ: Where KUBECONFIG and TOOLKIT_TEST_… are looked for.
        fake: Arguments of `FakeKubernetes`, where it is that one.
    """
    if is_real(environ):
        with contextlib.closing(RealCluster(environ)) as real:
            yield real
        return
    with FakeCluster(**fake) as server:
        yield server
