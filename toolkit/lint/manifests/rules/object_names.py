"""Rules about the names of objects, pods and labels, and about duplicates."""

import re
from collections.abc import Iterator

from toolkit.lint.manifests.pods import containers_of, pods_of
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Manifest, Stream, View

_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_RULE = re.compile(r"[A-Za-z_]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")  # failurePolicy rule (JobSet)
_MOST = 63
_SUFFIX = "-abcde"  # example of the suffix that a Job adds to pod names

_STRICT = ("PyTorchJob", "TrainJob", "JobSet", "Service")
"""Kinds with RFC 1035 labels as names (webhooks require this; for a Service, the API)."""

_LABELS_1123 = ("Job", "Pod", "Namespace")
"""Kinds with names that become host names or domain labels."""

_1035_WORDS = "small letters, digits and '-', beginning with a letter (RFC 1035)"
_1123_WORDS = "small letters, digits and '-' (RFC 1123)"


@MANIFESTS.rule(
    "name-invalid",
    finds="a name that Kubernetes, or the kind's webhook, refuses",
    reason="Names of workloads, Pods and Services become host names: small letters, digits and "
    "'-', at most 63, for a PyTorchJob, TrainJob, JobSet, and a Service before Kubernetes 1.36, "
    "beginning with a letter. Most other objects take 253 characters, and '.'.",
    fix="give it another name",
)
def _names(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.manifests:
        yield from _object_name(manifest)
        for rules in (("failurePolicy",), ("template", "spec", "failurePolicy")):
            for entry in manifest.view.at("spec", *rules, "rules").items():
                name = entry.at("name")
                if name.text() and not _RULE.fullmatch(name.text()):
                    what = f"the rule's name {name.text()!r} is not letters, digits and '_'"
                    yield Violation(name, what)
    for pods in pods_of(stream):
        if pods.kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
            path = pods.job.path[:-2]  # …, replicatedJobs, N, template, spec
            job = pods.owner.view.at(*path).at("name")
            if job.text() and not _1035.fullmatch(job.text()):
                yield Violation(job, f"the name {job.text()!r} is not {_1035_WORDS}")
        named = [(one.view.at("name"), "container") for one in pods.all_containers]
        named += [(one.at("name"), "volume") for one in pods.spec.at("volumes").items()]
        for name, kind in named:
            text = name.text()
            if isinstance(name.value, str) and not (_1123.fullmatch(text) and len(text) <= _MOST):
                what = f"the name {text!r} of a {kind} is not {_1123_WORDS}, at most {_MOST}"
                yield Violation(name, what)


def _object_name(manifest: Manifest) -> Iterator[Violation[View]]:
    metadata = manifest.view.at("metadata")
    name, text = metadata.at("name"), manifest.name
    if not name and metadata and not metadata.text("generateName") and not manifest.inside:
        yield Violation(metadata, f"this {manifest.kind} has no name")
    if not isinstance(name.value, str):
        return  # field-type
    if manifest.kind in _STRICT:
        pattern, most, words = _1035, _MOST, _1035_WORDS
    elif manifest.kind in _LABELS_1123:
        pattern, most, words = _1123, _MOST, _1123_WORDS
    else:
        pattern, most, words = _SUBDOMAIN, 253, f"{_1123_WORDS}, parted by '.'"
    if not pattern.fullmatch(text):
        yield Violation(name, f"the name {text!r} of a {manifest.kind} is not {words}")
    elif len(text) > most:
        yield Violation(name, f"the name {text!r} has {len(text)} characters; {most} are taken")


@MANIFESTS.rule(
    "pod-name-too-long",
    finds="a name that is too long for the pod names derived from it",
    reason="NAME-worker-12, NAME-node-0-12-abcde and NAME-12 are host names, of 63 characters at "
    "most: the object is refused, or no pod is made (Training Operator 1.9, JobSet 0.12).",
    fix="shorten the name of the object, or of the replicated job",
)
def _pod_names(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.of("PyTorchJob", "JobSet", "TrainJob", "Job"):
        name, longest = manifest.name, ""
        if len(name) > _MOST:
            continue  # name-invalid
        for pods in pods_of(stream):
            if pods.owner is not manifest:
                continue
            last = max((pods.count or 1) - 1, 0)
            replicas = manifest.view.at(*pods.job.path[:-2]).whole("replicas") or 1
            made = {
                "PyTorchJob": f"{name}-{pods.role.lower()}-{last}",
                "JobSet": f"{name}-{pods.role}-{replicas - 1}-{last // replicas}{_SUFFIX}",
                "Job": f"{name}-{last}",
            }.get(manifest.kind, "")
            longest = max(longest, made, key=len)
        if manifest.kind == "TrainJob":
            nodes = manifest.view.whole("spec", "trainer", "numNodes") or 1
            longest = f"{name}-node-0-{nodes - 1}{_SUFFIX}"
        if len(longest) > _MOST:
            size = f"of {len(longest)} characters; {_MOST} are taken"
            what = f"{name!r} makes the pod {longest!r}, {size}"
            yield Violation(manifest.view.at("metadata", "name"), what)


@MANIFESTS.rule(
    "label-invalid",
    finds="a label, selector or annotation with a key or value that Kubernetes refuses",
    reason="A label's value has at most 63 letters, digits, '-', '_' and '.'; its key may start "
    "with a domain and '/'.",
    fix="shorten it, or write it as an annotation",
)
def _labels(stream: Stream) -> Iterator[Violation[View]]:
    for manifest in stream.manifests:
        yield from _metadata(manifest.view.at("metadata"))
        for field in (("spec", "selector"), ("spec", "podSelector", "matchLabels")):
            if manifest.kind in ("Service", "NetworkPolicy"):
                yield from _pairs(manifest.view.at(*field))
    for pods in pods_of(stream):
        if pods.kind != "Pod":
            yield from _metadata(pods.template.at("metadata"))
        yield from _pairs(pods.spec.at("nodeSelector"))


def _metadata(view: View) -> Iterator[Violation[View]]:
    yield from _pairs(view.at("labels"))
    yield from _pairs(view.at("annotations"), values=False)


def _pairs(view: View, *, values: bool = True) -> Iterator[Violation[View]]:
    for key, entry in view.entries():
        prefix, slash, name = key.rpartition("/")
        good = _SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253 if slash else True
        if not (good and _LABEL.fullmatch(name)):
            yield Violation(entry, f"{key!r} is not a valid key of a label or annotation")
        elif values and entry.text() and not _LABEL.fullmatch(entry.text()):
            yield Violation(entry, f"{key}: {entry.text()!r} is not a valid label value")


@MANIFESTS.rule(
    "entry-duplicate",
    finds="two containers, volumes, variables, ports or replicated jobs with the same name, or two "
    "mounts at the same path",
    reason="Server-side apply refuses them; elsewhere the last one wins, or the pod is refused.",
    fix="leave one of them out",
)
def _duplicates(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        listed = (*pods.spec.at("containers").items(), *pods.spec.at("initContainers").items())
        yield from _twice(listed, "name", "container")
        yield from _twice(pods.spec.at("volumes").items(), "name", "volume")
    for container in containers_of(stream):
        view = container.view
        yield from _twice(view.at("env").items(), "name", "variable")
        yield from _twice(view.at("volumeMounts").items(), "mountPath", "mount at")
        yield from _twice(view.at("ports").items(), "name", "port")
    for manifest in stream.of("JobSet"):
        jobs = manifest.view.at("spec", "replicatedJobs").items()
        yield from _twice(jobs, "name", "replicated job")


def _twice(
    entries: Iterator[View] | tuple[View, ...], key: str, what: str
) -> Iterator[Violation[View]]:
    seen: set[str] = set()
    for entry in entries:
        name = entry.text(key)
        if key == "mountPath":
            name = name.rstrip("/") or name
        if name and name in seen:
            yield Violation(entry, f"a second {what} {name!r}")
        seen.add(name)


@MANIFESTS.rule(
    "object-duplicate",
    finds="an object defined twice in a file",
    reason="With kubectl apply, the second one overwrites the first; kubectl create refuses it.",
    fix="leave one out, or give it another name",
)
def _objects(stream: Stream) -> Iterator[Violation[View]]:
    seen: dict[tuple[str, ...], View] = {}
    for manifest in stream.manifests:
        key = (manifest.group, manifest.kind, manifest.namespace, manifest.name)
        name = manifest.view.at("metadata", "name")
        if manifest.name and (first := seen.setdefault(key, name)) is not name:
            place = first.manifest.place(first.path)
            yield Violation(name, f"{manifest.kind} {manifest.name!r} stands at {place} already")
