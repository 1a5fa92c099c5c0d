"""What a job or a profile may say of the Kubernetes objects that are made of it."""

import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from toolkit.job.loader import Checked, FrozenModel, Text
from toolkit.job.types import NaturalInt, SecretName, matching, schema_extra
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
"""Link-local addresses of IPv4, and Amazon's own of IPv6: there, clouds give the rights of the node
to any client."""


def _network(value: str) -> str:
    try:
        network = ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write a network like 10.0.0.0/8") from None
    if any(_holds(one, network) for one in _METADATA):
        raise ValueError(f"{value!r} is where clouds give out credentials; leave it out")
    return str(network)


def _holds(outer: IPv4Network | IPv6Network, inner: IPv4Network | IPv6Network) -> bool:
    return inner.network_address in outer and inner.prefixlen >= outer.prefixlen


Network = Annotated[Text, Checked(_network), schema_extra(examples=["10.0.0.0/8", "0.0.0.0/0"])]
"""Addresses that pods may reach, like `10.0.0.0/8`."""


def block_of(network: str) -> dict[str, Any]:
    """Return a network as an `ipBlock` of a NetworkPolicy, without the metadata services in it.

    >>> block_of("0.0.0.0/0")
    {'cidr': '0.0.0.0/0', 'except': ['169.254.0.0/16']}
    """
    whole = ip_network(network)
    inner = [str(one) for one in _METADATA if _holds(whole, one)]
    return {"cidr": network} | ({"except": inner} if inner else {})


T = TypeVar("T")


def _in_one_meaning(value: T) -> T:
    """Return what a patch holds.

    Raises:
        ValueError: a word in it is a string to one version of YAML and something else to another.
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
    """A change to a rendered object, for what the toolkit has no key for."""

    kind: Text | None = None
    """The kind of the object to change, like `Service`; the workload where it is left out."""

    merge: Annotated[dict[Text, Any], Checked(_in_one_meaning)] | None = None
    """What to lay over it, as a strategic merge patch: lists like `containers` and `volumes` merge
    by the key that Kubernetes merges them by, null removes a key."""

    json_patch: Annotated[tuple[dict[Text, Any], ...], Checked(_in_one_meaning)] | None = Field(
        default=None, alias="json"
    )
    """Operations to apply to it, one after the other (RFC 6902, JSON Patch)."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> list[str]:
        """Return what keys say against each other."""
        names = {"merge": ("merge",), "json": ("json", "json_patch")}  # as written, and as read
        there = [key for key, own in names.items() if any(given.get(n) is not None for n in own)]
        if len(there) == 1:
            return []
        return [f"one of merge and json says what to change; found {' and '.join(there) or 'none'}"]


class Toleration(FrozenModel):
    """A taint of nodes that the pods put up with."""

    key: LabelKey | None = None
    """The taint's key; any where it is left out."""

    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the value counts."""

    value: LabelValue | None = None
    """The taint's value."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """What the taint does; any where it is left out."""

    toleration_seconds: NaturalInt | None = Field(default=None, alias="tolerationSeconds")
    """How many seconds a pod stays under a taint of `NoExecute`."""

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
    """How near to each other the pods must be."""

    key: LabelKey
    """The label with a node's location, like `topology.kubernetes.io/zone`."""

    required: bool = False
    """Whether the run waits for nodes that have the same value, rather than taking any."""


class KubernetesOptions(FrozenModel):
    """What a job asks of Kubernetes alone; other places ignore it."""

    workload: Workload | None = None
    """What it becomes there; the profile's choice where it is left out."""

    queue: SecretName | None = None
    """The LocalQueue of Kueue; the profile's where it is left out."""

    priority_class: SecretName | None = None
    """The PriorityClass of the pods; the profile's where it is left out."""

    patches: tuple[Patch, ...] = ()
    """Changes to what is rendered, after those of the profile."""
