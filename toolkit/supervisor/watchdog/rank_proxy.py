"""Has the fork server fork a rank, and is the rank's proxy for torchrun (`start: warm`).

sitecustomize.py loads this module in each process that torchrun starts for a rank. The process
forwards torchrun's signals to the rank and exits with the rank's status. If the server refuses or
does not answer, the process prints the reason and becomes the rank itself: a cold start.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

BEGIN_S, PATIENCE_S = 5.0, 300.0
"""Time limits for the server to listen, and to answer after its imports."""

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")

PER_RANK = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_NAME"
    "|MASTER_(ADDR|PORT)|TORCHELASTIC_[A-Z_]+|TORCH_NCCL_ASYNC_ERROR_HANDLING|_"
)
"""Variables that torchrun sets for each rank; no package reads them at import."""

STAND_IN = "for-"
"""Prefix of a proxy's name; the rank's pid follows."""


class Request:
    """The start of a rank: command line, environment, file descriptors."""

    def __init__(self, said: dict[str, Any], fds: list[int]) -> None:
        self.arguments: list[str] = said["arguments"]
        self.environ: dict[str, str] = said["environ"]
        self.interpreter: dict[str, str] = said["interpreter"]
        self.folder: str = said["folder"]
        self.path: list[str] = said["path"]
        self.umask: int = said["umask"]
        self.ignored: list[int] = said["ignored"]
        self.ancestors: list[int] = said["ancestors"]
        self.fds = fds
        """Its stdin, stdout and stderr."""
        self.tell = -1
        """Write end of the pipe for the report of its imports."""


def interpreter() -> dict[str, str]:
    """Return the Python, its options and its CPUs, which rank and server must have in common."""
    return {
        "version of Python": sys.version,
        "Python": os.path.realpath(sys.executable),
        "environment": sys.prefix,
        "flags of Python": str(sys.flags),
        "options -X": str(sys._xoptions),
        "options -W": str(sys.warnoptions),
        "CPUs": str(sorted(os.sched_getaffinity(0))),
    }


def arguments() -> list[str] | None:
    """Return the script, or `-m` and the module, with their arguments; None for other commands."""
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[1:-1]]
    while words and words[0] == "-u":
        del words[0]
    is_script = bool(words) and not words[0].startswith("-") and os.path.isfile(words[0])
    is_module = words[:1] == ["-m"] and len(words) > 1
    return words if is_script or is_module else None


def start(ancestors: list[int]) -> None:
    """Request a forked rank and be its proxy; return only if this rank starts cold."""
    address, words = os.environ.pop("TRAIN_FORK_SERVER"), arguments()
    if words is None:
        return cold("its command is neither a script nor a module")
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
        if not is_own(connection):  # the server has ended, and another user has taken its name
            return cold("the fork server belongs to another user")
        send(connection, said, (0, 1, 2))
        answer = receive_json(connection)[0]
    except (OSError, ValueError) as error:
        return cold(f"the fork server does not answer: {error}")
    if "pid" not in answer:
        return cold(str(answer.get("cold")))
    be_proxy(int(answer["pid"]), connection)


def connect(connection: socket.socket, address: str) -> None:
    """Connect to the server, which may have started a moment ago."""
    until_s = time.monotonic() + BEGIN_S
    while True:
        try:
            return connection.connect("\0" + address)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def is_own(connection: socket.socket) -> bool:
    """Whether the peer belongs to this user."""
    size = struct.calcsize("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", peer)[1] == os.getuid())


def cold(reason: str) -> None:
    """Print why this rank starts cold."""
    print(f"torch-deploy-toolkit: this rank starts cold: {reason}", file=sys.stderr)


def be_proxy(pid: int, connection: socket.socket) -> None:
    """Be the proxy of a rank, and exit with the rank's status."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(f"{STAND_IN}{pid}")

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has just been forked
                os.kill(pid, number)

    # A signal that arrives just before a system call does not interrupt it: wait for its byte, too.
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    for name in PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)
    connection.settimeout(None)
    waiting = select.poll()
    waiting.register(woken, select.POLLIN)
    waiting.register(connection, select.POLLIN)
    while connection.fileno() not in dict(waiting.poll()):
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
    try:
        status = int(receive_json(connection)[0]["status"])
    except (OSError, ValueError, KeyError):
        print("torch-deploy-toolkit: the fork server of this node has ended", file=sys.stderr)
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
    """Receive the start request of a rank."""
    return Request(*receive_json(connection))


def receive_json(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its file descriptors.

    Raises:
        ValueError: the peer has closed the connection too early.
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
