"""Rules about CPU, memory, devices and shared memory."""

from collections.abc import Iterator
from fractions import Fraction

from toolkit.lint.manifests.pods import Container, containers_of, launches, pods_of
from toolkit.lint.rulebook import MANIFESTS, Violation
from toolkit.text.manifests import Stream, View
from toolkit.text.quantities import amount, whole_number

_MEMORY = ("memory", "ephemeral-storage")
_SMALLEST = 2**20  # no training fits into one mebibyte
_OWN = ("cpu", "memory", "ephemeral-storage", "storage")


def _amounts(container: Container) -> Iterator[tuple[str, str, View, Fraction]]:
    """Yield the section, resource and amount of a container's requests and limits."""
    for where in ("requests", "limits"):
        for name, entry in container.resources.at(where).entries():
            if (value := amount(entry.value)) is not None:
                yield where, name, entry, value


@MANIFESTS.rule(
    "memory-unit",
    finds="an amount of memory or storage below one mebibyte: `512m`, or a number without a unit",
    reason="A small m means thousandths: 512m is half a byte. No training fits into so little.",
    fix="write 512Mi, or 64Gi",
)
def _units(stream: Stream) -> Iterator[Violation[View]]:
    sizes = [
        (name, entry)
        for container in containers_of(stream)
        for _, name, entry, _ in _amounts(container)
        if name in _MEMORY
    ]
    for pods in pods_of(stream):
        volumes = pods.spec.at("volumes").items()
        sizes += [("sizeLimit", volume.at("emptyDir", "sizeLimit")) for volume in volumes]
    for name, entry in sizes:
        value = amount(entry.value)
        if value is not None and 0 < value < _SMALLEST:
            yield Violation(entry, f"{name}: {entry.value} is {float(value):g} bytes")


@MANIFESTS.rule(
    "requests-exceed-limits",
    finds="a request above its limit",
    reason="The server refuses the pod.",
    fix="make them equal",
)
def _requests(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        for where, name, entry, value in _amounts(container):
            limit = container.resources.at("limits", name).value
            most = amount(limit)
            if where == "requests" and name in _OWN and most is not None and value > most:
                yield Violation(entry, f"{name}: {entry.value} is more than the limit {limit}")


@MANIFESTS.rule(
    "device-request",
    finds="GPUs or other devices with a request that differs from the limit, or without a limit",
    reason="Devices cannot be overcommitted: requests must equal limits, else the pod is refused "
    "(Kubernetes, extended resources).",
    fix="write the same number under requests and limits",
)
def _devices(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        for where, name, entry, value in _amounts(container):
            if where != "requests" or not _is_device(name):
                continue
            limit = container.resources.at("limits", name)
            if amount(limit.value) != value:
                there = f"and the limit is {limit.value}" if limit else "without a limit"
                yield Violation(entry, f"{name}: {entry.value} is requested, {there}")


@MANIFESTS.rule(
    "device-fraction",
    finds="a part of a GPU or of another device",
    reason="Devices are counted in whole numbers; the server refuses the pod.",
    fix="ask for whole ones; for parts of a GPU, for what MIG or time-slicing calls them",
)
def _fractions(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        seen: set[str] = set()
        for _, name, entry, value in _amounts(container):
            if _is_device(name) and value.denominator != 1 and name not in seen:
                seen.add(name)
                yield Violation(entry, f"{name}: {entry.value} is not a whole number")


def _is_device(name: str) -> bool:
    return "/" in name and not name.startswith(("kubernetes.io/", "requests."))


# ---- Shared memory


def _shm(container: Container) -> View | None:
    """Return the volume that a container mounts at /dev/shm, if it mounts one."""
    volumes = {v.text("name"): v for v in container.pods.spec.at("volumes").items()}
    for mount in container.view.at("volumeMounts").items():
        if mount.text("mountPath").rstrip("/") == "/dev/shm":
            return volumes.get(mount.text("name"), container.view.at("no-volume"))
    return None


@MANIFESTS.rule(
    "shm-missing",
    finds="several workers in a pod with the default shared memory",
    reason="/dev/shm holds 64 MiB in a container. NCCL and data loaders (num_workers) share "
    "memory there: when it is full, NCCL fails, and the workers of a loader die with a bus error.",
    fix="mount an emptyDir of medium: Memory at /dev/shm",
)
def _missing(stream: Stream) -> Iterator[Violation[View]]:
    for launch in launches(stream):
        container = launch.container
        if launch.pods.partly or _shm(container) is not None:
            continue
        spec = container.pods.owner.view.at("spec")
        number = launch.option("nproc-per-node") or spec.text("nprocPerNode")
        amounts = _amounts(container)
        gpus = [count for _, name, _, count in amounts if _is_device(name) and "gpu" in name]
        workers = whole_number(number)
        if (workers if workers is not None else max(gpus, default=0)) > 1:
            what = f"container {container.name!r} has several workers and 64 MiB of /dev/shm"
            yield Violation(container.view.at("volumeMounts"), what)


@MANIFESTS.rule(
    "shm-on-disk",
    finds="an emptyDir at /dev/shm that is not in memory",
    reason="Shared data of the ranks would be written to the node's disk.",
    fix="write emptyDir: {medium: Memory}",
)
def _on_disk(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        if (volume := _shm(container)) is not None:
            empty = volume.at("emptyDir")
            if empty and empty.text("medium") != "Memory":
                yield Violation(empty, "the emptyDir at /dev/shm is on the node's disk")


@MANIFESTS.rule(
    "shm-size",
    finds="shared memory as large as the container's memory limit, which includes it",
    reason="Data in /dev/shm counts towards the container's memory: the container is killed "
    "before /dev/shm is full.",
    fix="lower sizeLimit, or raise the memory limit",
)
def _size(stream: Stream) -> Iterator[Violation[View]]:
    for container in containers_of(stream):
        volume = _shm(container)
        limit = container.resources.at("limits", "memory").value
        most = amount(limit)
        if volume is None or most is None:
            continue
        size = volume.at("emptyDir", "sizeLimit")
        value = amount(size.value)
        if value is not None and value >= most:
            what = f"/dev/shm may hold {size.value}, and the memory limit is {limit}"
            yield Violation(size, what)
