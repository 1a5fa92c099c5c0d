"""The settings of a job that only Kubernetes uses."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from toolkit.job.types import Checked, FrozenModel, SecretName, Text
from toolkit.text.yaml_reader import Ambiguous

Workload = Literal["PyTorchJob", "TrainJob", "JobSet", "Job"]
"""The kinds of objects that a job can become."""

PLAIN_CAPABILITIES = frozenset(
    {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"}
    | {"NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
)
"""Capabilities that `baseline` allows (Pod Security Standards)."""

_IMAGE_NAME = (
    r"([a-zA-Z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?"
)
"""Distribution/reference: host, path, tag, digest."""


def is_image_name(text: str) -> bool:
    """Whether a text looks like the name of an image, as nodes pull it."""
    return re.fullmatch(_IMAGE_NAME, text) is not None


def _in_one_meaning(value: Any) -> Any:
    """Return the content of a patch; raise ValueError for a word that YAML does not agree on."""
    todo: list[object] = [value]
    while todo:
        match todo.pop():
            case Ambiguous() as word:
                raise ValueError(word.reason)
            case Mapping() as inner:
                todo += inner.values()
            case list() | tuple() as inner:
                todo += inner
    return value


class Patch(FrozenModel):
    """A change to a rendered object, for settings that have no key."""

    kind: Text | None = None
    """The kind of the object to change, like `Service`; by default the workload."""

    merge: Annotated[dict[Text, Any], Checked(_in_one_meaning)] | None = None
    """A strategic merge patch: lists like `containers` and `volumes` are merged by the same keys as
    in Kubernetes, and null removes a key."""

    json_patch: Annotated[tuple[dict[Text, Any], ...], Checked(_in_one_meaning)] | None = Field(
        default=None, alias="json"
    )
    """A JSON Patch (RFC 6902): a list of operations, applied in order."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        names = {"merge": ("merge",), "json": ("json", "json_patch")}  # as written, and as read
        given_keys = [
            key for key, own in names.items() if any(given.get(n) is not None for n in own)
        ]
        if len(given_keys) == 1:
            return []
        return [f"give one of merge and json; found {' and '.join(given_keys) or 'none'}"]


class KubernetesOptions(FrozenModel):
    """Settings of a job that only Kubernetes uses."""

    workload: Workload | None = None
    """The kind of object to create; by default the profile's."""

    queue: SecretName | None = None
    """The LocalQueue of Kueue; by default the profile's."""

    priority_class: SecretName | None = None
    """The PriorityClass of the pods; by default the profile's."""

    patches: tuple[Patch, ...] = ()
    """Changes to the rendered objects, applied after those of the profile."""
