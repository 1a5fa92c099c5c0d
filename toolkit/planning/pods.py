"""The pods of a job on Kubernetes: volumes, security, placement, as plain values. Pure.

The values are those of a manifest; a key is omitted if the cluster's default applies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.job.kubernetes_options import Workload
from toolkit.job.spec import JobSpec, Mount
from toolkit.job.types import IN_RUN_DIR
from toolkit.profile import KubernetesProfile
from toolkit.text.quantities import kubernetes_count, kubernetes_size, parse_size

MANAGER = "torch-deploy-toolkit"
"""The field manager, and the value of `app.kubernetes.io/managed-by`."""

RUN_LABEL = f"{MANAGER}/run"
"""The label of all objects of a run."""

WORKLOAD_LABEL = f"{MANAGER}/workload"
"""The pod label with the kind of the workload: names are unique only within a kind."""

SWEEP_LABEL = f"{MANAGER}/sweep"
"""The label of all points of a sweep."""

POD_MARGIN_S = 15
"""Seconds for torchrun between the end of its workers and the kubelet's kill of the container."""

_LOST = ("not-ready", "unreachable")
"""The taints of a node without a working kubelet."""

_PAYLOAD = "submitted"
"""The volume with the submitted files of a run."""

SUPERVISOR = "/supervisor"
"""The folder of a carried supervisor in the pods."""

_GROUP_NAMES = {
    "volcano": ("annotations", "scheduling.k8s.io/group-name", "volcano"),
    "scheduler-plugins": ("labels", "scheduling.x-k8s.io/pod-group", "scheduler-plugins-scheduler"),
}
"""How pods refer to their PodGroup, and the name of the scheduler (manuals of both)."""

POD_GROUP_APIS = {
    "volcano": "scheduling.volcano.sh/v1beta1",
    "scheduler-plugins": "scheduling.x-k8s.io/v1alpha1",
}
"""The API version of the PodGroup of each gang scheduler."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The common values of all pods of a run."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    requests: Mapping[str, str]
    """Resources; requests equal limits, as device plugins require."""

    grace_s: int
    """`terminationGracePeriodSeconds`."""

    spec: Mapping[str, Any]
    """Other keys of the pod's spec: node selection, service account, network."""

    pod_security: Mapping[str, Any]
    """The pod's `securityContext`."""

    container_security: Mapping[str, Any]
    """The container's `securityContext`."""

    volumes: tuple[Mapping[str, Any], ...]
    """The volumes: /tmp, /dev/shm, the run directories, and the mounts."""

    volume_mounts: tuple[Mapping[str, Any], ...]
    """The mount points of the volumes in the container."""

    def named(self, before: str, run_name: str, sweep_name: str | None = None) -> "Pod":
        """Return the pods of a run, renamed from `before`.

        `sweep_name` is None for a run that is not a point of a sweep.
        """
        kind = self.labels[WORKLOAD_LABEL]
        named = {
            _PAYLOAD: (before, run_name),
            "supervisor": (companion_name(before, kind), companion_name(run_name, kind)),
        }

        def with_name(volume: Mapping[str, Any]) -> Mapping[str, Any]:
            old, new = named.get(volume["name"], ("", ""))
            is_own = volume.get("configMap") == {"name": old}
            return {**volume, "configMap": {"name": new}} if is_own else volume

        return replace(
            self,
            labels=labelled(self.labels, run_name, sweep_name),
            annotations=labelled(self.annotations, run_name, sweep_name),
            spec=labelled(self.spec, run_name, sweep_name),
            volumes=tuple(map(with_name, self.volumes)),
        )


def companion_name(run_name: str, workload: str) -> str:
    """Return the name of a run's companion objects: names are unique only within a kind.

    >>> companion_name("digits", "PyTorchJob")
    'digits-pytorchjob'
    """
    return f"{run_name}-{workload.lower()}"


def payload_dir_of(job: JobSpec) -> str | None:
    """Return the folder of the submitted files in the pods; None without such files."""
    if job.script is None or not job.carried:
        return None
    folder = job.script.removeprefix(IN_RUN_DIR).rpartition("/")[0]
    return f"/submitted/{folder}".rstrip("/")


def workload_of(job: JobSpec, profile: KubernetesProfile) -> Workload:
    """Return the kind of workload for a job."""
    return job.kubernetes.workload or profile.workload


def pod_of(
    job: JobSpec,
    profile: KubernetesProfile,
    *,
    run_name: str,
    labels: Mapping[str, str],
    grace_s: int,
) -> Pod:
    """Return the pods of a job; each runs one torchrun."""
    labels = {**labels, WORKLOAD_LABEL: workload_of(job, profile)}
    annotations: dict[str, str] = {}
    spec: dict[str, Any] = {}
    if profile.gang_scheduler:
        where, key, scheduler = _GROUP_NAMES[profile.gang_scheduler]
        (labels if where == "labels" else annotations)[key] = run_name
        spec["schedulerName"] = scheduler
    if profile.topology and (job.kubernetes.queue or profile.queue):
        wish = "required" if profile.topology.required else "preferred"
        annotations[f"kueue.x-k8s.io/podset-{wish}-topology"] = profile.topology.key
    spec |= _placement(job, profile, run_name)
    need, user = job.resources, profile.run_as_user
    requests = {"cpu": kubernetes_count(need.cpus)}
    if need.memory_bytes:
        requests["memory"] = kubernetes_size(need.memory_bytes)
    if need.gpus_per_node:
        requests[profile.gpu_resource] = kubernetes_count(need.gpus_per_node)
    capabilities = {"drop": ["ALL"]}
    if profile.capabilities:
        capabilities["add"] = list(profile.capabilities)
    volumes, mounts = _volumes(job, profile, run_name)
    return Pod(
        labels=labels,
        annotations=annotations,
        requests=requests
        | {name: kubernetes_count(count) for name, count in profile.resources.items()},
        grace_s=grace_s,
        spec=spec,
        pod_security={
            "runAsNonRoot": user > 0,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            # Without this policy, every start would change the group of all files of a volume.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        container_security={
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": profile.read_only_root,
            "capabilities": capabilities,
        },
        volumes=volumes,
        volume_mounts=mounts,
    )


def first_pod(workload: Workload, run_name: str, service: str | None) -> str:
    """Return the host name of the first pod, which the others connect to.

    The Service provides the host names of a Job's pods; it is None if each run creates one. The
    Training Operator creates a Service for each pod of a PyTorchJob.

    >>> [first_pod(kind, "a", None) for kind in ("PyTorchJob", "JobSet", "Job")]
    ['a-worker-0', 'a-node-0-0.a', 'a-0.a']
    """
    if workload == "PyTorchJob":
        return f"{run_name}-worker-0"
    if workload == "Job":
        return f"{run_name}-0.{service or run_name}"
    return f"{run_name}-node-0-0.{run_name}"


def pods_selected(workload: Workload, run_name: str) -> dict[str, str]:
    """Return the labels that select the pods of a run, and no others."""
    return {RUN_LABEL: run_name, WORKLOAD_LABEL: workload}


def labelled(value: Any, run_name: str, sweep_name: str | None) -> Any:
    """Return nested mappings and sequences with the run's name replaced in every label.

    The name of the sweep is None for a run that is not a point of one.
    """
    names = {RUN_LABEL: run_name} | {key: run_name for _, key, _ in _GROUP_NAMES.values()}
    if sweep_name is not None:
        names[SWEEP_LABEL] = sweep_name
    if isinstance(value, Mapping):
        return {
            key: names.get(key) or labelled(entry, run_name, sweep_name)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(labelled(item, run_name, sweep_name) for item in value)
    return value


def _placement(job: JobSpec, profile: KubernetesProfile, run_name: str) -> dict[str, Any]:
    """Return the placement of the pods, and their service account."""
    spec: dict[str, Any] = {}
    if profile.service_account:
        spec["serviceAccountName"] = profile.service_account
    if profile.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in profile.image_pull_secrets]
    if priority := job.kubernetes.priority_class or profile.priority_class:
        spec["priorityClassName"] = priority
    if profile.host_network:
        # Without this policy, such pods use the node's resolver, which cannot resolve Services.
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if profile.node_selector:
        spec["nodeSelector"] = dict(profile.node_selector)
    lost: dict[str, Any] = {"operator": "Exists", "effect": "NoExecute"}
    lost["tolerationSeconds"] = profile.lost_node_toleration_s
    spec["tolerations"] = [
        *(
            toleration.model_dump(mode="json", by_alias=True, exclude_none=True)
            for toleration in profile.tolerations
        ),
        *({"key": f"node.kubernetes.io/{taint}", **lost} for taint in _LOST),
    ]
    selector = {"matchLabels": pods_selected(workload_of(job, profile), run_name)}
    affinity: dict[str, Any] = {}
    near = profile.topology
    if near and not (job.kubernetes.queue or profile.queue):
        term: dict[str, Any] = {"labelSelector": selector, "topologyKey": near.key}
        wish, terms = "required", [term]
        if not near.required:
            wish, terms = "preferred", [{"weight": 100, "podAffinityTerm": term}]
        affinity["podAffinity"] = {f"{wish}DuringSchedulingIgnoredDuringExecution": terms}
    if profile.one_pod_per_node or profile.host_network:
        apart = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    return spec | ({"affinity": affinity} if affinity else {})


def _volumes(
    job: JobSpec, profile: KubernetesProfile, run_name: str
) -> tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]:
    shm: dict[str, Any] = {"medium": "Memory"}
    if job.resources.shm_bytes:
        shm["sizeLimit"] = kubernetes_size(job.resources.shm_bytes)
    runs: dict[str, Any] = {"emptyDir": {}}
    if profile.runs_claim:
        runs = {"persistentVolumeClaim": {"claimName": profile.runs_claim}}
    places: list[tuple[str, dict[str, Any], str, bool]] = [
        ("tmp", {"emptyDir": {}}, "/tmp", False),
        ("shm", {"emptyDir": shm}, "/dev/shm", False),
        ("runs", runs, profile.runs_dir, False),
    ]
    if profile.supervisor == "carried":
        name = companion_name(run_name, workload_of(job, profile))
        places.append(("supervisor", {"configMap": {"name": name}}, SUPERVISOR, True))
    if payload := payload_dir_of(job):
        places.append((_PAYLOAD, {"configMap": {"name": run_name}}, payload, True))
    for index, mount in enumerate((*profile.mounts, *job.mounts)):
        places.append((f"mount-{index}", volume_of(mount), mount.target, mount.read_only))
    return (
        tuple({"name": name, **volume} for name, volume, _, _ in places),
        tuple(
            {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})
            for name, _, path, read_only in places
        ),
    )


def volume_of(mount: Mount) -> dict[str, Any]:
    """Return the volume for the source of a mount.

    >>> volume_of(Mount(source="nfs:files:/data", target="/data"))
    {'nfs': {'server': 'files', 'path': '/data', 'readOnly': False}}
    """
    match mount.kind:
        case "claim":
            return {
                "persistentVolumeClaim": {"claimName": mount.named, "readOnly": mount.read_only}
            }
        case "configmap":
            return {"configMap": {"name": mount.named}}
        case "secret":
            # Readable by owner and group: fsGroup gives the container's user access.
            return {"secret": {"secretName": mount.named, "defaultMode": 0o440}}
        case "nfs":
            server, path = mount.named.split(":/", 1)  # IPv6 addresses also contain colons
            return {"nfs": {"server": server, "path": f"/{path}", "readOnly": mount.read_only}}
        case "empty":
            limit = {"sizeLimit": kubernetes_size(parse_size(mount.named))} if mount.named else {}
            return {"emptyDir": limit}
    return {"hostPath": {"path": mount.source}}
