"""Asks for a rank that is forked where torch has been imported, and stands in its place.

Loaded by sitecustomize.py in each process that torchrun starts for a rank, if the job has `start:
warm`. For torchrun this process is the rank: it passes signals on to the rank, and ends as the rank
ends. If the rank cannot be forked, the process goes on and becomes the rank itself.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any

BEGIN_S, PATIENCE_S = 2.0, 300.0
"""How long a rank waits for the parent to begin, and for what it imports."""

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")

PER_RANK = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_NAME"
    "|MASTER_(ADDR|PORT)|TORCHELASTIC_[A-Z_]+|TORCH_NCCL_ASYNC_ERROR_HANDLING|_"
)
"""The variables that torchrun sets for a rank, none of which is read at an import."""

STAND_IN = "for-"
"""What the name of a process that stands in a rank's place begins with; the rank's pid follows."""


class Request:
    """What a rank was started with."""

    def __init__(self, said: dict[str, Any], fds: list[int]) -> None:
        self.arguments: list[str] = said["arguments"]
        self.environ: dict[str, str] = said["environ"]
        self.interpreter: str = said["interpreter"]
        self.folder: str = said["folder"]
        self.path: list[str] = said["path"]
        self.umask: int = said["umask"]
        self.ignored: list[int] = said["ignored"]
        self.ancestors: list[int] = said["ancestors"]
        self.fds = fds
        """Its stdin, stdout and stderr."""
        self.tell = -1
        """Where it says what it has imported."""


def interpreter() -> str:
    """Return what must be the same in a process that forks a rank: its Python and where it runs."""
    return repr(
        (
            sys.version,
            os.path.realpath(sys.executable),
            sys.prefix,
            tuple(sys.flags),
            sys._xoptions,
            sys.warnoptions,
            sorted(os.sched_getaffinity(0)),
        )
    )


def arguments() -> list[str] | None:
    """Return the script, or `-m` and the module, and what follows; None for anything else."""
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[1:-1]]
    while words and words[0] == "-u":
        del words[0]
    is_script = bool(words) and not words[0].startswith("-") and os.path.isfile(words[0])
    is_module = words[:1] == ["-m"] and len(words) > 1
    return words if is_script or is_module else None


def start(ancestors: list[int]) -> None:
    """Have this rank be forked, and end with it; return if this process has to be the rank."""
    address, words = os.environ.pop("TRAIN_WARM"), arguments()
    if words is None:
        return cold("it is no script and no module")
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    umask = os.umask(0)
    os.umask(umask)
    said = {
        "arguments": words,
        "environ": dict(os.environ),
        "interpreter": interpreter(),
        "folder": os.getcwd(),
        "path": sys.path,
        "umask": umask,
        "ignored": [
            number for number in range(1, signal.NSIG) if signal.getsignal(number) is signal.SIG_IGN
        ],
        "ancestors": [os.getpid(), *ancestors],
    }
    try:
        connect(connection, address)
        send(connection, said, (0, 1, 2))
        answer = receive_json(connection)[0]
    except (OSError, ValueError) as error:
        return cold(f"the process that forks ranks does not answer: {error}")
    if "pid" not in answer:
        return cold(str(answer.get("cold")))
    stand_in(int(answer["pid"]), connection)


def connect(connection: socket.socket, address: str) -> None:
    """Connect to the parent, which may have been started a moment ago."""
    until_s = time.monotonic() + BEGIN_S
    while True:
        try:
            return connection.connect("\0" + address)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def cold(reason: str) -> None:
    """Say why this rank starts as without this."""
    print(f"torch-deploy-toolkit: this rank starts cold: {reason}", file=sys.stderr)


def stand_in(pid: int, connection: socket.socket) -> None:
    """Be the rank for torchrun, until it ends."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(f"{STAND_IN}{pid}")

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has just been forked
                os.kill(pid, number)

    for name in PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)
    connection.settimeout(None)
    try:
        status = int(receive_json(connection)[0]["status"])
    except (OSError, ValueError, KeyError):
        print("torch-deploy-toolkit: the process that forks ranks has ended", file=sys.stderr)
        os._exit(1)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


# ---- Messages: their length, then JSON; the first one with file descriptors


def send(connection: socket.socket, said: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send a message."""
    content = json.dumps(said).encode()
    head = struct.pack("!I", len(content))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([head], rights)
    connection.sendall(content)


def receive(connection: socket.socket) -> Request:
    """Receive what a rank was started with."""
    return Request(*receive_json(connection))


def receive_json(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its file descriptors.

    Raises:
        ValueError: the other end has closed it before its end.
    """
    fds = array.array("i")
    head, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * fds.itemsize))
    for level, kind, content in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    left = struct.unpack("!I", head)[0] if len(head) == 4 else -1
    content = b""
    while len(content) < left:
        part = connection.recv(left - len(content))
        if not part:
            break
        content += part
    if left < 0 or len(content) < left:
        raise ValueError("it has ended")
    said = json.loads(content)
    if not isinstance(said, dict):
        raise ValueError("not a mapping")
    return said, list(fds)
