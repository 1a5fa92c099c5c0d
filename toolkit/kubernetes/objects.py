"""The objects of a run: the rendered manifest, and the files for its pods."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import yaml

from toolkit.kubernetes.workloads import Kind, Object
from toolkit.planning.kubernetes import STARTED, KubernetesPlan, with_checksums
from toolkit.planning.pods import RUN_LABEL
from toolkit.rendering import render

__all__ = [
    "PAYLOAD_LIMIT",
    "Group",
    "apart",
    "checksums",
    "documents_of",
    "groups_for",
    "groups_of",
    "is_of",
    "manifest_for",
    "started_again",
    "with_files",
]

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C, where PyYAML was built with it: a sweep has thousands of objects."""

JOB_ANNOTATION = "torch-deploy-toolkit/job"

PAYLOAD_LIMIT = 1024 * 1024 - 16 * 1024
"""Bytes of a run's files in a ConfigMap, which holds 1 MiB, keys and names included."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A run's objects."""

    companions: Sequence[Object]
    """What must be there before it, and goes with it."""

    workload: Object
    """The object that makes the pods."""

    payload: Object | None = None
    """The ConfigMap that its pods find their files in: made after the run, and owned by it."""

    apart: Mapping[str, bytes] = field(default_factory=dict)
    """What its pods find in their run directory, by path, since no ConfigMap holds it."""

    @property
    def name(self) -> str:
        """The name of the object."""
        return str(self.workload["metadata"]["name"])


def documents_of(text: str) -> list[dict[str, Any]]:
    """Return the objects of a rendered manifest."""
    return [document for document in yaml.load_all(text, Loader=_Loader) if document]


def groups_of(text: str, kind: Kind) -> list[Group]:
    """Return the runs of a rendered manifest: one, or each point of a sweep."""
    groups: list[Group] = []
    companions: list[Object] = []
    for document in documents_of(text):
        if document["kind"] == kind.kind:
            groups.append(Group(companions=companions, workload=document))
            companions = []
        else:
            companions.append(document)
    return groups


def manifest_for(plan: KubernetesPlan, files: Mapping[str, bytes]) -> str:
    """Return the manifest of a run that is submitted with files."""
    return render(with_checksums(plan, checksums(files)) if files else plan)


def groups_for(manifest: str, kind: Kind, files: Mapping[str, bytes]) -> list[Group]:
    """Return the objects of a run that is submitted with files; of a sweep, of each point."""
    groups = groups_of(manifest, kind)
    return [with_files(group, files) for group in groups] if files else groups


def started_again(group: Group, token: str) -> Group:
    """Return the objects of a run that is submitted again under its name.

    The pods of a PyTorchJob have no label that distinguishes submissions, so a variable does.
    The cluster itself names the starts of all other pods.

    Args:
        group: The objects of the earlier submission.
        token: What no earlier submission of the run had.
    """

    def renewed(value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.get("name") == STARTED and "value" in value:
                return {**value, "value": f"{group.name}-{token}"}
            return {key: renewed(entry) for key, entry in value.items()}
        return [renewed(item) for item in value] if isinstance(value, list) else value

    return replace(group, workload=renewed(group.workload))


def with_files(group: Group, files: Mapping[str, bytes]) -> Group:
    """Return a run with the ConfigMap that its pods find their files in, by their names alone."""
    metadata = group.workload["metadata"]
    payload = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {key: metadata[key] for key in ("name", "namespace", "labels")},
        "binaryData": {name: b64encode(text).decode() for name, text in _small(files).items()},
        "immutable": True,
    }
    return replace(group, payload=payload, apart=apart(files))


def checksums(files: Mapping[str, bytes]) -> str:
    """Return what `sha256sum -c` wants of the files in a run's ConfigMap.

    The checksums travel with the run itself, which a user with only the right to create ConfigMaps
    cannot change.
    """
    rows = (f"{sha256(text).hexdigest()}  {name}" for name, text in _small(files).items())
    return "\n".join(sorted(rows))


def _small(files: Mapping[str, bytes]) -> dict[str, bytes]:
    large = apart(files)
    return {name.rpartition("/")[2]: text for name, text in files.items() if name not in large}


def apart(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those files that no ConfigMap holds beside the others: the largest."""
    rest = dict(sorted(files.items(), key=lambda item: len(item[1])))
    contents: dict[str, bytes] = {}
    while sum(map(len, rest.values())) > PAYLOAD_LIMIT:
        contents |= [rest.popitem()]
    return contents


def is_of(body: Object, obj: Object) -> bool:
    """Whether an existing object is the one that is to be created."""
    return _identity(body) == _identity(obj)


def _identity(thing: Object) -> tuple[str, str]:
    metadata = thing["metadata"]
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return str(labels.get(RUN_LABEL)), str(notes.get(JOB_ANNOTATION))
