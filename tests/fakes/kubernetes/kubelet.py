"""Nodes: pods that are started, print, end, and are started again."""

import contextlib
import copy
import datetime
import functools
import itertools
import threading
import time
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.kubernetes.admission import admit_create
from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.containers import Container, Hosts
from tests.fakes.kubernetes.nodes import node_for, not_pulled, not_scheduled, tolerated_s
from tests.fakes.kubernetes.resources import of_kind
from tests.fakes.kubernetes.store import controller_of, stamp
from tests.fakes.kubernetes.wire import Object, Refusal, Request

__all__ = ["Kubelet", "condition_of", "container_status", "exit_code", "set_condition"]

POD = of_kind("Pod")
_DISRUPTION = "DisruptionTarget"
_WORTH_WAITING_S = 60.0
"""Longer tolerations of a lost node than this are not waited for here, shorter ones are over."""


@dataclass
class Log:
    """The log of one start of a container."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False


class Kubelet(Api):
    """The API server with three large nodes."""

    root: Path
    """Where volumes lie: `claims/NAME`, or `pods/POD/VOLUME` for an emptyDir."""

    def __init__(
        self,
        *,
        namespaces: tuple[str, ...],
        without: tuple[str, ...],
        auto_run: bool,
        secrets: Mapping[str, Mapping[str, str]],
        back_off_s: float,
        clean_after_s: float,
    ) -> None:
        super().__init__(namespaces=namespaces, without=without)
        self.auto_run = auto_run
        self.secrets = secrets
        self.hold_deletes = False
        """Whether deleted pods that run stay until `stopped()`, as if they wrote a checkpoint."""
        self.cut_logs: list[int] = []
        """For each of the next log requests: after how many lines the connection breaks."""
        self.back_off_s = back_off_s
        """When a failed container starts again; a real kubelet waits for ten seconds and more."""
        self.clean_after_s = clean_after_s
        """When the Training Operator deletes the running pods of a job that has ended."""
        self.lost_nodes: set[str] = set()
        """Nodes without power."""
        self.hosts = Hosts()
        self.memory: dict[Any, Any] = {}
        """Records of controllers, by the uid of the object."""
        self._stamps = itertools.count(1)
        self._logs: dict[str, Log] = {}
        self._containers: dict[str, Container] = {}
        self._threads: list[threading.Thread] = []

    def warn(
        self, name: str, reason: str, message: str, *, namespace: str = "default", kind: str = ""
    ) -> None:
        """Record a warning event about an object."""
        with self.changed:
            event: Object = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{name}.{self.next_id():016x}", "namespace": namespace},
                "involvedObject": {"name": name, "namespace": namespace},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "count": 1,
                "firstTimestamp": stamp(),
                "lastTimestamp": stamp(),
            }
            if kind:
                event["involvedObject"]["kind"] = kind
            self.put(of_kind("Event"), event)

    def new_pod(self, pod: Object, owner: Object) -> Object | None:
        """Make a pod as a controller does, or say in an event why it cannot be made."""
        kind, space = owner["kind"], owner["metadata"]["namespace"]
        pod |= {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] |= {
            "namespace": space,
            "ownerReferences": [reference(owner)],
        }
        try:
            if self.refuse_pods is not None:
                raise Refusal(403, "Forbidden", self.refuse_pods)
            admit_create(self, POD, pod)
        except Refusal as refusal:
            reason, owner_name = "FailedCreate", owner["metadata"]["name"]
            if kind == "PyTorchJob":
                reason = "FailedCreatePod"
            words = str(refusal)
            if self.refuse_pods is None:
                words = f"Error creating: {words}"
            self.warn(owner_name, reason, words, namespace=space, kind=kind)
            return None
        self.schedule(pod)
        return pod

    def schedule(self, pod: Object) -> None:
        """Give a pod that was made to the node."""
        pod["status"] = {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp()}
            ],
            "containerStatuses": [
                {
                    "name": one["name"],
                    "image": one["image"],
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"waiting": {"reason": "ContainerCreating"}},
                    "lastState": {},
                }
                for one in pod["spec"]["containers"]
            ],
        }
        pod["spec"].setdefault("restartPolicy", "Always")
        pod["spec"].setdefault("terminationGracePeriodSeconds", 30)
        self.hosts.add(pod)
        if node := node_for(pod, self.all(POD), self.lost_nodes):
            pod["spec"]["nodeName"] = node
        self.put(POD, pod)
        if self.auto_run:
            self.in_background(lambda: self._run_pod(pod["metadata"]["name"], pod))

    refuse_pods: str | None = None
    """Why no pods can be made; None lets them be made."""

    def start_container(self, pod: Object) -> str:
        """Let a pod's container run, and return its identity."""
        identity = f"fake://{uuid.uuid4().hex}"
        self._logs[identity] = Log()
        container_status(pod).update(
            containerID=identity, state={"running": {"startedAt": stamp()}}, ready=True
        )
        pod["status"].setdefault("startTime", stamp())
        pod["status"]["phase"] = "Running"
        self.put(POD, pod)
        return identity

    def print_lines(self, identity: str, *lines: str) -> None:
        """Let a container print. Takes the lock."""
        with self.changed:
            self._logs[identity].lines += ((self._now(), line) for line in lines)
            self.changed.notify_all()

    def end_container(self, pod: Object, code: int, *, reason: str = "", message: str = "") -> None:
        """Let a pod's container end."""
        status = container_status(pod)
        log = self._logs[status["containerID"]]
        log.ended = True
        ended = {
            "containerID": status["containerID"],
            "exitCode": code,
            "reason": reason or ("Error" if code else "Completed"),
            "finishedAt": stamp(),
        }
        if code:  # terminationMessagePolicy FallbackToLogsOnError
            ended["message"] = (
                message or "".join(f"{text}\n" for _, text in log.lines[-80:])[-2048:]
            )
        status["state"], status["ready"] = {"terminated": ended}, False
        self.put(POD, pod)

    def end_pod(self, pod: Object, grace_s: float | None) -> None:
        """Ask a pod to end; a pod without a running container is deleted immediately."""
        if grace_s is None:
            grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        container = self._containers.get(pod["metadata"]["uid"])
        is_lost = pod["spec"].get("nodeName") in self.lost_nodes
        owner = controller_of(pod) or {}
        if is_lost and grace_s == 0 and owner.get("kind") != "Job":
            self.remove_pod(pod)  # a Job's pod has a finalizer, which outlives a forced deletion
            return
        if "deletionTimestamp" in pod["metadata"]:
            if container is not None and grace_s == 0:
                container.kill()
            return
        pod["metadata"]["deletionTimestamp"] = stamp()
        pod["metadata"]["deletionGracePeriodSeconds"] = int(grace_s)
        self.put(POD, pod)
        running = "running" in container_status(pod)["state"]
        if container is not None:
            container.terminate(grace_s)
        elif not (running and (self.hold_deletes or is_lost)):
            self.remove_pod(pod)

    def remove_pod(self, pod: Object) -> None:
        """Let a deleted pod be gone; its owner sees how it ended."""
        identity = container_status(pod).get("containerID")
        if identity is not None:
            self._logs[identity].ended = True
        if self.auto_run and pod["status"]["phase"] not in ("Succeeded", "Failed"):
            pod["status"]["phase"] = "Failed"
            self.put(POD, pod)
            self.settle_pod(pod)
        self.drop(POD, pod)

    def settle_pod(self, pod: Object) -> None:
        """Let the owner of a pod count how it ended before it is gone."""

    def disrupt(self, pod: Object, reason: str, message: str = "taken from its node") -> None:
        """Take a pod from its node, as an eviction or a preemption does."""
        set_condition(pod, _DISRUPTION, reason=reason, message=message)
        self.put(POD, pod)
        self.end_pod(pod, None)

    def power_off(self, node: str) -> None:
        """Let a node vanish with all that runs on it; its pods are deleted after their toleration.

        They stay in their phase until the node is back or its object is gone. A real cluster
        notices after 40 to 50 s.
        """
        self.lost_nodes.add(node)
        words = "Kubelet stopped posting node status."
        ready = {"type": "Ready", "lastTransitionTime": stamp()}
        status = {"reason": "NodeStatusUnknown", "message": words, "status": "Unknown"}
        body: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
        self.put(of_kind("Node"), body | {"status": {"conditions": [ready | status]}})
        for pod in self.all(POD):
            if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running":
                if (container := self._containers.get(pod["metadata"]["uid"])) is not None:
                    container.kill()
                pod["status"]["conditions"].append({**ready, "status": "False"})
                self.put(POD, pod)
                if tolerated_s(pod) <= _WORTH_WAITING_S:
                    self.disrupt(pod, "DeletionByTaintManager")

    def kill_container(self, pod: Object) -> None:
        """Kill all processes of a pod's container."""
        self._containers[pod["metadata"]["uid"]].kill()

    def freeze_container(self, pod: Object) -> None:
        """Stop all processes of a pod's container."""
        self._containers[pod["metadata"]["uid"]].freeze()

    def kill_for_memory(self, pod: Object) -> None:
        """Kill the ranks of a pod's container, as the kernel does where memory is short."""
        self._containers[pod["metadata"]["uid"]].kill_for_memory()

    def log_lines(self, pod: Object, request: Request) -> Iterator[bytes]:
        """Return the log of a pod's container."""
        status = container_status(pod)
        if request.query.get("container", status["name"]) != status["name"]:
            words = f"container {request.query['container']} is not valid for pod"
            raise Refusal(400, "BadRequest", f"{words} {pod['metadata']['name']}")
        what = f'container "{status["name"]}" in pod "{pod["metadata"]["name"]}"'
        if request.is_on("previous"):
            identity = status["lastState"].get("terminated", {}).get("containerID")
            if identity is None:
                raise Refusal(400, "BadRequest", f"previous terminated {what} not found")
        elif (identity := status.get("containerID")) is None or "waiting" in status["state"]:
            reason = status["state"].get("waiting", {}).get("reason", "ContainerCreating")
            raise Refusal(400, "BadRequest", f"{what} is waiting to start: {reason}")
        log, stamped = self._logs[identity], request.is_on("timestamps")
        cut = self.cut_logs.pop(0) if self.cut_logs else None
        start = _first(log, request.query)

        def lines() -> Iterator[bytes]:
            for index in itertools.count(start):
                if index == cut:
                    raise ConnectionAbortedError
                with self.changed:
                    while index >= len(log.lines):
                        if log.ended or not request.is_on("follow") or self.closing:
                            return
                        self.changed.wait()
                    moment, text = log.lines[index]
                yield f"{moment} {text}\n".encode() if stamped else f"{text}\n".encode()

        return lines()

    def _now(self) -> str:
        """Return the time as the log of a container has it: no two alike, always growing."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{now}.{next(self._stamps):09}Z"

    # Running.

    def _texts(self, kind: str) -> dict[str, Mapping[str, str]]:
        found: dict[str, Mapping[str, str]] = {}
        for thing in self.all(of_kind(kind)):
            raw = {key: b64decode(value) for key, value in thing.get("binaryData", {}).items()}
            found[thing["metadata"]["name"]] = {
                **(thing.get("data") or thing.get("stringData") or {}),
                **{key: value.decode(errors="surrogateescape") for key, value in raw.items()},
            }
        return found

    def _made_container(self, pod: Object) -> Container | None:
        """Return the container of a pod; None, with the reason in the pod's status, if it cannot be
        made."""
        if words := not_scheduled(pod):
            set_condition(
                pod, "PodScheduled", reason="Unschedulable", message=words, status="False"
            )
            container_status(pod)["state"] = {"waiting": {}}
            self.put(POD, pod)
            return None
        if words := not_pulled(pod):
            waiting = {"reason": "ErrImagePull", "message": words}
            container_status(pod)["state"] = {"waiting": waiting}
            self.put(POD, pod)
            return None
        texts, secrets = self._texts("ConfigMap"), {**self.secrets, **self._texts("Secret")}
        if words := self._not_mounted(pod):
            name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
            self.warn(name, "FailedMount", words, namespace=space, kind="Pod")
            return None
        try:
            return Container(pod, root=self.root, secrets=secrets, configs=texts, hosts=self.hosts)
        except KeyError as missing:
            words = f"couldn't find {missing.args[0]}"
            waiting = {"reason": "CreateContainerConfigError", "message": words}
            container_status(pod)["state"] = {"waiting": waiting}
            self.put(POD, pod)
            return None

    def _not_mounted(self, pod: Object) -> str:
        """Return which volume cannot be mounted because its source does not exist."""
        texts, secrets = self._texts("ConfigMap"), {**self.secrets, **self._texts("Secret")}
        for volume in pod["spec"].get("volumes") or ():
            for kind, key, there in (
                ("configMap", "name", texts),
                ("secret", "secretName", secrets),
            ):
                name = volume.get(kind, {}).get(key)
                if name is not None and name not in there:
                    words = f'MountVolume.SetUp failed for volume "{volume["name"]}": '
                    return f'{words}{kind.lower()} "{name}" not found'
        return ""

    def _run_pod(self, name: str, pod: Object) -> None:
        """Run a pod's container as a process, and again as its restart policy demands."""
        uid, metadata = pod["metadata"]["uid"], pod["metadata"]

        def is_over() -> bool:
            return self.closing or "deletionTimestamp" in metadata

        while True:
            with self.changed:
                if is_over():
                    self._gone(pod)
                    return
                if (container := self._made_container(pod)) is None:
                    self.settle()
                    # The kubelet mounts again and again; what else fails here stays as it is.
                    if self._not_mounted(pod):
                        self.changed.wait_for(lambda: is_over() or not self._not_mounted(pod))
                    else:
                        self.changed.wait_for(is_over)
                    if is_over():
                        return
                    continue
                identity = self.start_container(pod)
                self._containers[uid] = container
                self.settle()
            code = container.run(functools.partial(self.print_lines, identity))
            with self.changed:
                del self._containers[uid]
                if pod["spec"]["nodeName"] in self.lost_nodes and not self.closing:
                    return  # nobody tells the API server
                reason = "OOMKilled" if container.out_of_memory and code else ""
                self.end_container(pod, code, reason=reason)
                policy = pod["spec"]["restartPolicy"]
                done = policy == "Never" or (policy == "OnFailure" and code == 0)
                if done or is_over():
                    pod["status"]["phase"] = "Failed" if code else "Succeeded"
                    if not self.closing:
                        self.put(POD, pod)
                    if is_over():
                        self._gone(pod)
                    self.settle()
                    return
                status = container_status(pod)
                waiting = {"reason": "CrashLoopBackOff", "message": "back-off restarting container"}
                status["lastState"], status["state"] = status["state"], {"waiting": waiting}
                status["restartCount"] += 1
                self.put(POD, pod)
                self.settle()
                self.changed.wait_for(is_over, self.back_off_s)

    def _gone(self, pod: Object) -> None:
        if not self.closing and self.find(POD, *self.key(POD, pod)[1:]) is pod:
            self.settle_pod(pod)
            self.remove_pod(pod)
            self.settle()

    def in_background(self, work: Callable[[], None]) -> None:
        """Do something in a thread that ends before the cluster does."""
        self._threads = [one for one in self._threads if one.is_alive()]
        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """End all that runs; without the lock."""
        super().close()
        with self.changed:
            containers, threads = list(self._containers.values()), list(self._threads)
        for container in containers:
            container.kill()
        for thread in threads:
            thread.join()


def _first(log: Log, query: Mapping[str, str]) -> int:
    """Return the number of the first line of a request."""
    start = 0
    if "tailLines" in query:
        start = max(0, len(log.lines) - int(query["tailLines"]))
    since = query.get("sinceTime", "")
    if "sinceSeconds" in query:
        moment = time.time() - float(query["sinceSeconds"])
        since = datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if since:
        bare = since.removesuffix("Z")
        with contextlib.suppress(StopIteration):
            after = next(
                i for i, (moment, _) in enumerate(log.lines) if moment[: len(bare)] >= bare
            )
            return max(start, after)
        return len(log.lines)
    return start


def reference(owner: Object) -> Object:
    """Return an object's reference to its controller."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def container_status(pod: Object) -> Object:
    """Return the status of a pod's container; live."""
    status: Object = pod["status"]["containerStatuses"][0]
    return status


def exit_code(pod: Object) -> int | None:
    """Return the exit status of a pod's container, or None while it runs."""
    code: int | None = container_status(pod)["state"].get("terminated", {}).get("exitCode")
    return code


def condition_of(thing: Object, kind: str) -> Object | None:
    """Return a condition that is true."""
    for one in (thing.get("status") or {}).get("conditions") or ():
        if one["type"] == kind and one["status"] == "True":
            found: Object = copy.copy(one)
            return found
    return None


def set_condition(
    thing: Object, kind: str, *, reason: str, message: str = "", status: str = "True"
) -> None:
    """Set a condition of an object; it goes to the end where it changes."""
    conditions: list[Any] = thing.setdefault("status", {}).setdefault("conditions", [])
    new = {"type": kind, "status": status, "reason": reason, "message": message}
    for one in conditions:
        if one["type"] == kind and new.items() <= one.items():
            return
    conditions[:] = [one for one in conditions if one["type"] != kind]
    conditions.append(new | {"lastTransitionTime": stamp()})
