"""Refusals of well-formed objects, by the server and by webhooks.

Broken objects that the real operators accept are accepted here, too.
"""

from collections.abc import Iterable
from typing import Any

from tests.fakes.kubernetes.podchecks import (
    DNS_1035,
    is_dns_label,
    is_dns_subdomain,
    pod_problems,
    security_problems,
)
from tests.fakes.kubernetes.resources import Resource, of_kind
from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.wire import Object, Refusal

__all__ = ["admit_create", "admit_update"]

_HOOKS = {
    "PyTorchJob": "validator.pytorchjob.training-operator.kubeflow.org",
    "TrainJob": "validator.trainjob.trainer.kubeflow.org",
    "TrainingRuntime": "validator.trainingruntime.trainer.kubeflow.org",
    "JobSet": "vjobset.kb.io",
}
_RESTRICTED = "pod-security.kubernetes.io/enforce"


def admit_create(store: Store, resource: Resource, body: Object) -> None:
    """Let an object be made, or refuse it.

    Raises:
        Refusal: the object is not admitted; the message is the server's or the webhook's own.
    """
    name, kind = body["metadata"].get("name") or "", resource.kind
    if not name:
        _refuse(resource, name, ["metadata.name: Required value: name or generateName is required"])
    if kind == "PyTorchJob":
        _deny(kind, _pytorchjob_problems(body))
    elif kind == "TrainJob":
        if not DNS_1035.fullmatch(name):
            words = "Invalid value: metadata.name must match RFC 1035 DNS label format"
            _refuse(resource, name, [words])
        if len(name) > 63:
            words = "Invalid value: metadata.name must be no more than 63 characters"
            _refuse(resource, name, [words])
        _deny(kind, _trainjob_problems(store, body))
    elif kind == "TrainingRuntime":
        _deny(kind, _runtime_problems(body))
    elif kind == "JobSet":
        _deny(kind, _jobset_problems(body))
    elif kind == "Job":
        _refuse(resource, name, _job_problems(body))
    elif kind == "Pod":
        _refuse(resource, name, pod_problems(body))
        _enforce(store, body)
    elif kind == "Service":
        if len(name) > 63 or not DNS_1035.fullmatch(name):
            words = f'metadata.name: Invalid value: "{name}": a DNS-1035 label must consist of'
            _refuse(resource, name, [words])
    elif not is_dns_subdomain(name):
        words = f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must'
        _refuse(resource, name, [words])


def admit_update(store: Store, resource: Resource, before: Object, after: Object) -> None:
    """Let an object be changed, or refuse it."""
    old, new, kind = before.get("spec") or {}, after.get("spec") or {}, resource.kind
    name = after["metadata"]["name"]
    if old == new:
        return
    suspended = old.get("suspend") is True or new.get("suspend") is True
    if kind == "TrainJob":
        fixed = ("trainer", "runtimeRef", "activeDeadlineSeconds", "managedBy")
        changed = [key for key in fixed if old.get(key) != new.get(key)]
        _refuse(
            resource, name, [f"spec.{key}: Invalid value: field is immutable" for key in changed]
        )
        if old.get("runtimePatches") != new.get("runtimePatches") and not suspended:
            words = "spec.runtimePatches: Forbidden: can only be modified when the TrainJob is "
            _deny(kind, [f"{words}suspended"])
    elif kind == "JobSet":
        for key in ("failurePolicy", "successPolicy", "network", "startupPolicy"):
            if old.get(key) != new.get(key):
                _refuse(resource, name, [f"spec.{key}: Invalid value: Value is immutable"])
        if old.get("replicatedJobs") != new.get("replicatedJobs") and not suspended:
            _deny(kind, ["spec.replicatedJobs: Invalid value: field is immutable"])
    elif kind == "Job":
        for key in ("template", "selector", "completionMode", "podFailurePolicy"):
            if old.get(key) != new.get(key) and not (key == "template" and suspended):
                _refuse(resource, name, [f"spec.{key}: Invalid value: field is immutable"])
    elif kind == "PyTorchJob":
        _deny(kind, _pytorchjob_problems(after))
    elif kind == "Pod":
        words = "spec: Forbidden: pod updates may not change fields other than image, tolerations"
        _refuse(resource, name, [words])


def _deny(kind: str, problems: Iterable[str]) -> None:
    """Refuse as a webhook does."""
    if found := list(problems):
        words = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
        hook = f'admission webhook "{_HOOKS[kind]}" denied the request: '
        raise Refusal(403, "Forbidden", hook + words)


def _refuse(resource: Resource, name: str, problems: Iterable[str]) -> None:
    """Refuse as the server does."""
    if found := list(problems):
        words = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
        full = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
        raise Refusal(422, "Invalid", f'{full} "{name}" is invalid: {words}')


def _enforce(store: Store, pod: Object) -> None:
    """Refuse a pod that violates the Pod Security level of its namespace."""
    space = store.get(of_kind("Namespace"), "", pod["metadata"]["namespace"])
    level = (space["metadata"].get("labels") or {}).get(_RESTRICTED)
    if level == "restricted" and (found := security_problems(pod["spec"])):
        raise Refusal(
            403,
            "Forbidden",
            f'pods "{pod["metadata"]["name"]}" is forbidden: violates PodSecurity '
            f'"restricted:latest": {", ".join(found)}',
        )


def _pytorchjob_problems(body: Object) -> list[str]:
    found, name = [], body["metadata"]["name"]
    if len(name) > 63 or not DNS_1035.fullmatch(name):
        found.append(f'metadata.name: Invalid value: "{name}": a DNS-1035 label is wanted')
    for role, replicas in body["spec"]["pytorchReplicaSpecs"].items():
        path = f"spec.pytorchReplicaSpecs[{role}]"
        if role not in ("Master", "Worker"):
            found.append(f'{path}: Unsupported value: "{role}": supported values: Master, Worker')
        if role == "Master" and replicas.get("replicas", 1) != 1:
            found.append(f"{path}.replicas: Invalid value: must be 1")
        containers = replicas.get("template", {}).get("spec", {}).get("containers") or ()
        if not any(one.get("name") == "pytorch" for one in containers):
            words = "Required value: must have at least one container with name pytorch"
            found.append(f"{path}.template.spec.containers: {words}")
        if any(not one.get("image") for one in containers):
            found.append(f"{path}.template.spec.containers: Required value: must be required image")
    return found


def _trainjob_problems(store: Store, body: Object) -> list[str]:
    found, spec = [], body["spec"]
    reference = spec["runtimeRef"]
    if reference.get("kind", "ClusterTrainingRuntime") == "TrainingRuntime":
        space = body["metadata"]["namespace"]
        there = store.find(of_kind("TrainingRuntime"), space, reference["name"])
    else:
        there = None
    if there is None:
        kind = reference.get("kind", "ClusterTrainingRuntime")
        found.append(
            f"spec.runtimeRef: Invalid value: {kind}.trainer.kubeflow.org "
            f'"{reference["name"]}" not found: {kind} must be created before the TrainJob'
        )
    for variable in spec.get("trainer", {}).get("env") or ():
        if variable["name"].startswith("PET_"):  # as the real webhook refuses PET_*
            found.append(
                f"spec.trainer.env: Invalid value: must not have reserved envs, invalid envs "
                f"configured: {variable['name']}"
            )
    for path, container in _patched_containers(spec):
        if container.get("env") and container["name"] == "node":
            words = "must not have envs for the dataset-initializer, model-initializer, node"
            found.append(f"{path}.env: Invalid value: {words} containers")
    return found


def _patched_containers(spec: Object) -> Iterable[tuple[str, Object]]:
    for index, patch in enumerate(spec.get("runtimePatches") or ()):
        template: Any = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
        for job in (template.get("spec") or {}).get("replicatedJobs") or ():
            pod = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
            for container in (pod.get("spec") or {}).get("containers") or ():
                yield f"spec.runtimePatches[{index}]...containers[{container['name']}]", container


def _runtime_problems(body: Object) -> list[str]:
    jobs = body["spec"]["template"]["spec"].get("replicatedJobs") or ()
    if any(one.get("replicas", 1) != 1 for one in jobs):
        return ["spec.template.spec.replicatedJobs: Invalid value: replicas must be 1"]
    return []


def _jobset_problems(body: Object) -> list[str]:
    found, name = [], body["metadata"]["name"]
    for job in body["spec"].get("replicatedJobs") or ():
        spec = job["template"].get("spec") or {}
        longest = f"{name}-{job['name']}-{job.get('replicas', 1) - 1}"
        if not DNS_1035.fullmatch(longest) or len(longest) > 63:
            found.append(f'jobset name "{name}": job name "{longest}" is no DNS-1035 label')
        last = f"{longest}-{spec.get('completions', 1) - 1}-abcde"
        if len(last) > 63:
            found.append(f'pod name "{last}" will exceed the limit of 63 characters')
    return found


def _job_problems(body: Object) -> list[str]:
    name, spec = body["metadata"]["name"], body["spec"]
    found = list(pod_problems(spec["template"], "spec.template.spec"))
    policy = spec["template"]["spec"].get("restartPolicy")
    path = "spec.template.spec.restartPolicy"
    if policy not in ("OnFailure", "Never"):
        known = 'supported values: "OnFailure", "Never"'
        found.append(f"{path}: Required value: valid values: {known.partition(': ')[2]}")
    if spec.get("podFailurePolicy") and policy != "Never":
        found.append(f"{path}: Invalid value: only Never is supported with podFailurePolicy")
    if spec.get("completionMode") == "Indexed":
        if spec.get("completions") is None:
            found.append("spec.completions: Required value: when completion mode is Indexed")
        if not is_dns_label(f"{name}-{(spec.get('completions') or 1) - 1}"):
            words = "will not be able to create pod with valid DNS name"
            found.append(f'metadata.name: Invalid value: "{name}": {words}')
    if spec.get("backoffLimitPerIndex") is not None:
        if spec.get("completionMode") != "Indexed":
            found.append("spec.backoffLimitPerIndex: Invalid value: requires indexed completion")
        if policy != "Never":
            found.append(
                f"{path}: Invalid value: only Never is supported with backoffLimitPerIndex"
            )
    elif spec.get("maxFailedIndexes") is not None:
        found.append(
            "spec.backoffLimitPerIndex: Required value: when maxFailedIndexes is specified"
        )
    if spec.get("podFailurePolicy") and spec.get("podReplacementPolicy", "Failed") != "Failed":
        found.append("spec.podReplacementPolicy: Unsupported value: only Failed with a policy")
    if not is_dns_subdomain(name):
        found.append(f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain')
    return found
