"""Transfers files of a run directory to and from the claim, through a helper pod.

The helper pod is derived from the run's pods, so that it complies with policies. It has only the
claim: none of the run's secrets, devices, labels or network. So Services, NetworkPolicies,
controllers, and queries for state and logs do not mistake it for a pod of the run.
"""

import contextlib
import hashlib
import posixpath
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Conflict, Denied
from toolkit.kubernetes.client.exec import execute
from toolkit.kubernetes.client.resources import PODS, Cluster
from toolkit.kubernetes.pods import is_up, sentence, trouble
from toolkit.kubernetes.workloads import Object, WorkloadKind, owned
from toolkit.planning.pods import MANAGER
from toolkit.runs.long_operation import Report, operation
from toolkit.runs.records.submission_journal import UnknownOutcome
from toolkit.text.quantities import rounded_size
from toolkit.text.yaml_reader import documents_of

if TYPE_CHECKING:
    from toolkit.kubernetes.run import KubernetesRun

T = TypeVar("T")

TRANSFER_LABEL = f"{MANAGER}/transfer"
"""The label of a run's helper pods."""

_CONTAINER = "transfer"

_LIMIT_S = 3600
"""Lifetime of a helper pod in seconds, in case its creator was killed."""

_PATIENCE = 600
"""Number of polls until the pod runs: it needs a node with room, and its image."""

_OF_POD = (
    *("serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations", "securityContext"),
    *("priorityClassName", "runtimeClassName"),
)
_OF_CONTAINER = ("image", "imagePullPolicy", "securityContext")
"""The container fields that the helper pod shares with the pods of the run."""

_RESOURCES = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"cpu": "1", "memory": "512Mi"},
}

CHUNK = 32 * 1024
"""Bytes per message, as in kubectl."""

_ATTEMPTS = 3
"""Number of attempts for a file transfer if the connection is lost."""

_PROGRAM = Path(__file__).parent / "volume_agent.py"

_SIZE = re.compile(rb"-|[0-9]{1,18}")
_LONGEST_SIZE, _LONGEST_TAIL = 18, 1 << 10
"""Maximum bytes of the size line before a file's content, and of the checksum after it."""

_RBAC = re.compile(r" cannot \w+ resource ")


class Files:
    """The files of a run directory, accessed through a container that mounts the claim.

    Each method raises LauncherError if the file cannot be accessed, and Away if the connection was
    lost in every attempt.
    """

    def __init__(self, cluster: Cluster, pod: str, container: str, run_dir: str) -> None:
        self._cluster = cluster
        self._pod = pod
        self._container = container
        self._run_dir = run_dir.rstrip("/")

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, given by its path in the run directory."""
        view, size = memoryview(content), len(content)
        digest = hashlib.sha256(content).hexdigest()

        def send() -> None:
            stdin = (view[at : at + CHUNK] for at in range(0, size, CHUNK))
            self._run("write", name, str(size), digest, stdin=stdin)

        self._tried(send)

    def remove(self, name: str) -> None:
        """Remove a file, its partial copies, and folders that become empty."""
        self._tried(lambda: self._run("remove", name, self._run_dir.rpartition("/")[0]))

    def fetch(
        self, name: str, out: BinaryIO, report: Report = lambda done, total, text: None
    ) -> bool:
        """Copy a file into `out`; return whether the file exists."""

        def receive() -> bool:
            out.seek(0)
            out.truncate()
            received = _Received(out)

            def take(part: bytes) -> None:
                received.take(part)
                report(received.count, received.size, f"{name}, {rounded_size(received.size)}")

            self._run("read", name, show=take)
            return received.is_there()

        return self._tried(receive)

    def _run(self, verb: str, name: str, *more: str, **streams: Any) -> None:
        program = _PROGRAM.read_text(encoding="utf-8")
        argv = ("python3", "-I", "-c", program, verb, f"{self._run_dir}/{name}", *more)
        execute(self._cluster, self._pod, self._container, argv, **streams)

    def _tried(self, work: Callable[[], T]) -> T:
        try:
            with _explained():
                return self._cluster.connection.patiently(work, attempts=_ATTEMPTS)
        except Away as error:
            raise Away(f"{error} ({_ATTEMPTS} attempts)") from error


class _Received:
    """The received part of a file: its size, a line, its bytes, and their SHA-256."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._head = self._tail = b""
        self._left: int | None = None
        self.size = 0
        """Size of the file in bytes; 0 until it is known."""
        self._digest = hashlib.sha256()

    @property
    def count(self) -> int:
        """Number of received bytes of the file."""
        return self.size - (self._left or 0)

    def take(self, part: bytes) -> None:
        """Process the next part."""
        if self._left is None:
            self._head, line, part = (self._head + part).partition(b"\n")
            if not line and len(self._head) <= _LONGEST_SIZE:
                return
            if not line or not _SIZE.fullmatch(self._head):
                raise LauncherError("the claim's pod did not send a file")
            self._left = self.size = 0 if self._head == b"-" else int(self._head)
        content = part[: self._left]
        self._left -= len(content)
        self._digest.update(content)
        self._tail += part[len(content) :]
        if len(self._tail) > _LONGEST_TAIL:
            raise LauncherError("a file from the claim is longer than announced")
        try:
            self._out.write(content)
        except OSError as error:  # not an error of the connection
            raise LauncherError(f"cannot store a file from the claim: {error}") from error

    def is_there(self) -> bool:
        """Return whether the file exists, or raise Away if a part of it is missing."""
        if self._head == b"-":
            return False
        if self._left != 0 or self._tail.decode() != self._digest.hexdigest():
            raise Away("a file from the claim arrived damaged")
        return True


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add the required permissions to the error if one is missing."""
    try:
        yield
    except Denied as error:
        if not _RBAC.search(error.answer):
            raise
        raise Denied(
            f"{error}; files go to and from the claim through a pod that is made for it, and the "
            "Role training-transfer in k8s/base/transfer.yaml has the rights that this needs"
        ) from error


@contextlib.contextmanager
def placed(
    cluster: Cluster, kind: WorkloadKind, workload: Object, files: Mapping[str, bytes]
) -> Iterator[None]:
    """Put files into the run directory of a new run; remove them if its submission fails.

    `files` maps paths in the run directory to contents; if it is empty, nothing is done.

    Raises:
        LauncherError: the files cannot be written; none remains.
    """
    if not files:
        yield
        return
    with transfer(cluster, kind, workload) as run_directory:
        submitting = False
        try:
            for name, content in files.items():
                run_directory.write(name, content)
            submitting = True
            yield
        except BaseException as error:
            if submitting and isinstance(error, Away | UnknownOutcome):
                raise  # it is unknown whether the run was created
            for name in files:
                with contextlib.suppress(LauncherError):
                    run_directory.remove(name)
            raise


def fetch(run: "KubernetesRun", targets: Callable[[], Iterable[tuple[str, Path]]]) -> None:
    """Copy existing files of a run directory to this machine, each atomically.

    They are read through a running pod of the run, or else through a helper pod.

    Args:
        run: The run.
        targets: Yields paths in the run directory, each with the local path; it may read files
            copied earlier.

    Raises:
        LauncherError: the files cannot be read, or no volume outlives the pods.
    """
    with operation("fetching files from the claim") as report:
        _fetch(run, targets, report)


def _fetch(
    run: "KubernetesRun", targets: Callable[[], Iterable[tuple[str, Path]]], report: Report
) -> None:
    cluster, kind = run.cluster, run.kind
    workload = cluster.get(kind, run.object_name)
    if workload is None:
        manifest = run.local.manifest()
        workload = next(
            document
            for document in documents_of(manifest)
            if (document["kind"], document["metadata"]["name"]) == (kind.kind, run.object_name)
        )
    running: list[Object] = []
    with contextlib.suppress(Denied):
        running = [pod for pod in cluster.pods(run.pod_selector) if is_up(pod)]
    for pod in running[:1]:
        name = str(pod["metadata"]["name"])
        try:
            there = Files(cluster, name, kind.container, run_dir_of(workload, kind))
            return _copy(there, targets(), report)
        except (Away, Denied):
            raise
        except LauncherError:
            pass  # the pod may have ended just now, which killed the command
    report(0, None, "a pod starts for it")
    with transfer(cluster, kind, workload) as files:
        _copy(files, targets(), report)


def _copy(files: Files, targets: Iterable[tuple[str, Path]], report: Report) -> None:
    for name, path in targets:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(3)}")
        try:
            with draft.open("wb") as out:
                exists = files.fetch(name, out, report)
            if exists:
                draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def transfer(cluster: Cluster, kind: WorkloadKind, workload: Object) -> Iterator[Files]:
    """Create a helper pod with the run directory of a workload, and delete it at the end.

    Raises:
        LauncherError: the server refuses, or the pod does not run.
    """
    pod = transfer_pod(workload, kind, word=secrets.token_hex(3))
    name = str(pod["metadata"]["name"])
    connection, path = cluster.connection, PODS.path(cluster.namespace)
    try:
        with _explained():
            with contextlib.suppress(Conflict):  # the name is unique: an earlier answer was lost
                connection.patiently(
                    lambda: connection.ask("POST", path, body=pod), attempts=_ATTEMPTS
                )
            _until_it_runs(cluster, name)
        yield Files(cluster, name, _CONTAINER, run_dir_of(workload, kind))
    finally:
        # The pod may be gone, or deletion denied; if every attempt fails, the pod ends by itself.
        with contextlib.suppress(LauncherError):
            connection.patiently(
                lambda: connection.ask("DELETE", f"{path}/{name}"), attempts=_ATTEMPTS
            )


def _until_it_runs(cluster: Cluster, name: str) -> None:
    """Wait until a pod runs; raise LauncherError if it has ended or does not start in time."""
    subject, reason = f"pod {name}, through which files go to the claim,", ""
    for attempt in range(_PATIENCE):
        if (pod := cluster.get(PODS, name)) is None:
            raise LauncherError(f"{subject} was deleted before it ran")
        if is_up(pod):
            return
        status = pod.get("status") or {}
        if status.get("phase") in ("Succeeded", "Failed"):
            why = sentence("", status) or trouble(pod) or f"it has {status['phase'].lower()}"
            raise LauncherError(f"{subject} has ended: {why}")
        reason = trouble(pod).partition(": ")[2]
        cluster.connection.sleep(min(0.1 * 1.1**attempt, 1.0))
    with contextlib.suppress(LauncherError):
        reason = reason or next((sentence("", e) for e in reversed(cluster.warnings(name))), "")
    raise LauncherError(f"{subject} does not run" + (f": {reason}" if reason else ""))


def transfer_pod(workload: Object, kind: WorkloadKind, *, word: str) -> Object:
    """Return a helper pod that mounts the volume with the run directory.

    Args:
        workload: The object that creates the pods of the run, rendered or from the server; an
            existing one owns the helper pod.
        kind: Its kind.
        word: A unique id of this transfer within the run.

    Raises:
        LauncherError: no volume outlives the pods.
    """
    spec, container = _pod_of(workload, kind)
    run_dir = run_dir_of(workload, kind)
    above = [
        mount
        for mount in container.get("volumeMounts") or ()
        if posixpath.commonpath([run_dir, mount["mountPath"]]) == mount["mountPath"].rstrip("/")
    ]
    mount: Object = max(above, key=lambda mount: len(mount["mountPath"]), default={})
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
    volume = volumes.get(mount.get("name"))
    if volume is None or "emptyDir" in volume:
        raise LauncherError(
            f"{run_dir} is in the pods alone and gone with them; name a runs_claim in the profile"
        )
    run = workload["metadata"]
    labels = {
        "app.kubernetes.io/name": _CONTAINER,
        "app.kubernetes.io/managed-by": MANAGER,
        TRANSFER_LABEL: run["name"],
    }
    name = f"{run['name']}-{_CONTAINER}-{word}"
    helper = {
        "name": _CONTAINER,
        # A shell that runs as PID 1 ignores SIGTERM unless it sets a trap.
        "command": ["/bin/sh", "-c", f"trap 'exit 0' TERM; sleep {_LIMIT_S} & wait"],
        "resources": _RESOURCES,
        "volumeMounts": [mount],
    }
    pod_spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _LIMIT_S,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [helper | _some(container, _OF_CONTAINER)],
        "volumes": [volume],
    }
    if nodes := _some(spec.get("affinity") or {}, ("nodeAffinity",)):
        pod_spec["affinity"] = nodes
    pod_spec |= _some(spec, _OF_POD)
    metadata = {"name": name, "namespace": run["namespace"], "labels": labels}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
    return owned(pod, kind, workload) if "uid" in run else pod


def run_dir_of(workload: Object, kind: WorkloadKind) -> str:
    """Return the path of the run directory in the pods of a run."""
    _, container = _pod_of(workload, kind)
    values = {entry["name"]: entry.get("value") for entry in container.get("env") or ()}
    # Kubernetes expands a single dollar sign; see toolkit/rendering/environment.py.
    return str(values["TRAIN_RUN_DIR"]).replace("$$", "$")


def _pod_of(workload: Object, kind: WorkloadKind) -> tuple[Object, Object]:
    """Return the spec of a run's pods, and their container."""
    spec = _spec_in(workload["spec"], kind.container)
    if spec is None:
        raise LauncherError(
            f"{kind.kind} {workload['metadata']['name']} does not describe its pods"
        )
    container = next(c for c in spec["containers"] if c["name"] == kind.container)
    # A TrainJob has image and environment in `trainer`, apart from its runtime patches.
    return spec, {**_some(workload["spec"].get("trainer") or {}, ("image", "env")), **container}


def _spec_in(thing: Any, container: str) -> Object | None:
    """Return the first pod spec in an object that has a container of this name."""
    inner = thing if isinstance(thing, list) else ()
    if isinstance(thing, Mapping):
        containers = thing.get("containers")
        if isinstance(containers, list) and container in [c.get("name") for c in containers]:
            return thing
        inner = list(thing.values())
    specs = (_spec_in(value, container) for value in inner)
    return next((spec for spec in specs if spec is not None), None)


def _some(thing: Object, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: thing[key] for key in keys if key in thing}
