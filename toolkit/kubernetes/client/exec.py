"""Commands in running containers: `pods/exec` over a websocket, streamed in bounded memory.

The official client makes the connection, with its certificates and proxies. Its WSClient is not
used: it keeps all output in memory, and reads as long as there is something to read. Protocol v4,
which every server supports, cannot signal the end of stdin: a command must know its size.
"""

import contextlib
import selectors
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlencode

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away, Missing, refusal
from toolkit.kubernetes.client.resources import PODS, Cluster
from toolkit.text import untrusted

_PROTOCOL = "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR = range(4)
"""The first byte of each message (k8s.io/apimachinery, remotecommand)."""

_BINARY, _CLOSE, _TEXT = 2, 8, 1  # RFC 6455, section 11.8

_ANSWER_S = 60.0
"""Timeout of the websocket handshake."""

_SILENCE_S = 300.0
"""How long a command may print nothing: a network disk may take long to write its data."""

_LAST_WORDS = 2000


def execute(
    cluster: Cluster,
    pod: str,
    container: str,
    argv: Sequence[str],
    *,
    stdin: Iterable[bytes | memoryview] = (),
    show: Callable[[bytes], object] = lambda _: None,
) -> None:
    """Run a command in a container, and return when it has exited with 0.

    Its stdin comes in parts of some 10 KiB; `show` is called with each part of its output.

    Raises:
        Away: the connection is lost, so the command's end is unknown.
        Missing: the pod does not exist, or its container does not run.
        LauncherError: it cannot be run, or failed; the message has the end of its stderr.
    """
    command = _Command(show)
    with _connected(cluster, pod, container, argv) as socket:
        errors = _errors()
        try:
            with contextlib.suppress(*errors), selectors.DefaultSelector() as waiting:
                # If the command stops reading stdin, the server's message has the reason.
                waiting.register(socket.sock, selectors.EVENT_READ)
                for part in stdin:
                    socket.send(bytes([_STDIN]) + part, _BINARY)
                    if waiting.select(0) and command.has_ended(socket):
                        break
            while command.end is None:
                command.has_ended(socket)
        except errors as error:
            raise Away(f"lost the connection to pod {pod}: {error or 'no answer'}") from error
    if command.end.get("status") != "Success":
        words = command.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise LauncherError(f"pod {pod}: {words or command.end.get('message') or command.end}")


class _Command:
    """The state of a command: the end of its stderr, and its result once it has ended."""

    def __init__(self, show: Callable[[bytes], object]) -> None:
        self._show = show
        self.stderr = b""
        self.end: dict[str, Any] | None = None

    def has_ended(self, socket: Any) -> bool:
        """Read the next message, and answer keep-alive messages.

        A ConnectionError means that the command's result is missing or unreadable.
        """
        opcode, frame = socket.recv_data_frame(True)
        content = bytes(frame.data)
        if opcode == _CLOSE:
            if self.end is None:
                raise ConnectionError("the server closed the connection")
        elif opcode in (_BINARY, _TEXT) and content:
            channel, rest = content[0], content[1:]
            if channel == _STDOUT and rest:
                self._show(rest)
            elif channel == _STDERR:
                self.stderr = (self.stderr + rest)[-_LAST_WORDS:]
            elif channel == _ERROR:
                try:
                    self.end = untrusted.mapping(untrusted.parse_json(rest))
                except ValueError as error:
                    raise ConnectionError(f"the end of a command cannot be read: {error}") from None
        return self.end is not None


@contextlib.contextmanager
def _connected(cluster: Cluster, pod: str, container: str, argv: Sequence[str]) -> Iterator[Any]:
    from kubernetes.stream import ws_client
    from websocket import WebSocketBadStatusException

    client, headers = cluster.connection.credentials()
    configuration = client.configuration
    query = [("container", container), *(("command", word) for word in argv)]
    query += [(stream, "true") for stream in ("stdin", "stdout", "stderr")]
    path = f"{PODS.path(cluster.namespace, pod)}/exec?{urlencode(query)}"
    url = "ws" + configuration.host.rstrip("/").removeprefix("http") + path
    lower = {key.lower(): value for key, value in headers.items()}
    lower["sec-websocket-protocol"] = _PROTOCOL
    make: Callable[..., Any] = ws_client.create_websocket
    try:
        socket = _in_time(lambda: make(configuration, url, lower))
    except WebSocketBadStatusException as error:
        body = getattr(error, "resp_body", None) or str(error).encode()
        if b"container not found" in body:  # sent with status 500
            raise Missing(f"pod {pod} is no longer running") from error
        raise refusal(error.status_code, body, getattr(error, "resp_headers", {})) from error
    except _errors() as error:
        raise Away(f"no connection into pod {pod}: {error}") from error
    try:
        socket.settimeout(_SILENCE_S)
        yield socket
    finally:
        socket.shutdown()


def _in_time(connect: Callable[[], Any]) -> Any:
    """Return the connection, or raise TimeoutError; the official client has no timeout."""
    made: Future[Any] = Future()

    def work() -> None:
        try:
            socket = connect()
        except Exception as error:
            if made.set_running_or_notify_cancel():
                made.set_exception(error)
            return
        if made.set_running_or_notify_cancel():
            made.set_result(socket)
        else:
            socket.shutdown()  # the caller has given up

    # A daemon: a thread that hangs in the handshake must not block the exit of the process.
    threading.Thread(target=work, name="websocket", daemon=True).start()
    try:
        return made.result(_ANSWER_S)
    except TimeoutError as error:
        if not made.cancel():
            return made.result()  # connected just now
        raise TimeoutError(f"no answer within {_ANSWER_S:g} s") from error


def _errors() -> tuple[type[Exception], ...]:
    from websocket import WebSocketException

    return WebSocketException, OSError
