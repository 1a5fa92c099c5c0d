"""The whole cluster, and the test's hands in it."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.fakes.kubernetes import indexed, jobsets, kueue, pytorchjobs, trainjobs
from tests.fakes.kubernetes.hands import Hands
from tests.fakes.kubernetes.kubelet import POD, Kubelet
from tests.fakes.kubernetes.resources import OPERATORS, Resource
from tests.fakes.kubernetes.store import Key
from tests.fakes.kubernetes.wire import Fault, Object, Server

__all__ = ["FakeKubernetes"]

_RECONCILE: Mapping[str, Callable[[Kubelet, Object], None]] = {
    "PyTorchJob": pytorchjobs.reconcile,
    "TrainJob": trainjobs.reconcile,
    "JobSet": jobsets.reconcile,
    "Job": indexed.reconcile,
}


class FakeKubernetes(Hands):
    """One cluster with its namespaces; thread-safe."""

    def __init__(
        self,
        *,
        namespaces: tuple[str, ...] = ("default",),
        operator: bool = True,
        without: Sequence[str] = (),
        auto_run: bool = False,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        restricted: bool = False,
        kueue: bool | tuple[str, ...] = False,
        back_off_s: float = 0.2,
        clean_after_s: float = 2.4,
        port: int = 0,
    ) -> None:
        missing = (*without, *(() if operator else OPERATORS))
        super().__init__(
            namespaces=namespaces,
            without=missing,
            auto_run=auto_run,
            secrets=secrets or {},
            back_off_s=back_off_s,
            clean_after_s=clean_after_s,
        )
        self.faults: list[Fault] = []
        self._queued = _kueue_kinds(kueue)
        self._clients: list[Any] = []
        self._port = port
        if restricted:
            self.restrict()

    # Serving.

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="fake-kubernetes-")
        self.root = Path(self._folder.name)
        self._serve(self._port)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self.close()
        self._stop_serving()
        self._folder.cleanup()

    def _serve(self, port: int) -> None:
        self._http = Server(self, port)
        self._serving = threading.Thread(target=self._http.serve_forever, args=[0.02])
        self._serving.start()

    def _stop_serving(self) -> None:
        self._http.shutdown()
        self._serving.join()
        self._http.socket.close()
        self._http.hang_up()
        if self.closing:
            self._http.server_close()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Refuse connections for a while, and drop those that are open."""
        port = int(self._http.server_address[1])
        self._stop_serving()
        try:
            yield
        finally:
            self._serve(port)

    def hang_up(self) -> None:
        """Drop all open connections."""
        self._http.hang_up()

    def expire(self) -> None:
        """Forget the past: watches and continued lists from before get 410 Expired."""
        with self.changed:
            self.forget()

    def api_client(self) -> Any:
        """Return a client for this server; it is closed with the server."""
        from kubernetes import client

        made = client.ApiClient(client.Configuration(host=self.url))
        self._clients.append(made)
        return made

    def kubeconfig(
        self,
        path: Path,
        *,
        context: str = "fake",
        contexts: Mapping[str, str | None] | None = None,
        token: str = "fake",
    ) -> Path:
        """Write a kubeconfig for this server; `contexts` are names and their namespaces."""
        named: list[Object] = []
        for name, namespace in (contexts or {context: None}).items():
            inner = {"cluster": "fake", "user": "fake"}
            named.append(
                {"name": name, "context": inner | ({"namespace": namespace} if namespace else {})}
            )
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "contexts": named,
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    # Controllers.

    def prepare(self, resource: Resource, body: Object, before: Object | None = None) -> None:
        """Suspend an object that has to wait in a queue; date the patches of a TrainJob."""
        if before is None and kueue.is_held(self._queued, body):
            kueue.suspend(body)
        if resource is trainjobs.TRAINJOB:
            trainjobs.date_patches(body, before)

    def look(self, key: Key) -> None:
        """Let the controller of an object act on the object's new state."""
        for workload in self.all(kueue.WORKLOAD) if key.resource in (POD, kueue.WORKLOAD) else ():
            (owner,) = workload["metadata"]["ownerReferences"]
            if not self._pods_of(owner["name"]):
                kueue.requeue(self, workload)
        if (thing := self.find(*key)) is None or self.closing:
            return
        resource = key.resource
        if kueue.is_held(self._queued, thing):
            owned = self.owned(thing["metadata"]["uid"])
            if not any(one.resource is kueue.WORKLOAD for one in owned):
                kueue.hold(self, resource, thing)
        controller = _RECONCILE.get(resource.kind)
        if controller is not None and resource.group not in self.missing:
            controller(self, thing)

    def settle_pod(self, pod: Object) -> None:
        """Count how a pod ended before it is gone."""
        indexed.count(self, pod)
        pytorchjobs.count(self, pod)


def _kueue_kinds(kueue_: bool | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(kueue_, tuple):
        return kueue_
    return kueue.DEFAULT_KINDS if kueue_ else ()
