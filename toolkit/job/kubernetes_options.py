"""The Kubernetes settings that jobs and profiles share."""

import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from toolkit.job.types import (
    Checked,
    FrozenModel,
    NaturalInt,
    SecretName,
    Text,
    matching,
    schema_extra,
)
from toolkit.text.yaml_reader import Ambiguous

__all__ = [
    "KubernetesOptions",
    "LabelKey",
    "LabelValue",
    "Network",
    "Patch",
    "Toleration",
    "Topology",
    "Workload",
    "block_of",
    "is_image_name",
]

Workload = Literal["PyTorchJob", "TrainJob", "JobSet", "Job"]
"""The kinds of objects that a job can become."""

_IMAGE_NAME = (
    r"([a-zA-Z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?"
)
"""Distribution/reference: host, path, tag, digest."""

_PREFIX = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/"
LabelKey = Annotated[
    Text,
    *matching(
        rf"({_PREFIX})?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
        "write it as Kubernetes does, like topology.kubernetes.io/zone",
    ),
]
"""A label's key (Kubernetes, labels: an optional DNS prefix and a name of at most 63)."""

LabelValue = Annotated[
    Text,
    *matching(
        r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?",
        "a label's value has at most 63 letters, digits, '-', '_' and '.', none of these at an end",
    ),
]
"""A label's value."""


def is_image_name(text: str) -> bool:
    """Whether a text looks like the name of an image, as nodes pull it."""
    return re.fullmatch(_IMAGE_NAME, text) is not None


_METADATA = (ip_network("169.254.0.0/16"), ip_network("fd00:ec2::/32"))
"""Link-local addresses of IPv4, and Amazon's own of IPv6, at which clouds give the node's
rights to any client."""


def _network(value: str) -> str:
    try:
        network = ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write a network like 10.0.0.0/8") from None
    if any(_holds(one, network) for one in _METADATA):
        raise ValueError(f"{value!r} is where clouds hand out credentials; leave it out")
    return str(network)


def _holds(outer: IPv4Network | IPv6Network, inner: IPv4Network | IPv6Network) -> bool:
    return inner.network_address in outer and inner.prefixlen >= outer.prefixlen


Network = Annotated[Text, Checked(_network), schema_extra(examples=["10.0.0.0/8", "0.0.0.0/0"])]
"""Addresses that pods may reach, like `10.0.0.0/8`."""


def block_of(network: str) -> dict[str, Any]:
    """Return a network as an `ipBlock` of a NetworkPolicy, except the clouds' metadata services.

    >>> block_of("0.0.0.0/0")
    {'cidr': '0.0.0.0/0', 'except': ['169.254.0.0/16']}
    """
    whole = ip_network(network)
    inner = [str(one) for one in _METADATA if _holds(whole, one)]
    return {"cidr": network} | ({"except": inner} if inner else {})


T = TypeVar("T")


def _in_one_meaning(value: T) -> T:
    """Return the content of a patch.

    Raises:
        ValueError: versions of YAML read a word in it differently.
    """
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


class Toleration(FrozenModel):
    """A taint of nodes that the pods tolerate."""

    key: LabelKey | None = None
    """The taint's key; by default any."""

    operator: Literal["Equal", "Exists"] = "Equal"
    """`Equal` compares the value, `Exists` does not."""

    value: LabelValue | None = None
    """The taint's value."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; by default any."""

    toleration_seconds: NaturalInt | None = Field(default=None, alias="tolerationSeconds")
    """How many seconds a pod stays after a taint of `NoExecute`."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other (Kubernetes, validation of tolerations)."""
        problems = []
        if given.get("operator") == "Exists" and given.get("value"):
            problems.append(
                "operator Exists takes no value; leave it out, or write operator: Equal"
            )
        if not given.get("key") and given.get("operator") != "Exists":
            problems.append("a toleration without a key needs operator: Exists")
        waits = [given.get(key) for key in ("tolerationSeconds", "toleration_seconds")]
        if waits != [None, None] and given.get("effect") != "NoExecute":
            problems.append("tolerationSeconds needs effect: NoExecute")
        return problems


class Topology(FrozenModel):
    """How close to each other the pods must be."""

    key: LabelKey
    """The label with a node's location, like `topology.kubernetes.io/zone`."""

    required: bool = False
    """Whether the run waits for nodes with the same value, instead of taking any."""


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
