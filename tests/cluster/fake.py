"""The whole cluster, and the test's hands in it."""

import contextlib
import copy
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import indexed, jobsets, kueue, pytorchjobs, trainjobs
from tests.cluster.kubelet import POD, Kubelet, container_status, set_condition
from tests.cluster.resources import OPERATORS, WORKLOADS, Resource, of_kind
from tests.cluster.store import Key, controller_of
from tests.cluster.wire import Fault, Object, Request, Server

__all__ = ["FakeKubernetes"]

RUN_LABEL = "torch-deploy-toolkit/run"
_NAMES = (
    pytorchjobs.JOB_LABEL,
    jobsets.NAME_LABEL,
    "batch.kubernetes.io/job-name",
    RUN_LABEL,
)
"""Labels by which pods name what they belong to."""

_TERMINAL = {
    "PyTorchJob": ("Succeeded", "Failed"),
    "TrainJob": ("Complete", "Failed"),
    "JobSet": ("Completed", "Failed"),
    "Job": ("Complete", "Failed"),
}
_RECONCILE: Mapping[str, Callable[[Kubelet, Object], None]] = {
    "PyTorchJob": pytorchjobs.reconcile,
    "TrainJob": trainjobs.reconcile,
    "JobSet": jobsets.reconcile,
    "Job": indexed.reconcile,
}


class FakeKubernetes(Kubelet):
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

    def __enter__(self) -> "FakeKubernetes":
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

    # What a test asks.

    def object(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """Return a copy of an object."""
        with self.changed:
            return copy.deepcopy(self._live(of_kind(kind), name, namespace))

    def objects_of(self, kind: str) -> list[Object]:
        """Return copies of all objects of a kind."""
        with self.changed:
            return copy.deepcopy(self.all(of_kind(kind)))

    def job(self, name: str, namespace: str = "default", *, kind: str | None = None) -> Object:
        """Return a copy of a workload."""
        with self.changed:
            return copy.deepcopy(self._workload(name, kind, namespace)[1])

    def jobs(self, kind: str = "PyTorchJob") -> list[str]:
        """Return the names of all workloads of a kind, oldest first."""
        with self.changed:
            return [name for _, name in self.things[of_kind(kind)]]

    def pods(self, name: str) -> list[Object]:
        """Return copies of a workload's pods, by name."""
        with self.changed:
            return copy.deepcopy(self._pods_of(name))

    # What a test does.

    def create(self, body: Object, *, namespace: str | None = None) -> Object:
        """Make an object as another client would.

        Raises:
            Refusal: as the API server refuses.
        """
        resource = of_kind(body["kind"], body["apiVersion"])
        space = namespace or body["metadata"].get("namespace") or self.namespaces[0]
        with self.changed:
            request = Request(method="POST", path="", query={"fieldValidation": "Strict"})
            request.body = body
            made = self._create(resource, space if resource.namespaced else "", request)
            self.settle()
            return copy.deepcopy(made)

    def apply(self, text: str, *, manager: str = "kubectl") -> list[Object]:
        """Apply the documents of a manifest on the server's side, as kubectl does."""
        made = []
        for body in filter(None, yaml.safe_load_all(text)):
            resource = of_kind(body["kind"], body["apiVersion"])
            space = body["metadata"].get("namespace") or self.namespaces[0]
            query = {"fieldManager": manager, "fieldValidation": "Strict"}
            request = Request(method="PATCH", path="", query=query, body=body)
            with self.changed:
                where = space if resource.namespaced else ""
                _, answer = self._apply(resource, where, body["metadata"]["name"], request, None)
                self.settle()
                made.append(copy.deepcopy(answer))
        return made

    def patch(self, kind: str, name: str, change: Object, *, manager: str = "somebody") -> Object:
        """Merge a change into an object, as another client would."""
        resource = of_kind(kind)
        with self.changed:
            space = self._live(resource, name, None)["metadata"].get("namespace", "")
            request = Request(method="PATCH", path="", query={"fieldManager": manager}, body=change)
            request.content_type = "application/merge-patch+json"
            _, answer = self._patch(resource, space, name, request, None)
            self.settle()
            return copy.deepcopy(answer)

    def restrict(self, *namespaces: str, level: str = "restricted") -> None:
        """Let Pod Security enforce a level in namespaces; in all where none is named."""
        with self.changed:
            for name in namespaces or self.namespaces:
                space = self.get(of_kind("Namespace"), "", name)
                space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = level
                self.put(of_kind("Namespace"), space)

    def run(self, name: str, *, kind: str | None = None) -> None:
        """Let all pods of a workload run."""
        with self.changed:
            resource, thing = self._workload(name, kind)
            for pod in self._pods_of(name):
                if "running" not in container_status(pod)["state"]:
                    self.start_container(pod)
            if resource.kind == "PyTorchJob":
                pytorchjobs.say(thing, "Running", message=f"PyTorchJob {name} is running.")
                self.put(resource, thing)
            self._count(name)
            self.settle()

    def log(self, pod_name: str, *lines: str) -> None:
        """Let the container of a pod print lines."""
        with self.changed:
            pod = self._live(POD, pod_name, None)
            self.print_lines(container_status(pod)["containerID"], *lines)

    def finish(
        self,
        name: str,
        *,
        succeeded: bool = True,
        message: str = "",
        reason: str = "",
        exit_code: int = 1,
        last_words: str = "",
        kind: str | None = None,
        why: str = "",
    ) -> None:
        """Let the containers of a workload end, and it with them.

        Args:
            name: The workload's.
            succeeded: How.
            message: What the workload's condition says.
            reason: Why the containers ended, like OOMKilled.
            exit_code: Theirs, where they failed.
            last_words: What they said last.
            kind: The workload's, where two have this name.
            why: The reason of the workload's condition, like DeadlineExceeded.
        """
        with self.changed:
            resource, _ = self._workload(name, kind)
            for pod in self._pods_of(name):
                if not container_status(pod).get("containerID"):
                    self.start_container(pod)
                code = 0 if succeeded else exit_code
                self.end_container(pod, code, reason=reason, message=last_words)
                pod["status"]["phase"] = "Succeeded" if succeeded else "Failed"
                self.put(POD, pod)
            for kind_ in WORKLOADS[WORKLOADS.index(resource.kind) :]:
                type_ = _TERMINAL[kind_][0 if succeeded else 1]
                for thing in self._family(name, kind_):
                    words = message or f"{kind_} {name} has {type_.lower()}."
                    self._say(of_kind(kind_), thing, type_, why, words)
            self._count(name)
            self.settle()

    def restart(self, pod_name: str, *, reason: str = "Error", exit_code: int = 1) -> None:
        """Let a pod's container end and start again in place."""
        with self.changed:
            pod = self._live(POD, pod_name, None)
            self.end_container(pod, exit_code, reason=reason)
            status = container_status(pod)
            status["lastState"], status["state"] = status["state"], {}
            status["restartCount"] += 1
            self.start_container(pod)
            self.settle()

    def recreate(self, name: str) -> None:
        """Let all pods of a workload be made anew, as a gang restart does."""
        with self.changed:
            found = self._family(name, "JobSet")
            if found:
                jobsets.restart(self, found[0])
            else:
                for pod in self._pods_of(name):
                    self.end_pod(pod, 0)
            self.settle()

    def stopped(self, name: str) -> None:
        """Let the pods of a deleted workload be gone, with `hold_deletes`."""
        with self.changed:
            for pod in self._pods_of(name):
                self.remove_pod(pod)
            self.settle()

    def delete(self, name: str, namespace: str = "default", *, kind: str | None = None) -> None:
        """Delete a workload, or another object where its kind is named, as another would."""
        with self.changed:
            if kind is not None and kind not in WORKLOADS:
                resource = of_kind(kind)
                thing = self._live(resource, name, namespace)
            else:
                resource, thing = self._workload(name, kind, namespace)
            self.remove(resource, thing)
            self.settle()

    def condition(
        self, name: str, type_: str, *, reason: str = "", message: str = "", kind: str | None = None
    ) -> None:
        """Make a condition of a workload true."""
        with self.changed:
            resource, thing = self._workload(name, kind)
            self._say(resource, thing, type_, reason, message)
            self.settle()

    def status(self, name: str, *, kind: str | None = None, **status: Any) -> None:
        """Replace parts of a workload's status."""
        with self.changed:
            resource, thing = self._workload(name, kind)
            thing.setdefault("status", {}).update(status)
            self.put(resource, thing)
            self.settle()

    def pod_status(self, pod_name: str, **status: Any) -> None:
        """Replace parts of a pod's status; `waiting` is a container's reason and message."""
        with self.changed:
            pod = self._live(POD, pod_name, None)
            if (waiting := status.pop("waiting", None)) is not None:
                container_status(pod)["state"] = {"waiting": waiting}
            pod["status"].update(status)
            self.put(POD, pod)
            self.settle()

    def evict(self, pod_name: str, *, reason: str = "EvictionByEvictionAPI") -> None:
        """Take a pod from its node; with auto_run its container gets its grace."""
        with self.changed:
            self.disrupt(self._live(POD, pod_name, None), reason)
            self.settle()

    def kill(self, pod_name: str) -> None:
        """Kill all processes of a pod's container, with auto_run."""
        with self.changed:
            self.kill_container(self._live(POD, pod_name, None))

    def oom(self, pod_name: str) -> None:
        """Kill a pod's ranks as the kernel does where memory is short, with auto_run."""
        with self.changed:
            self.kill_for_memory(self._live(POD, pod_name, None))

    # Kueue.

    def workload(self, name: str) -> Object:
        """Return a copy of the Workload of Kueue for a workload of this name."""
        with self.changed:
            return copy.deepcopy(self._queued_as(name)[2])

    def admit(self, name: str) -> None:
        """Let Kueue admit a workload."""
        with self.changed:
            kueue.admit(self, *self._queued_as(name))
            self.settle()

    def queue_says(self, name: str, reason: str, message: str) -> None:
        """Let Kueue say why a workload waits."""
        with self.changed:
            kueue.said(self, self._queued_as(name)[2], reason, message)
            self.settle()

    def preempt(self, name: str) -> None:
        """Let Kueue take the quota of a workload away."""
        with self.changed:
            kueue.preempt(self, *self._queued_as(name))
            self.settle()

    def _queued_as(self, name: str) -> tuple[Resource, Object, Object]:
        resource, thing = self._workload(name, None)
        for key in self.owned(thing["metadata"]["uid"]):
            if key.resource is kueue.WORKLOAD:
                return resource, thing, self.get(*key)
        raise LookupError(f"Kueue has no Workload for {name}")

    # Controllers.

    def prepare(self, resource: Resource, body: Object) -> None:
        """Hold what has to wait in a queue."""
        if kueue.is_held(self._queued, body):
            kueue.suspend(body)

    def look(self, key: Key) -> None:
        """Let the controller of an object act on what it has become."""
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

    def _count(self, name: str) -> None:
        """Count pods where no controller runs: JobSets and TrainJobs have no other sign."""
        for job in self._family(name, "Job"):
            pods = [p for p in self._pods_of(name) if _owner(p) == job["metadata"]["uid"]]
            phases = [pod["status"]["phase"] for pod in pods]
            job.setdefault("status", {}).update(
                active=sum(phase in ("Pending", "Running") for phase in phases),
                ready=phases.count("Running"),
                succeeded=phases.count("Succeeded"),
                failed=phases.count("Failed"),
            )
            self.put(indexed.JOB, job)
        for jobset in self._family(name, "JobSet"):
            jobs = [j for j in self._family(name, "Job")]
            jobsets._count(self, jobset, jobs)
            for trainjob in self._family(name, "TrainJob"):
                status = trainjob.setdefault("status", {})
                status["jobsStatus"] = copy.deepcopy(jobset["status"]["replicatedJobsStatus"])
                self.put(trainjobs.TRAINJOB, trainjob)

    # Finding.

    def _say(self, resource: Resource, thing: Object, type_: str, reason: str, words: str) -> None:
        if resource.kind == "PyTorchJob":
            pytorchjobs.say(thing, type_, reason=reason, message=words)
        else:
            set_condition(thing, type_, reason=reason or type_, message=words)
        self.put(resource, thing)

    def _live(self, resource: Resource, name: str, namespace: str | None) -> Object:
        for (space, name_), thing in self.things[resource].items():
            if name_ == name and (namespace in (None, space) or not resource.namespaced):
                return thing
        raise LookupError(f"no {resource.kind} {name}")

    def _workload(
        self, name: str, kind: str | None, namespace: str | None = None
    ) -> tuple[Resource, Object]:
        for one in (kind,) if kind else WORKLOADS:
            with contextlib.suppress(LookupError):
                return of_kind(one), self._live(of_kind(one), name, namespace)
        raise LookupError(f"no workload {name}")

    def _family(self, name: str, kind: str) -> list[Object]:
        """Return the workloads of a kind that are, or belong to, what has a name."""
        found = []
        for thing in self.all(of_kind(kind)):
            root: Object | None = thing
            while root is not None and root["metadata"]["name"] != name:
                owner = controller_of(root)
                key = self._uids.get(owner["uid"]) if owner else None
                root = self.find(*key) if key else None
            if root is not None:
                found.append(thing)
        return found

    def _pods_of(self, name: str) -> list[Object]:
        return [
            pod
            for pod in self.all(POD)
            if name in [(pod["metadata"].get("labels") or {}).get(label) for label in _NAMES]
        ]


def _kueue_kinds(kueue_: bool | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(kueue_, tuple):
        return kueue_
    return kueue.DEFAULT_KINDS if kueue_ else ()


def _owner(pod: Object) -> str | None:
    owner = controller_of(pod)
    return owner["uid"] if owner else None
