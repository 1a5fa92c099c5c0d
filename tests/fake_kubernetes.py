"""A Kubernetes API server with the Training Operator, in this process and on the standard library.

`with FakeKubernetes() as server:` serves HTTP; `server.api_client()` is a client for it. What the
cluster would do by itself is done by the test: `server.run(name)`, `server.log(pod, "line")`,
`server.finish(name)`. With `auto_run=True` pods run their container's command as processes here.
"""

import copy
import itertools
import json
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests.fake_http import Answer, Fault, Object, Query, Refusal, Server, status_object
from tests.fake_operator import JOB_LABEL, FakeOperator, container_status

__all__ = ["FakeKubernetes", "Fault"]

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "pytorchjob.schema.json").read_text())
DNS_1035 = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")
WEBHOOK = (
    'admission webhook "validator.pytorchjob.training-operator.kubeflow.org" denied the request'
)


class FakeKubernetes(FakeOperator):
    """One cluster with its namespaces; thread-safe."""

    def __init__(
        self,
        *,
        namespaces: tuple[str, ...] = ("default",),
        operator: bool = True,
        auto_run: bool = False,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        super().__init__(auto_run=auto_run, secrets=secrets or {})
        self.namespaces = namespaces
        self.operator = operator
        self.refuse_pods: str | None = None
        """Why no pods can be made, as by Pod Security; None lets them be made."""
        self.cut_logs: list[int] = []
        """For each of the next log requests: after how many lines the connection breaks."""
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, Query]] = []
        """Every request so far: method, path, query."""
        self._clients: list[Any] = []

    # Serving.

    def __enter__(self) -> "FakeKubernetes":
        self._folder = tempfile.TemporaryDirectory(prefix="fake-kubernetes-")
        self.root = Path(self._folder.name)
        self._http = Server(self)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._serving = threading.Thread(target=self._http.serve_forever, args=[0.02])
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        with self.changed:
            self._closing = True
            self.changed.notify_all()
            containers = list(self._containers.values())
        for container in containers:
            container.kill()
        for thread in self._threads:
            thread.join()
        self._http.shutdown()
        self._http.hang_up()
        self._serving.join()
        self._http.server_close()
        self._folder.cleanup()

    def api_client(self) -> Any:
        """Return a client for this server; it is closed with the server."""
        from kubernetes import client

        made = client.ApiClient(client.Configuration(host=self.url))
        self._clients.append(made)
        return made

    def kubeconfig(self, path: Path, *, context: str = "fake") -> Path:
        """Write a kubeconfig for this server."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "contexts": [{"name": context, "context": {"cluster": "fake", "user": "fake"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": "fake"}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    # What a test asks and does.

    def job(self, name: str, namespace: str = "default") -> Object:
        """Return a copy of a PyTorchJob."""
        with self.changed:
            return copy.deepcopy(self.objects["pytorchjobs", namespace, name])

    def jobs(self) -> list[str]:
        """Return the names of all PyTorchJobs."""
        with self.changed:
            return [name for kind, _, name in self.objects if kind == "pytorchjobs"]

    def pods(self, job_name: str) -> list[Object]:
        """Return copies of a job's pods."""
        with self.changed:
            return [
                copy.deepcopy(pod)
                for (kind, _, _), pod in self.objects.items()
                if kind == "pods" and pod["metadata"]["labels"].get(JOB_LABEL) == job_name
            ]

    def run(self, name: str) -> None:
        """Let all pods of a job run."""
        with self.changed:
            for pod in self._pods_of(name):
                self._start_container(pod)
            self.condition(name, "Running", message=f"PyTorchJob {name} is running.")

    def log(self, pod_name: str, *lines: str) -> None:
        """Let the container of a pod print lines."""
        with self.changed:
            pod = self._find("pods", pod_name)
            self._print(container_status(pod)["containerID"], *lines)

    def finish(
        self,
        name: str,
        *,
        succeeded: bool = True,
        message: str = "",
        reason: str = "",
        exit_code: int = 1,
        last_words: str = "",
    ) -> None:
        """Let the containers of a job end, and the job with them."""
        with self.changed:
            for pod in self._pods_of(name):
                if not container_status(pod).get("containerID"):
                    self._start_container(pod)
                code = 0 if succeeded else exit_code
                self._end_container(pod, code, reason=reason, message=last_words)
                pod["status"]["phase"] = "Succeeded" if succeeded else "Failed"
                self._put("pods", pod, "MODIFIED")
            kind = "Succeeded" if succeeded else "Failed"
            self.condition(name, kind, message=message or f"PyTorchJob {name} has {kind.lower()}.")

    def restart(self, pod_name: str, *, reason: str = "Error", exit_code: int = 1) -> None:
        """Let a pod's container end and start again in place."""
        with self.changed:
            pod = self._find("pods", pod_name)
            self._end_container(pod, exit_code, reason=reason)
            status = container_status(pod)
            status["lastState"], status["state"] = status["state"], {}
            status["restartCount"] += 1
            self._start_container(pod)

    def stopped(self, name: str) -> None:
        """Let the pods of a deleted job be gone, with `hold_deletes`."""
        with self.changed:
            for pod in self._pods_of(name):
                self._remove_pod(pod)
            self._collect(name)

    def delete(self, name: str, namespace: str = "default") -> None:
        """Delete a job as another person would."""
        with self.changed:
            self._delete_job(namespace, name, {})

    def expire(self) -> None:
        """Forget the past: a watch from before gets 410 Expired."""
        with self.changed:
            self._journal.clear()
            self._oldest = next(self._version)

    # The API.

    def answer(self, method: str, path: str, query: Query, body: Any) -> Answer:
        """Answer a request; a stream of bytes for watches and followed logs."""
        try:
            with self.changed:
                status, answer = self._route(method, path, query, body)
                return status, answer if isinstance(answer, Iterator) else copy.deepcopy(answer)
        except Refusal as refusal:
            return refusal.answer

    def _route(self, method: str, path: str, query: Query, body: Any) -> Answer:
        match = re.fullmatch(
            r"/(?:api/v1|apis/(?P<group>[^/]+)/v1)/namespaces/(?P<namespace>[^/]+)"
            r"/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?",
            path,
        )
        group, kind = (match["group"], match["kind"]) if match else (None, "")
        served = {None: ("pods", "events")} | (
            {"kubeflow.org": ("pytorchjobs",)} if self.operator else {}
        )
        if match is None or kind not in served.get(group, ()):
            return 404, "404 page not found\n"
        namespace, name = match["namespace"], match["name"]
        if method == "POST" and kind == "pytorchjobs" and name is None:
            return 201, self._create_job(namespace, body, query)
        if method == "GET" and match["log"]:
            return self._log_answer(namespace, name, query)
        if method == "GET" and name is not None:
            return 200, self._get(kind, namespace, name)
        if method == "GET":
            if _is_on(query, "watch"):
                return 200, self._watch(kind, namespace, query)
            found = [o for o in self._all(kind, namespace) if _selected(o, query)]
            version = str(max((v for v, *_ in self._journal), default=self._oldest))
            return 200, {"kind": "List", "metadata": {"resourceVersion": version}, "items": found}
        if method == "PUT" and kind == "pytorchjobs":
            return 200, self._replace(namespace, name, body)
        if method == "DELETE" and kind == "pytorchjobs":
            return 200, self._delete_job(namespace, name, body or {})
        if method == "DELETE" and kind == "pods":
            self._delete_pod(self._get(kind, namespace, name))
            return 200, status_object(200, "", "", word="Success")
        return 405, status_object(405, "MethodNotAllowed", "the server does not allow this method")

    def _create_job(self, namespace: str, body: Object, query: Query) -> Object:
        name = body.get("metadata", {}).get("name", "")
        if namespace not in self.namespaces:
            raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
        if body["metadata"].get("namespace", namespace) != namespace:
            words = "the namespace of the provided object does not match the namespace sent"
            raise Refusal(400, "BadRequest", words)
        self._validate(body, strict=query.get("fieldValidation") == "Strict")
        if len(name) > 63 or not DNS_1035.fullmatch(name):
            words = f'{WEBHOOK}: metadata.name: Invalid value: "{name}": a DNS-1035 label is wanted'
            raise Refusal(403, "Forbidden", words)
        for replicas in body["spec"]["pytorchReplicaSpecs"].values():
            names = [c["name"] for c in replicas["template"]["spec"]["containers"]]
            if "pytorch" not in names:
                raise Refusal(403, "Forbidden", f"{WEBHOOK}: no container named pytorch")
        if ("pytorchjobs", namespace, name) in self.objects:
            words = f'pytorchjobs.kubeflow.org "{name}" already exists'
            raise Refusal(409, "AlreadyExists", words)
        job = copy.deepcopy(body)
        job["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": self._now()}
        job["metadata"]["namespace"] = namespace
        self._put("pytorchjobs", job, "ADDED")
        if self.refuse_pods is not None:
            self.warn(name, "FailedCreatePod", self.refuse_pods, namespace=namespace)
        else:
            self.condition(name, "Created", message=f"PyTorchJob {name} is created.")
            for index in range(job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]):
                self._make_pod(job, index)
        return copy.deepcopy(self.objects["pytorchjobs", namespace, name])

    def _validate(self, body: Object, *, strict: bool) -> None:
        from kubernetes import client
        from pydantic import ValidationError

        for error in Draft202012Validator(SCHEMA).iter_errors(body):
            if error.validator != "additionalProperties":
                words = f"{error.json_path}: {error.message}"
                raise Refusal(422, "Invalid", f'PyTorchJob "?" is invalid: {words}')
            if strict:
                words = f"strict decoding error: {error.json_path}: {error.message}"
                raise Refusal(400, "BadRequest", words)
        for replicas in body["spec"]["pytorchReplicaSpecs"].values():
            try:
                if hasattr(client.V1PodTemplateSpec, "model_validate"):  # from client 37 on
                    client.V1PodTemplateSpec.model_validate(replicas["template"])
            except ValidationError as error:
                first = error.errors()[0]
                words = f"strict decoding error: {first['type']} at {first['loc']}"
                raise Refusal(400, "BadRequest", words) from None
            for container in replicas["template"]["spec"]["containers"]:
                _refuse_twins(container.get("env", ()), "name")
                _refuse_twins(container.get("volumeMounts", ()), "mountPath")

    def _replace(self, namespace: str, name: str, body: Object) -> Object:
        found = self._get("pytorchjobs", namespace, name)
        version = body["metadata"].get("resourceVersion", found["metadata"]["resourceVersion"])
        if version != found["metadata"]["resourceVersion"]:
            words = f'Operation cannot be fulfilled on pytorchjobs.kubeflow.org "{name}"'
            raise Refusal(409, "Conflict", f"{words}: the object has been modified")
        return self._put("pytorchjobs", copy.deepcopy(body), "MODIFIED")

    def _delete_job(self, namespace: str, name: str, options: Object) -> Object:
        job = self._get("pytorchjobs", namespace, name)
        for key, wanted in (options.get("preconditions") or {}).items():
            if wanted is not None and wanted != job["metadata"][key]:
                words = f"Precondition failed: {key} is {job['metadata'][key]}, not {wanted}"
                raise Refusal(409, "Conflict", words)
        foreground = options.get("propagationPolicy") == "Foreground"
        if foreground:
            job["metadata"] |= {
                "deletionTimestamp": self._now(),
                "finalizers": ["foregroundDeletion"],
            }
            self._put("pytorchjobs", job, "MODIFIED")
        else:
            self._drop("pytorchjobs", job)
        for pod in self._pods_of(name):
            self._delete_pod(pod)
        self._collect(name)
        return job if foreground else status_object(200, "", "", word="Success")

    def _watch(self, kind: str, namespace: str, query: Query) -> Iterator[bytes]:
        def events() -> Iterator[bytes]:
            since = int(query.get("resourceVersion") or 0)
            end = time.monotonic() + float(query.get("timeoutSeconds") or 300)
            while True:
                with self.changed:
                    if since < self._oldest:
                        gone = status_object(410, "Expired", f"too old resource version: {since}")
                        yield _line({"type": "ERROR", "object": gone})
                        return
                    new = [entry for entry in self._journal if entry[0] > since]
                    if not new:
                        if self._closing or not self.changed.wait(end - time.monotonic()):
                            return
                        continue
                for version, kind_, type_, thing in new:
                    since = version
                    inside = thing["metadata"]["namespace"] == namespace
                    if kind_ == kind and inside and _selected(thing, query):
                        yield _line({"type": type_, "object": thing})

        return events()

    def _log_answer(self, namespace: str, name: str, query: Query) -> Answer:
        status = container_status(self._get("pods", namespace, name))
        what = f'container "pytorch" in pod "{name}"'
        if _is_on(query, "previous"):
            identity = status["lastState"].get("terminated", {}).get("containerID")
            if identity is None:
                raise Refusal(400, "BadRequest", f"previous terminated {what} not found")
        elif (identity := status.get("containerID")) is None or "waiting" in status["state"]:
            reason = status["state"].get("waiting", {}).get("reason", "ContainerCreating")
            raise Refusal(400, "BadRequest", f"{what} is waiting to start: {reason}")
        log, stamped = self._logs[identity], _is_on(query, "timestamps")
        cut = self.cut_logs.pop(0) if self.cut_logs else None

        def lines() -> Iterator[bytes]:
            for index in itertools.count():
                if index == cut:
                    raise ConnectionAbortedError
                with self.changed:
                    while index >= len(log.lines):
                        if log.ended or not _is_on(query, "follow") or self._closing:
                            return
                        self.changed.wait()
                    stamp, text = log.lines[index]
                yield f"{stamp} {text}\n".encode() if stamped else f"{text}\n".encode()

        return 200, lines()


def _is_on(query: Query, key: str) -> bool:
    return query.get(key, "") in ("1", "t", "T", "true", "TRUE", "True")  # as Go's ParseBool


def _refuse_twins(entries: Sequence[Object], key: str) -> None:
    """Refuse a list whose entries are told by `key`, as the CRD says, where two have the same."""
    names = [entry[key] for entry in entries]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        words = f'Duplicate value: {{"{key}":"{twins[0]}"}}'
        raise Refusal(422, "Invalid", f'PyTorchJob.kubeflow.org "?" is invalid: {words}')


def _line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _selected(thing: Object, query: Query) -> bool:
    labels = thing["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.replace("==", "=").partition("=")
        if labels.get(key) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = term.replace("==", "=").partition("=")
        found: Any = thing
        for key in path.split("."):
            found = found.get(key, {})
        if found != value:
            return False
    return True
