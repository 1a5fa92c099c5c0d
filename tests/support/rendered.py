"""Rendered manifests as the tests read them: the documents, and the pods of each kind."""

import functools
from typing import Any

import yaml

import toolkit

KINDS = ("PyTorchJob", "TrainJob", "JobSet", "Job")

JOB: dict[str, Any] = {"name": "t", "module": "train", "image": "registry.io/train:1"}


def manifest(job: dict[str, Any], profile: dict[str, Any], kind: str | None = None) -> str:
    """Return the object of a kind in the manifest of a job and a profile."""
    site = toolkit.KubernetesProfile.model_validate({"name": "k8s", **profile})
    if kind:
        site = site.model_copy(update={"workload": kind})
    return toolkit.render(toolkit.plan(toolkit.JobSpec.model_validate(JOB | job), site))


def read(text: str) -> list[Any]:
    """Return the documents; both of PyYAML's readers must take them for the same."""
    _require_agreement(text)
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


@functools.lru_cache(maxsize=4)  # one text is read often, and the slow reader is slow
def _require_agreement(text: str) -> None:
    slow = list(yaml.load_all(text, Loader=yaml.SafeLoader))
    assert slow == list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def workload(text: str) -> Any:
    """Return the object that makes the pods: the last document."""
    return read(text)[-1]


def template_of(document: Any) -> Any:
    """Return the template of the pods of an object; of a TrainJob, the part that it contains
    itself."""
    spec = document["spec"]
    match document["kind"]:
        case "PyTorchJob":
            return spec["pytorchReplicaSpecs"]["Worker"]["template"]
        case "Job":
            return spec["template"]
        case "JobSet":
            return spec["replicatedJobs"][0]["template"]["spec"]["template"]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = node["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    trainer = spec["trainer"]
    container |= {key: trainer[key] for key in ("image", "command", "args", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    return template


def container_of(document: Any) -> Any:
    """Return the container of the pods."""
    (container,) = template_of(document)["spec"]["containers"]
    return container
