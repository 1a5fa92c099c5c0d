"""The run directory of a run as a container sees it: files in and out, whole or not at all."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Denied
from toolkit.kubernetes.client.exec import execute
from toolkit.kubernetes.client.resources import Cluster

T = TypeVar("T")

CHUNK = 32 * 1024
"""Bytes of a message; kubectl's are as large."""

ATTEMPTS = 3
"""How often a transfer of a file is tried if the connection is lost."""

_PROGRAM = Path(__file__).parent / "agent.py"

_RBAC = re.compile(r" cannot \w+ resource ")


class Files:
    """The files of a run directory, through a container that mounts the claim.

    Each method raises LauncherError if the file cannot be reached, and Away if the connection was
    lost in each attempt.
    """

    def __init__(self, cluster: Cluster, pod: str, container: str, run_dir: str) -> None:
        self._cluster = cluster
        self._pod = pod
        self._container = container
        self._run_dir = run_dir.rstrip("/")

    def write(self, name: str, content: bytes) -> None:
        """Write a file, given by its path in the run directory, whole or not at all."""
        view, size = memoryview(content), len(content)
        digest = hashlib.sha256(content).hexdigest()

        def send() -> None:
            stdin = (view[at : at + CHUNK] for at in range(0, size, CHUNK))
            self._run("write", name, str(size), digest, stdin=stdin)

        self._tried(send)

    def remove(self, name: str) -> None:
        """Remove a file, parts of it, and folders that are empty then."""
        self._tried(lambda: self._run("remove", name, self._run_dir.rpartition("/")[0]))

    def fetch(self, name: str, out: BinaryIO) -> bool:
        """Read a file into another one; return whether there is such a file."""

        def receive() -> bool:
            out.seek(0)
            out.truncate()
            received = _Received(out)
            self._run("read", name, show=received.take)
            return received.is_there()

        return self._tried(receive)

    def _run(self, verb: str, name: str, *more: str, **streams: Any) -> None:
        program = _PROGRAM.read_text(encoding="utf-8")
        argv = ("python3", "-I", "-c", program, verb, f"{self._run_dir}/{name}", *more)
        execute(self._cluster, self._pod, self._container, argv, **streams)

    def _tried(self, work: Callable[[], T]) -> T:
        try:
            with explained():
                return self._cluster.connection.patiently(work, attempts=ATTEMPTS)
        except Away as error:
            raise Away(f"{error} ({ATTEMPTS} attempts)") from error


class _Received:
    """The received part of a file: its size, a line, its bytes, and their SHA-256."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._head = self._tail = b""
        self._left: int | None = None
        self._digest = hashlib.sha256()

    def take(self, part: bytes) -> None:
        """Take the next part."""
        if self._left is None:
            self._head, line, part = (self._head + part).partition(b"\n")
            if not line:
                return
            self._left = 0 if self._head == b"-" else int(self._head)
        content = part[: self._left]
        self._left -= len(content)
        self._digest.update(content)
        self._tail += part[len(content) :]
        try:
            self._out.write(content)
        except OSError as error:  # which would else be taken for one of the connection
            raise LauncherError(f"what comes from the claim cannot be kept: {error}") from error

    def is_there(self) -> bool:
        """Return whether there is such a file, or raise Away if a part of it is missing."""
        if self._head == b"-":
            return False
        if self._left != 0 or self._tail.decode() != self._digest.hexdigest():
            raise Away("a file of the claim has come here damaged")
        return True


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say which rights are missing, where one is."""
    try:
        yield
    except Denied as error:
        if not _RBAC.search(error.answer):
            raise
        raise Denied(
            f"{error}; files go to and from the claim through a pod that is made for it, and the "
            "Role training-transfer in k8s/base/transfer.yaml has the rights that this needs"
        ) from error
