"""What lives in `FakeKubernetes`: its objects, the Training Operator, and the kubelet."""

import copy
import datetime
import functools
import itertools
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fake_http import Object, Refusal
from tests.fake_kubelet import Container

__all__ = ["JOB_LABEL", "FakeOperator", "container_status"]

JOB_LABEL = "training.kubeflow.org/job-name"

CLEAN_AFTER_S = 2.4
"""When the operator deletes the running pods of a job that has ended."""

BACK_OFF_S = 0.2
"""When a failed container starts again; a kubelet waits for ten seconds and more."""


@dataclass
class Log:
    """What one start of a container has printed."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False


class FakeOperator:
    """Objects with versions and a journal, and what the cluster does with them by itself."""

    root: Path
    """Where volumes lie: `claims/NAME`, or `pods/POD/VOLUME` for an emptyDir."""

    def __init__(self, *, auto_run: bool, secrets: Mapping[str, Mapping[str, str]]) -> None:
        self.auto_run = auto_run
        self.secrets = secrets
        self.hold_deletes = False
        """Whether pods of a deleted job stay until `stopped()`, as if they wrote a checkpoint."""
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.changed = threading.Condition(threading.RLock())
        self._journal: list[tuple[int, str, str, Object]] = []
        self._version = itertools.count(1001)
        self._oldest = 1000
        self._stamps = itertools.count(1)
        self._logs: dict[str, Log] = {}
        self._containers: dict[str, Container] = {}
        self._ports: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False

    def condition(self, name: str, kind: str, *, reason: str = "", message: str = "") -> None:
        """Make a condition of a job true, and false what contradicts it."""
        with self.changed:
            job = self._find("pytorchjobs", name)
            conditions = job.setdefault("status", {}).setdefault("conditions", [])
            for other in conditions:
                if other["type"] != "Created":
                    other["status"] = "False"
            conditions[:] = [other for other in conditions if other["type"] != kind]
            reason = reason or f"PyTorchJob{kind}"
            conditions.append(
                {"type": kind, "status": "True", "reason": reason, "message": message}
            )
            self._put("pytorchjobs", job, "MODIFIED")

    def pod_status(self, pod_name: str, **status: Any) -> None:
        """Replace parts of a pod's status; `waiting` is a container's reason and message."""
        with self.changed:
            pod = self._find("pods", pod_name)
            if (waiting := status.pop("waiting", None)) is not None:
                container_status(pod)["state"] = {"waiting": waiting}
            pod["status"].update(status)
            self._put("pods", pod, "MODIFIED")

    def warn(self, name: str, reason: str, message: str, *, namespace: str = "default") -> None:
        """Record a warning event about an object."""
        with self.changed:
            self._put(
                "events",
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {"name": f"{name}.{uuid.uuid4().hex[:12]}", "namespace": namespace},
                    "involvedObject": {"name": name, "namespace": namespace},
                    "type": "Warning",
                    "reason": reason,
                    "message": message,
                    "lastTimestamp": self._now(),
                },
                "ADDED",
            )

    # Objects. All of this is called with the lock held.

    def _get(self, kind: str, namespace: str, name: str) -> Object:
        if (found := self.objects.get((kind, namespace, name))) is None:
            plural = "pytorchjobs.kubeflow.org" if kind == "pytorchjobs" else kind
            raise Refusal(404, "NotFound", f'{plural} "{name}" not found')
        return found

    def _find(self, kind: str, name: str) -> Object:
        (found,) = (o for key, o in self.objects.items() if key[0] == kind and key[2] == name)
        return found

    def _all(self, kind: str, namespace: str) -> list[Object]:
        return [o for key, o in self.objects.items() if key[:2] == (kind, namespace)]

    def _pods_of(self, name: str) -> list[Object]:
        return [
            pod
            for key, pod in self.objects.items()
            if key[0] == "pods" and pod["metadata"]["labels"].get(JOB_LABEL) == name
        ]

    def _put(self, kind: str, thing: Object, type_: str) -> Object:
        metadata = thing["metadata"]
        version = next(self._version)
        metadata["resourceVersion"] = str(version)
        if type_ != "DELETED":
            self.objects[kind, metadata["namespace"], metadata["name"]] = thing
        self._journal.append((version, kind, type_, copy.deepcopy(thing)))
        self.changed.notify_all()
        return thing

    def _drop(self, kind: str, thing: Object) -> None:
        metadata = thing["metadata"]
        if self.objects.pop((kind, metadata["namespace"], metadata["name"]), None) is not None:
            self._put(kind, thing, "DELETED")

    def _now(self) -> str:
        """Return the time as the log of a container has it: no two alike, always growing."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{now}.{next(self._stamps):09}Z"

    # The operator.

    def _make_pod(self, job: Object, index: int) -> None:
        name, worker = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
        template, policy = copy.deepcopy(worker["template"]), job["spec"].get("elasticPolicy", {})
        if name not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[name] = probe.getsockname()[1]
        # All pods live on this machine, where NAME-worker-0:23456 means nothing.
        injected = {
            "PYTHONUNBUFFERED": "1",
            "PET_NPROC_PER_NODE": job["spec"].get("nprocPerNode", "auto"),
            "PET_RDZV_BACKEND": policy.get("rdzvBackend", "c10d"),
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{self._ports[name]}",
            "PET_RDZV_ID": policy.get("rdzvId", name),
            "PET_NNODES": f"{policy.get('minReplicas', 1)}:{policy.get('maxReplicas', 1)}",
            "PET_MAX_RESTARTS": str(policy.get("maxRestarts", 0)),
        }
        for container in template["spec"]["containers"]:
            container.setdefault("env", []).extend(
                {"name": key, "value": value} for key, value in injected.items()
            )
        template["spec"]["restartPolicy"] = worker.get("restartPolicy", "Never")
        labels = {
            **template.get("metadata", {}).get("labels", {}),
            JOB_LABEL: name,
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
            "training.kubeflow.org/replica-type": "worker",
            "training.kubeflow.org/replica-index": str(index),
        }
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-worker-{index}",
                "namespace": job["metadata"]["namespace"],
                "uid": str(uuid.uuid4()),
                "labels": labels,
                "ownerReferences": [
                    {
                        "apiVersion": "kubeflow.org/v1",
                        "kind": "PyTorchJob",
                        "name": name,
                        "uid": job["metadata"]["uid"],
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": template["spec"],
            "status": {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "True"}],
                "containerStatuses": [
                    {
                        "name": "pytorch",
                        "restartCount": 0,
                        "state": {"waiting": {"reason": "ContainerCreating"}},
                        "lastState": {},
                    }
                ],
            },
        }
        self._put("pods", pod, "ADDED")
        if self.auto_run:
            self._in_background(lambda: self._run_pod(pod))

    def _reconcile(self, name: str) -> None:
        """Set the job's conditions from its pods."""
        found = [o for key, o in self.objects.items() if key[0] == "pytorchjobs" and key[2] == name]
        if not found or "deletionTimestamp" in found[0]["metadata"]:
            return
        (job,), pods = found, self._pods_of(name)
        kinds = {c["type"] for c in job["status"]["conditions"] if c["status"] == "True"}
        if kinds & {"Succeeded", "Failed"}:
            return
        phases = {pod["status"]["phase"] for pod in pods}
        restarts = sum(container_status(pod)["restartCount"] for pod in pods)
        limit = job["spec"].get("runPolicy", {}).get("backoffLimit")
        if "Succeeded" in phases:
            self.condition(name, "Succeeded", message=f"PyTorchJob {name} successfully completed.")
        elif "Failed" in phases:
            self.condition(name, "Failed", message=f"PyTorchJob {name} is failed.")
        elif limit is not None and restarts >= max(1, limit):
            words = f"Job {name} has failed because it has reached the specified backoff limit"
            self.condition(name, "Failed", message=words)
        else:
            if "Running" in phases and "Running" not in kinds:
                self.condition(name, "Running", message=f"PyTorchJob {name} is running.")
            return
        self._in_background(lambda: self._clean_up(name))

    def _clean_up(self, name: str) -> None:
        """Delete the pods that run on after the job's end (cleanPodPolicy Running)."""
        end = time.monotonic() + CLEAN_AFTER_S
        with self.changed:
            while not self._closing and (left := end - time.monotonic()) > 0:
                self.changed.wait(left)
            for pod in self._pods_of(name):
                if pod["status"]["phase"] == "Running":
                    self._delete_pod(pod)

    def _collect(self, name: str) -> None:
        """Remove a job that waits for nothing but its pods to be gone."""
        for key, job in list(self.objects.items()):
            deleted = key[0] == "pytorchjobs" and "deletionTimestamp" in job["metadata"]
            if deleted and key[2] == name and not self._pods_of(name):
                self._drop("pytorchjobs", job)

    # The kubelet.

    def _start_container(self, pod: Object) -> str:
        identity = f"fake://{uuid.uuid4().hex}"
        self._logs[identity] = Log()
        container_status(pod).update(containerID=identity, state={"running": {}})
        pod["status"]["phase"] = "Running"
        self._put("pods", pod, "MODIFIED")
        return identity

    def _print(self, identity: str, *lines: str) -> None:
        with self.changed:
            self._logs[identity].lines += ((self._now(), line) for line in lines)
            self.changed.notify_all()

    def _end_container(
        self, pod: Object, code: int, *, reason: str = "", message: str = ""
    ) -> None:
        status = container_status(pod)
        log = self._logs[status["containerID"]]
        log.ended = True
        ended = {
            "containerID": status["containerID"],
            "exitCode": code,
            "reason": reason or ("Error" if code else "Completed"),
        }
        if code:  # terminationMessagePolicy FallbackToLogsOnError
            ended["message"] = (
                message or "".join(f"{text}\n" for _, text in log.lines[-80:])[-2048:]
            )
        status["state"] = {"terminated": ended}
        self._put("pods", pod, "MODIFIED")

    def _delete_pod(self, pod: Object) -> None:
        """Ask a pod to end; it is gone at once where nothing runs in it."""
        if "deletionTimestamp" in pod["metadata"]:
            return
        pod["metadata"]["deletionTimestamp"] = self._now()
        self._put("pods", pod, "MODIFIED")
        running = "running" in container_status(pod)["state"]
        if (container := self._containers.get(pod["metadata"]["uid"])) is not None:
            container.terminate(pod["spec"].get("terminationGracePeriodSeconds", 30))
        elif not (running and self.hold_deletes):
            self._remove_pod(pod)

    def _remove_pod(self, pod: Object) -> None:
        if pod not in self._all("pods", pod["metadata"]["namespace"]):
            return
        identity = container_status(pod).get("containerID")
        if identity is not None:
            self._logs[identity].ended = True
        self._drop("pods", pod)
        name = pod["metadata"]["labels"][JOB_LABEL]
        self._collect(name)
        self._replace_pod(pod, name)

    def _replace_pod(self, pod: Object, name: str) -> None:
        """Make a pod anew that was deleted while its job goes on."""
        job = self.objects.get(("pytorchjobs", pod["metadata"]["namespace"], name))
        if not self.auto_run or job is None or "deletionTimestamp" in job["metadata"]:
            return
        true = {c["type"] for c in job["status"]["conditions"] if c["status"] == "True"}
        if true & {"Succeeded", "Failed"}:
            return
        if pod["spec"]["restartPolicy"] == "Never":
            self.condition(name, "Failed", message=f"PyTorchJob {name} is failed: a pod is gone.")
            self._in_background(lambda: self._clean_up(name))
        else:
            index = pod["metadata"]["labels"]["training.kubeflow.org/replica-index"]
            self._make_pod(job, int(index))

    def _run_pod(self, pod: Object) -> None:
        """Run a pod's container as a process, again and again as its policy says."""
        while True:
            with self.changed:
                if self._closing or "deletionTimestamp" in pod["metadata"]:
                    self._remove_pod(pod)
                    return
                try:
                    container = Container(pod, root=self.root, secrets=self.secrets)
                except KeyError as missing:
                    words = f"couldn't find {missing.args[0]}"
                    waiting = {"reason": "CreateContainerConfigError", "message": words}
                    self.pod_status(pod["metadata"]["name"], waiting=waiting)
                    while not self._closing and "deletionTimestamp" not in pod["metadata"]:
                        self.changed.wait()
                    return
                identity = self._start_container(pod)
                self._containers[pod["metadata"]["uid"]] = container
                name = pod["metadata"]["labels"][JOB_LABEL]
                self._reconcile(name)
            code = container.run(functools.partial(self._print, identity))
            with self.changed:
                del self._containers[pod["metadata"]["uid"]]
                self._end_container(pod, code)
                if "deletionTimestamp" in pod["metadata"]:
                    self._remove_pod(pod)
                    return
                policy = pod["spec"]["restartPolicy"]
                if policy == "Never" or (policy == "OnFailure" and code == 0):
                    pod["status"]["phase"] = "Failed" if code else "Succeeded"
                    self._put("pods", pod, "MODIFIED")
                    self._reconcile(name)
                    return
                status = container_status(pod)
                waiting = {"reason": "CrashLoopBackOff", "message": "back-off restarting container"}
                status["lastState"], status["state"] = status["state"], {"waiting": waiting}
                status["restartCount"] += 1
                self._put("pods", pod, "MODIFIED")
                self._reconcile(name)
                end = time.monotonic() + BACK_OFF_S
                while not self._closing and (left := end - time.monotonic()) > 0:
                    self.changed.wait(left)

    def _in_background(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()


def container_status(pod: Object) -> Object:
    status: Object = pod["status"]["containerStatuses"][0]
    return status
