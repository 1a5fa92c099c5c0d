"""Rendered manifests as the tests read them: the documents, and the pods of each kind."""

import base64
import functools
from pathlib import Path
from typing import Any

import yaml

import toolkit

KINDS = ("PyTorchJob", "TrainJob", "JobSet", "Job")

JOB: dict[str, Any] = {"name": "t", "module": "train", "image": "registry.io/train:1"}


def manifest(job: dict[str, Any], profile: dict[str, Any], kind: str | None = None) -> str:
    """Return the manifest of a job and a profile, for a kind of object; it carries nothing."""
    keys = {"name": "k8s", "supervisor": "installed", **profile}
    site = toolkit.KubernetesProfile.model_validate(keys)
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


def pod_command(text: str, folder: Path) -> list[str]:
    """Return what the container of a manifest starts, up to torchrun, as it runs on this machine.

    The supervisor that the manifest carries is put into the folder.
    """
    container = container_of(workload(text))
    (packed,) = (one["binaryData"] for one in read(text) if one["kind"] == "ConfigMap")
    program = folder / "supervisor.pyz"
    program.write_bytes(base64.b64decode(packed["supervisor.pyz"]))
    command = [
        word.replace("/supervisor/supervisor.pyz", str(program)) for word in container["command"]
    ]
    return [*command, *container["args"][: container["args"].index("--") + 1]]


def container_of(document: Any) -> Any:
    """Return the container of the pods."""
    (container,) = template_of(document)["spec"]["containers"]
    return container
