"""The methods by which a test queries the cluster and changes it by hand."""

import contextlib
import copy
from typing import Any

import yaml

from tests.fakes.kubernetes import indexed, jobsets, kueue, pytorchjobs, trainjobs
from tests.fakes.kubernetes.execs import Execs
from tests.fakes.kubernetes.kubelet import POD, container_status, set_condition
from tests.fakes.kubernetes.resources import WORKLOADS, Resource, of_kind
from tests.fakes.kubernetes.store import controller_of
from tests.fakes.kubernetes.wire import Object, Request

__all__ = ["Hands"]

RUN_LABEL = "torch-deploy-toolkit/run"
_NAMES = (
    pytorchjobs.JOB_LABEL,
    jobsets.NAME_LABEL,
    "batch.kubernetes.io/job-name",
    RUN_LABEL,
)
"""Labels by which pods name their workload."""

_TERMINAL = {
    "PyTorchJob": ("Succeeded", "Failed"),
    "TrainJob": ("Complete", "Failed"),
    "JobSet": ("Completed", "Failed"),
    "Job": ("Complete", "Failed"),
}


class Hands(Execs):
    """A cluster in which nothing happens but what the test makes happen."""

    # Queries.

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
            message: The message of the workload's condition.
            reason: Why the containers ended, like OOMKilled.
            exit_code: Theirs, where they failed.
            last_words: The containers' termination message.
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
            if not self.auto_run:
                self._count(name)
                self.settle()

    def stopped(self, name: str) -> None:
        """Let the pods of a deleted workload be gone, with `hold_deletes`."""
        with self.changed:
            for pod in self._pods_of(name):
                self.remove_pod(pod)
            self.settle()
            if not self.auto_run:
                self._count(name)
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

    def lose_node(self, pod_name: str, since: str) -> str:
        """Let the cluster lose the node of a pod, which stays as it is but is not ready; its name.

        The node controller does so 40 s after the kubelet's last sign of life.
        """
        with self.changed:
            pod = self._live(POD, pod_name, None)
            name = str(pod["spec"]["nodeName"])
            words = {
                "reason": "NodeStatusUnknown",
                "message": "Kubelet stopped posting node status.",
            }
            ready = {"type": "Ready", "lastTransitionTime": since}
            status = {"conditions": [{**ready, **words, "status": "Unknown"}]}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            self.put(of_kind("Node"), {**node, "status": status})
            pod["status"]["conditions"].append({**ready, "status": "False"})
            self.put(POD, pod)
            self.settle()
            return name

    def cut_power(self, pod_name: str) -> str:
        """Take the power of a pod's node away, with auto_run; return the node's name."""
        with self.changed:
            node = str(self._live(POD, pod_name, None)["spec"]["nodeName"])
            self.power_off(node)
            self.settle()
            return node

    def delete_by_force(self, pod_name: str) -> None:
        """Delete a pod with a grace period of 0."""
        with self.changed:
            self.end_pod(self._live(POD, pod_name, None), 0)
            self.settle()

    def kill(self, pod_name: str) -> None:
        """Kill all processes of a pod's container, with auto_run."""
        with self.changed:
            self.kill_container(self._live(POD, pod_name, None))

    def freeze(self, pod_name: str) -> None:
        """Let a pod's processes answer nobody any more, with auto_run."""
        with self.changed:
            self.freeze_container(self._live(POD, pod_name, None))

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
        """Return the workloads of a kind that have a name, or whose owner has it."""
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


def _owner(pod: Object) -> str | None:
    owner = controller_of(pod)
    return owner["uid"] if owner else None
