"""What a strict server has against a manifest, and what a kubelet makes of its container."""

import json
import os
from string import Template
from typing import Any

from jsonschema import Draft202012Validator
from kubeflow_trainer_api import models
from kubernetes import client

from tests.conftest import ROOT
from tests.fakes.kubernetes.containers import expand
from tests.support.kubernetes_schemas import faults_of
from tests.support.rendered import read, template_of, workload

SCHEMAS = ROOT / "tests/fakes/kubernetes/schemas"


def strict(schema: Any) -> Any:
    """Return a CustomResourceDefinition's schema that takes no unknown field, as a server does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    return found


def schema_of(plural: str) -> Draft202012Validator:
    schema = strict(json.loads((SCHEMAS / f"{plural}.json").read_text()))
    return Draft202012Validator(schema)


CUSTOM = {kind: schema_of(f"{kind.lower()}s") for kind in ("PyTorchJob", "TrainJob", "JobSet")}
MODELS: dict[str, Any] = {
    "Job": client.V1Job,
    "NetworkPolicy": client.V1NetworkPolicy,
    "Service": client.V1Service,
}
ROUND_TRIPS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "JobSet": models.JobsetV1alpha2JobSet,
}


def faults(text: str, *, versions: tuple[str, ...] = ("1.34",)) -> list[str]:
    """Return what a server under strict validation would say against a manifest."""
    found: list[str] = []
    for document in read(text):
        kind = document["kind"]
        if kind in CUSTOM:
            found += (f"{e.json_path}: {e.message}" for e in CUSTOM[kind].iter_errors(document))
            metadata = {**document["metadata"], "name": "pod"}
            template = template_of(document) if kind != "TrainJob" else None
            if template:
                client.V1PodTemplateSpec.model_validate(template)
                spec = {"restartPolicy": "Never", **template["spec"]}
                job = {"template": {**template, "spec": spec}}
                core = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}
                found += [fault for version in versions for fault in faults_of(core, version)]
        elif kind in MODELS:
            MODELS[kind].model_validate(document)  # refuses unknown fields
            found += [fault for version in versions for fault in faults_of(document, version)]
        if kind in ROUND_TRIPS:
            again = ROUND_TRIPS[kind].from_dict(document).to_dict()
            found += [] if again == document else [f"{kind}: fields got lost"]
        assert not any(key == "suspend" for key in document.get("spec", {}))
    return [*found, *_twice(workload(text))]


def _twice(document: Any) -> list[str]:
    spec = template_of(document)["spec"]
    (container,) = spec["containers"]
    found = []
    for what, entries, key in (
        ("env", container["env"], "name"),
        ("volumeMounts", container["volumeMounts"], "mountPath"),
        ("volumes", spec["volumes"], "name"),
    ):
        keys = [entry[key] for entry in entries]
        found += [f"{what}: duplicate {name!r}" for name in set(keys) if keys.count(name) > 1]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    return found + ([] if mounted == {v["name"] for v in spec["volumes"]} else ["volumes"])


def arrives(container: Any) -> tuple[dict[str, bytes], list[bytes]]:
    """Return the environment and the arguments as the kubelet expands them."""
    env: dict[str, bytes] = {}
    values: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:
            env[entry["name"]] = expand(entry["value"], values)
            values[entry["name"]] = os.fsdecode(env[entry["name"]])
    return env, [expand(word, values) for word in container["args"]]


def entry_of(arguments: list[bytes]) -> list[bytes]:
    """Return what torchrun starts, without its own options, and with its macros expanded."""
    words = map(os.fsdecode, arguments[arguments.index(b"-m") :])
    return [os.fsencode(Template(word).safe_substitute()) for word in words]
