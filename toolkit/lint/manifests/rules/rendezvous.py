"""Rules about the rendezvous of pods: torchrun options, operators' variables, Services."""

import re
from collections.abc import Iterator

from toolkit.lint.manifests.pods import Launch, containers_of, launches, pods_of
from toolkit.lint.manifests.rules.schema import shown
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Stream, View
from toolkit.text.quantities import whole_number

_RESERVED = (
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK"),
    *("PET_MASTER_ADDR", "PET_MASTER_PORT"),
)
"""Variables that Trainer's webhook reserves (torch plugin)."""

_INJECTED = (*_RESERVED, "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""Variables that the Training Operator sets in every pod of a PyTorchJob."""

_ELASTIC = ("PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_MAX_RESTARTS")
"""Additional variables that the operator sets with an elasticPolicy."""

_EACH_RANK = ("LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE")
"""Variables that only torchrun can set, for each worker."""


@MANIFESTS.rule(
    "variable-reserved",
    finds="a variable in a TrainJob that Trainer reserves (PET_NNODES …)",
    reason="Its webhook refuses the TrainJob (Trainer 2.3).",
    fix="set trainer.numNodes and trainer.numProcPerNode",
)
def _reserved(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        if container.pods.kind == "TrainJob" and container.view.path[-1] == "trainer":
            for name, entry in container.env.items():
                if name in _RESERVED:
                    yield Violation(entry, f"{name} is Trainer's own")


@MANIFESTS.rule(
    "variable-by-hand",
    finds="RANK, WORLD_SIZE, MASTER_ADDR or PET_… set by hand, although the operator or torchrun "
    "sets it",
    reason="A fixed value is the same in every pod: every pod takes itself for the same node, or "
    "waits for others that never arrive.",
    fix="leave it out; the operator sets it in each pod as it must be",
)
def _by_hand(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        taken: tuple[str, ...] = ()
        if container.pods.kind == "PyTorchJob":
            elastic = container.pods.owner.view.at("spec", "elasticPolicy")
            taken = (*_INJECTED, *_ELASTIC) if elastic else _INJECTED
        for name, entry in container.env.items():
            fixed = entry.at("value") and name in ("RANK", "PET_NODE_RANK", "NODE_RANK")
            if name in taken or name in _EACH_RANK:
                yield Violation(entry, f"{name} is set by hand")
            elif fixed and container.pods.several and container.pods.kind != "TrainJob":
                yield Violation(
                    entry,
                    f"{name}={entry.text('value')} is the same in every pod",
                    fix="take it from the pod's index: valueFrom: {fieldRef: {fieldPath: "
                    "metadata.annotations['batch.kubernetes.io/job-completion-index']}}",
                )


@MANIFESTS.rule(
    "nproc-per-node",
    finds="nprocPerNode that is neither a number in quotes nor auto, gpu or cpu",
    reason="The field is a string, which torchrun reads.",
    fix='write nprocPerNode: "8"',
)
def _nproc(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.of("PyTorchJob"):
        count = manifest.view.at("spec", "nprocPerNode")
        if count and not re.fullmatch(r"auto|gpu|cpu|[1-9][0-9]*", count.text()):
            yield Violation(count, f"nprocPerNode: {shown(count.value)} is no such string")


@MANIFESTS.rule(
    "rdzv-id-missing",
    finds="an elastic PyTorchJob, or torchrun with c10d in several pods, without a rendezvous id",
    reason="Every run uses the id `none`: pods of another run, or of an earlier one with the same "
    "name, could join.",
    fix="write elasticPolicy.rdzvId, or torchrun --rdzv-id=NAME",
)
def _ids(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        c10d = launch.option("rdzv-backend") == "c10d" and launch.pods.several
        if c10d and launch.option("rdzv-id") is None and not _elastic(launch):
            at = launch.container.view.at("args")
            yield Violation(at, "torchrun meets by c10d and has no --rdzv-id")
    for manifest in stream.of("PyTorchJob"):
        policy = manifest.view.at("spec", "elasticPolicy")
        own = [launch for launch in launches(stream) if launch.pods.owner is manifest]
        has_id = any(launch.option("rdzv-id") is not None for launch in own)
        if policy and not policy.at("rdzvId") and not has_id:
            yield Violation(policy, "this elastic job has no rdzvId")


@MANIFESTS.rule(
    "store-shared",
    finds="torchrun with c10d in several pods without TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    reason="Restarted ranks reuse the rendezvous store, find the keys of the previous start, and "
    "wait: a returning pod joins after 81 s instead of 15, or never (torch 2.13).",
    fix='set the variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE to "1"',
)
def _stores(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        policy = launch.pods.owner.view.at("spec", "elasticPolicy")
        backend = policy.text("rdzvBackend") if _elastic(launch) else launch.option("rdzv-backend")
        c10d = backend in (*_SHARE_STORE, *([""] if _elastic(launch) else []))
        set_there = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in launch.container.env
        if c10d and launch.pods.several and not set_there and not launch.pods.partly:
            at = launch.container.view.at("env")
            yield Violation(at, "restarts share the store of the rendezvous")


_SHARE_STORE = ("c10d", "etcd-v2")
"""Rendezvous backends that also share their store with the ranks (torch 2.13)."""


def _elastic(launch: Launch) -> bool:
    policy = launch.pods.owner.view.at("spec", "elasticPolicy")
    return launch.pods.kind == "PyTorchJob" and bool(policy)


@MANIFESTS.rule(
    "elastic-nnodes",
    finds="torchrun --nnodes=N in the pods of a PyTorchJob with an elasticPolicy",
    reason="The command line takes precedence over PET_NNODES: the job is not elastic, and waits "
    "for N pods.",
    fix="leave --nnodes out: the operator sets PET_NNODES=MIN:MAX",
)
def _fixed(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        nnodes = launch.options.get("nnodes", "")
        if _elastic(launch) and nnodes.isdecimal():
            view = launch.container.view
            at = view.at("args" if any("nnodes" in w for w in view.words("args")) else "command")
            yield Violation(at, f"--nnodes={nnodes} is a fixed number, beside an elasticPolicy")


@MANIFESTS.rule(
    "metric-unknown",
    finds="an elasticPolicy or a HorizontalPodAutoscaler that scales by a resource other than cpu "
    "and memory",
    reason="The HorizontalPodAutoscaler knows only the metrics of these two: it does not scale by "
    "others, and reports FailedGetResourceMetric.",
    fix="write a metric of type Pods or External, or leave metrics out",
)
def _metrics(stream: Stream) -> Iterator[Violation[View]]:
    specs = [job.view.at("spec", "elasticPolicy") for job in stream.of("PyTorchJob")]
    specs += [scaler.view.at("spec") for scaler in stream.of("HorizontalPodAutoscaler")]
    for spec in specs:
        for metric in spec.at("metrics").items():
            for kind in ("resource", "containerResource"):
                name = metric.at(kind, "name")
                if name.text() and name.text() not in ("cpu", "memory"):
                    yield Violation(
                        name, f"the autoscaler has no metric for the resource {name.text()!r}"
                    )


@MANIFESTS.rule(
    "torchrun-alone",
    finds="torchrun in several pods of a Job or JobSet that knows of one node or another number of "
    "nodes, or that meets at localhost",
    reason="Job and JobSet do not configure torchrun: each pod trains alone and writes the same "
    "checkpoints, or waits for the others.",
    fix="give torchrun --nnodes, --rdzv-backend=c10d and --rdzv-endpoint=NAME-0.SUBDOMAIN:29500, "
    "or set PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT",
)
def _alone(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        if launch.pods.kind not in ("Job", "JobSet") or not launch.pods.several:
            continue
        nodes = launch.option("nnodes")
        standalone = launch.option("standalone") is not None
        where = launch.option("rdzv-endpoint") or launch.option("master-addr")
        at = launch.container.view.at("args")
        at = at if at else launch.container.view.at("command")
        count = launch.pods.together
        if standalone or nodes is None or nodes == "1":
            yield Violation(at, f"torchrun knows of one node, and there are {count} pods")
        elif nodes.isdecimal() and whole_number(nodes) != count:
            yield Violation(
                at,
                f"torchrun waits for {nodes} nodes, and there are {count} pods",
                fix="make them equal",
            )
        elif where is not None and re.match(r"localhost|127\.", where):
            yield Violation(at, f"every pod meets at {where}, which is itself")


# ---- Services and selectors

_OTHERS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
"""Kinds with pods that do not train."""


@MANIFESTS.rule(
    "service-not-ready",
    finds="a headless Service without publishNotReadyAddresses",
    reason="Pods that must meet to become ready cannot find each other before they are ready.",
    fix="write publishNotReadyAddresses: true",
)
def _not_ready(stream: Stream) -> Iterator[Violation[View]]:
    if next(stream.of(*_OTHERS), None) is not None:
        return  # their pods may need the default
    for service in stream.of("Service"):
        spec = service.view.at("spec")
        if spec.at("clusterIP").value == "None" and (
            spec.at("publishNotReadyAddresses").value is not True
        ):
            at = spec.at("publishNotReadyAddresses")
            yield Violation(at, f"the Service {service.name!r} hides pods that are not ready")


@MANIFESTS.rule(
    "service-not-headless",
    finds="a subdomain with a Service that is not headless",
    reason="Only a headless Service gives each pod a name.",
    fix="write clusterIP: None",
)
def _not_headless(stream: Stream) -> Iterator[Violation[View]]:
    subdomains = {pods.spec.text("subdomain") for pods in pods_of(stream)}
    for service in stream.of("Service"):
        address = service.view.at("spec", "clusterIP")
        if service.name in subdomains and address.value != "None":
            yield Violation(address, f"the Service {service.name!r} is not headless")


@MANIFESTS.rule(
    "selector-matches-nothing",
    finds="a Service or NetworkPolicy that selects no pod of the file",
    reason="The Service has no addresses, and the policy protects nothing: a label differs or "
    "is missing.",
    fix="write the labels that the pods have",
)
def _selectors(stream: Stream) -> Iterator[Violation[View]]:
    pods = [pods for pods in pods_of(stream) if not pods.partly]
    owners = {id(one.owner) for one in pods_of(stream)}
    foreign = any(manifest.kind in ("TrainJob", *_OTHERS) for manifest in stream.manifests)
    foreign = foreign or not all(one.kind for one in pods_of(stream))
    if not owners or foreign:
        return  # the target may be in another file
    for manifest in stream.of("Service", "NetworkPolicy"):
        service = manifest.kind == "Service"
        path = ("selector",) if service else ("podSelector", "matchLabels")
        selector = manifest.view.at("spec", *path)
        labels = selector.labels()
        near = [p for p in pods if manifest.namespace in ("", p.owner.namespace)]
        if labels and not any(labels.items() <= one.labels.items() for one in near):
            what = ", ".join(f"{key}={value}" for key, value in labels.items())
            yield Violation(selector, f"no pod here has the labels {what}")
