"""Rules about the scheduling of pods, their number, and the fields that they read of themselves."""

import re
from collections.abc import Iterator

from toolkit.lint.manifests.command import launches
from toolkit.lint.manifests.pods import containers_of, pods_of
from toolkit.lint.manifests.registry import Fault, rule
from toolkit.lint.manifests.rules.schema import said
from toolkit.text.manifests import Stream, View
from toolkit.text.quantities import amount, whole_number

__all__: list[str] = []

_OWN_FIELD = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])"
    r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?)"
)


@rule(
    "toleration-odd",
    finds="a toleration that contradicts itself",
    reason="The server refuses it.",
    fix="write operator: Exists without a value, or Equal with key and value; tolerationSeconds "
    "with effect: NoExecute alone",
)
def _tolerations(stream: Stream) -> Iterator[Fault]:
    for pods in pods_of(stream):
        for one in pods.spec.at("tolerations").items():
            exists = one.text("operator") == "Exists"
            if exists and one.text("value"):
                yield Fault(at=one.at("value"), what="operator Exists takes no value")
            elif not one.text("key") and not exists:
                yield Fault(at=one, what="a toleration without a key needs operator: Exists")
            elif one.at("tolerationSeconds") and one.text("effect") != "NoExecute":
                yield Fault(at=one, what="tolerationSeconds is for the effect NoExecute")


@rule(
    "expression-values",
    finds="In or NotIn without values, or Exists with some, in a selector or an affinity",
    reason="The server refuses it.",
    fix="write values: [...] for In and NotIn, and none for Exists and DoesNotExist",
)
def _expressions(stream: Stream) -> Iterator[Fault]:
    for pods in pods_of(stream):
        for key in ("affinity", "topologySpreadConstraints"):
            yield from _expressions_of(pods.spec.at(key))
    for manifest in stream.of("NetworkPolicy", "Job"):
        yield from _expressions_of(manifest.view.at("spec", "podSelector"))


def _expressions_of(view: View) -> Iterator[Fault]:
    for _, entry in view.entries():
        yield from _expressions_of(entry)
    for item in view.items():
        operator, values = item.text("operator"), list(item.at("values").items())
        if operator in ("In", "NotIn") and not values:
            yield Fault(at=item, what=f"{operator} without values")
        elif operator in ("Exists", "DoesNotExist") and values:
            yield Fault(at=item.at("values"), what=f"{operator} takes no values")
        yield from _expressions_of(item)


@rule(
    "host-network-dns",
    finds="hostNetwork without dnsPolicy: ClusterFirstWithHostNet",
    reason="Such pods ask the node's resolver, which knows no Services: no peer is found.",
    fix="write dnsPolicy: ClusterFirstWithHostNet",
)
def _dns(stream: Stream) -> Iterator[Fault]:
    for pods in pods_of(stream):
        if pods.spec.at("hostNetwork").value is True:
            policy = pods.spec.at("dnsPolicy")
            if policy.value in (None, "ClusterFirst", "Default"):
                at = policy if policy else pods.spec.at("hostNetwork")
                yield Fault(at=at, what="these pods ask the node's resolver")


@rule(
    "elastic-range",
    finds="an elasticPolicy whose range does not hold the number of workers",
    reason="The operator refuses it, or torchrun waits for pods that are never made.",
    fix="write minReplicas <= replicas <= maxReplicas",
)
def _ranges(stream: Stream) -> Iterator[Fault]:
    for manifest in stream.of("PyTorchJob"):
        policy = manifest.view.at("spec", "elasticPolicy")
        least, most = policy.whole("minReplicas"), policy.whole("maxReplicas")
        replicas = manifest.view.at("spec", "pytorchReplicaSpecs", "Worker", "replicas")
        count = replicas.whole() if replicas else 1
        if least is not None and most is not None and least > most:
            yield Fault(at=policy.at("minReplicas"), what=f"from {least} to {most} is no range")
        elif policy and count is not None and not (least or 0) <= count <= (most or count):
            yield Fault(
                at=replicas,
                what=f"{count} workers, where minReplicas is {said(least)} and maxReplicas "
                f"{said(most)}",
            )


@rule(
    "nproc-gpus",
    finds="torchrun with more workers than its container has GPUs",
    reason="Two workers would share a GPU, which NCCL refuses.",
    fix="make --nproc-per-node (nprocPerNode, numProcPerNode) the number of GPUs",
)
def _workers(stream: Stream) -> Iterator[Fault]:
    for launch in launches(stream):
        limits = launch.container.resources.at("limits")
        gpus = [(name, amount(v.value)) for name, v in limits.entries() if name.endswith("/gpu")]
        spec = launch.pods.owner.view.at("spec")
        number = launch.option("nproc-per-node")
        places = [spec.at("nprocPerNode"), spec.at("trainer", "numProcPerNode")]
        at = next((place for place in places if place), launch.container.view.at("args"))
        if number is None and at.value is not None and not isinstance(at.value, tuple):
            number = str(at.value)
        for name, count in gpus:
            if number and count and (whole_number(number) or 0) > count:
                yield Fault(at=at, what=f"{number} workers, and {name}: {limits.at(name).value}")


@rule(
    "field-path",
    finds="a fieldRef to what pods do not show of themselves",
    reason="The server refuses the pod.",
    fix="write one of metadata.name, .namespace, .uid, .labels['KEY'], .annotations['KEY'], "
    "spec.nodeName, spec.serviceAccountName, status.hostIP, status.podIP",
)
def _paths(stream: Stream) -> Iterator[Fault]:
    for container in containers_of(stream):
        for entry in container.view.at("env").items():
            path = entry.at("valueFrom", "fieldRef", "fieldPath")
            if path.text() and not _OWN_FIELD.fullmatch(path.text()):
                yield Fault(at=path, what=f"{path.text()!r} is no such field")
