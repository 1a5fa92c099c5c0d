"""Rules about images, ports, mounts and ConfigMaps."""

import base64
import binascii
import re
from collections.abc import Iterator

from toolkit.job.kubernetes_options import is_image_name
from toolkit.lint.manifests.pods import containers_of, init_containers_of, pods_of
from toolkit.lint.manifests.rules.schema import shown
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Stream, View

_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9]|-(?!-)){0,14}(?<!-)")
_SERVICE_PORT = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LONGEST = 15  # name of a container's port
_MOST_BYTES, _MOST_APPLIED = 1_048_576, 262_144


@MANIFESTS.rule(
    "container-without-image",
    finds="a container without an image",
    reason="The server refuses the pods: nothing says what to run.",
    fix="write image: REGISTRY/NAME:TAG",
)
def _no_image(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        if not pods.partly:
            for one in pods.all_containers:
                if one.view.at("name") and not one.view.at("image"):
                    yield Violation(one.view, f"container {one.name!r} has no image")


@MANIFESTS.rule(
    "image-name",
    finds="an image that no registry could have",
    reason="The pod stays in InvalidImageName.",
    fix="write it like registry.example.com/team/train:1.2",
)
def _image_name(stream: Stream) -> Iterator[Violation[View]]:
    for container in (*containers_of(stream), *init_containers_of(stream)):
        image = container.view.at("image")
        if image.text() and not is_image_name(image.text()):
            yield Violation(image, f"{image.text()!r} is not a valid image name")


@MANIFESTS.rule(
    "image-tag",
    finds="the tag `latest`, or none, with imagePullPolicy: IfNotPresent",
    reason="Each node keeps the first image pulled there: the pods of a job may run different "
    "code.",
    fix="name a version or a digest (@sha256:…)",
)
def _tags(stream: Stream) -> Iterator[Violation[View]]:
    for container in (*containers_of(stream), *init_containers_of(stream)):
        image = container.view.at("image")
        name, digest, _ = image.text().partition("@")
        tag = name.rpartition("/")[2].partition(":")[2]
        local = name.startswith("localhost/")  # loaded into the nodes: there is nothing to pull
        cached = container.view.text("imagePullPolicy") == "IfNotPresent"
        if name and cached and not digest and not local and tag in ("", "latest"):
            yield Violation(
                image,
                f"{image.text()!r} has {'the tag latest' if tag else 'no tag'}, and nodes "
                "that know it do not pull it again",
            )


# ---- Ports


@MANIFESTS.rule(
    "port-invalid",
    finds="a port outside of 1 to 65535, or with an invalid name, or one of several of a Service "
    "without a name",
    reason="The server refuses it; a container's names of ports have at most 15 small letters, "
    "digits and '-', a Service's 63.",
    fix="write a number from 1 to 65535, and a valid name",
)
def _ports(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        for port in container.view.at("ports").items():
            yield from _number(port.at("containerPort"))
            yield from _number(port.at("hostPort"), least=0)
            yield from _port_name(port.at("name"))
    for service in stream.of("Service"):
        ports = list(service.view.at("spec", "ports").items())
        for port in ports:
            yield from _number(port.at("port"))
            yield from _number(port.at("nodePort"), least=0)
            target = port.at("targetPort")
            yield from _port_name(target) if isinstance(target.value, str) else _number(target)
            name = port.at("name")
            if name and not _SERVICE_PORT.fullmatch(name.text()):
                what = f"{shown(name.value)} is not a valid Service port name (63 of a-z, 0-9, '-')"
                yield Violation(name, what)
            if len(ports) > 1 and not port.at("name"):
                yield Violation(port, "one of several ports has no name", fix="name it")
    for job in stream.of("PyTorchJob"):
        yield from _number(job.view.at("spec", "elasticPolicy", "rdzvPort"))


def _number(view: View, *, least: int = 1) -> Iterator[Violation[View]]:
    if view and not (view.whole() is not None and least <= (view.whole() or 0) <= 65535):
        yield Violation(view, f"{shown(view.value)} is not a port number")


def _port_name(view: View) -> Iterator[Violation[View]]:
    if view and not _PORT_NAME.fullmatch(view.text()):
        size, fix = len(view.text()), None
        what = f"{shown(view.value)} is not a valid container port name"
        if size > _LONGEST:
            what, fix = (
                f"{what}: it has {size} characters, and the limit is {_LONGEST}",
                "shorten it",
            )
        yield Violation(view, what, fix=fix)


# ---- Volumes

_CLAIM_POLICIES = (("volumeClaimPolicies",), ("template", "spec", "volumeClaimPolicies"))
"""Paths of the claims that become volumes, in a JobSet and in a runtime."""


@MANIFESTS.rule(
    "mount-unknown",
    finds="a mount of a volume that the pod does not have",
    reason="The server refuses the pod.",
    fix="add the volume, or correct the name",
)
def _mounts(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        volumes = {volume.text("name") for volume in pods.spec.at("volumes").items()}
        for path in _CLAIM_POLICIES:
            for claim in pods.owner.view.at("spec", *path).items():
                made = claim.at("templates").items()
                volumes |= {template.text("metadata", "name") for template in made}
        if pods.partly and pods.kind in ("TrainJob", ""):
            continue  # the runtime or the operator may define the volume
        for one in pods.all_containers:
            for mount in one.view.at("volumeMounts").items():
                name = mount.at("name")
                if name.text() and name.text() not in volumes:
                    yield Violation(name, f"no volume is named {name.text()!r}")


@MANIFESTS.rule(
    "volume-unused",
    finds="a volume that no container mounts",
    reason="Kubernetes creates it or waits for it, but no container uses it; often a mount is "
    "missing.",
    fix="mount it, or leave it out",
)
def _unused(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        used = {
            mount.text("name")
            for one in pods.all_containers
            for key in ("volumeMounts", "volumeDevices")
            for mount in one.view.at(key).items()
        }
        for volume in pods.spec.at("volumes").items():
            name = volume.at("name")
            if name.text() and name.text() not in used and not pods.partly:
                yield Violation(name, f"no container mounts the volume {name.text()!r}")


@MANIFESTS.rule(
    "volume-source",
    finds="a volume with no source, or with two",
    reason="With two, the server refuses the pod. With none, the volume is an emptyDir, which is "
    "lost with the pod.",
    fix="write one of emptyDir, persistentVolumeClaim, configMap, secret …",
)
def _sources(stream: Stream) -> Iterator[Violation[View]]:
    for pods in pods_of(stream):
        for volume in pods.spec.at("volumes").items():
            kinds = [key for key, entry in volume.entries() if key != "name" and entry]
            if len(kinds) != 1:
                name = volume.text("name")
                what = (
                    f"is both {' and '.join(kinds)}"
                    if kinds
                    else "has no source, so it is an emptyDir"
                )
                yield Violation(volume, f"the volume {name!r} {what}")


@MANIFESTS.rule(
    "claim-shared",
    finds="a claim that one node at a time can mount (ReadWriteOnce), in several pods",
    reason="Pods on any node but the first wait in ContainerCreating; with ReadWriteOncePod every "
    "other pod stays Pending.",
    fix="write accessModes: [ReadWriteMany], with a storage class that has it",
)
def _shared(stream: Stream) -> Iterator[Violation[View]]:
    for claim in stream.of("PersistentVolumeClaim"):
        modes = claim.view.at("spec", "accessModes")
        if not modes.words() or not {*modes.words()} <= {"ReadWriteOnce", "ReadWriteOncePod"}:
            continue
        count = 0
        for pods in pods_of(stream):
            near = claim.namespace == pods.owner.namespace
            volumes = pods.spec.at("volumes").items() if near else ()
            names = [one.text("persistentVolumeClaim", "claimName") for one in volumes]
            count += (pods.count or 1) if claim.name in names else 0
        if count > 1:
            yield Violation(modes, f"{modes.words()[0]}, and {count} pods mount {claim.name!r}")


@MANIFESTS.rule(
    "config-map-size",
    finds="a ConfigMap that is too large",
    reason="The limit is 1048576 bytes; above 262144, `kubectl apply` cannot store the applied "
    "object in an annotation, and fails (Kubernetes 1.34).",
    fix="keep large files on a volume",
)
def _sizes(stream: Stream) -> Iterator[Violation[View]]:
    for config in stream.of("ConfigMap"):
        data, binary = config.view.labels("data"), config.view.labels("binaryData")
        size = sum(len(key) + len(value.encode()) for key, value in data.items())
        written = size + sum(len(key) + len(value) for key, value in binary.items())
        for key, value in binary.items():
            try:
                size += len(key) + len(base64.b64decode(value))
            except binascii.Error:
                size += len(key) + len(value)
        at = config.view.at("data" if data else "binaryData")
        if size > _MOST_BYTES:
            yield Violation(at, f"{size} bytes; a ConfigMap holds {_MOST_BYTES}")
        elif written > _MOST_APPLIED:
            yield Violation(
                at,
                f"{written} bytes; `kubectl apply` takes {_MOST_APPLIED}",
                fix="use kubectl create, or kubectl apply --server-side",
            )
