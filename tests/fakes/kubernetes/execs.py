"""Commands in running containers (`pods/exec`), and pods without a controller.

A command comes over a websocket (RFC 6455), in whose messages the first byte is the channel: 0 is
stdin, 1 stdout, 2 stderr, 3 how it ended (k8s.io/apimachinery, remotecommand). With v5, a message
of 255 and a channel closes that; v4 has no such word, so that a command cannot see its stdin end.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from tests.fakes.kubernetes.containers import Container
from tests.fakes.kubernetes.kubelet import POD, Kubelet, container_status
from tests.fakes.kubernetes.resources import Resource
from tests.fakes.kubernetes.wire import Object, Refusal, Request, status_object

__all__ = ["Execs"]

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, CLOSE_CHANNEL = 0, 1, 2, 3, 255

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10
_CHUNK = 32 * 1024

_DEADLINE = "Pod was active on the node longer than the specified deadline"


class Handler(Protocol):
    """The HTTP request that becomes a websocket."""

    path: str
    headers: Any
    rfile: Any
    wfile: Any
    close_connection: bool

    def send_response(self, code: int) -> None: ...

    def send_header(self, keyword: str, value: str) -> None: ...

    def end_headers(self) -> None: ...

    def _drop(self) -> None: ...


class Execs(Kubelet):
    """Nodes on which one can do something in a container."""

    def exec_in(self, pod: Object, request: Request) -> Callable[[Handler, int | None], None]:
        """Return the function that runs a command in a pod's container over the request's
        connection.

        Raises:
            Refusal: the container does not exist or does not run.
        """
        metadata, status = pod["metadata"], container_status(pod)
        # Since 1.35, for every method (AuthorizePodWebsocketUpgradeCreatePermission).
        self._authorize("create", POD, "exec", metadata["namespace"], metadata["name"])
        wanted = request.query.get("container", status["name"])
        if wanted != status["name"]:
            words = f"container {wanted} is not valid for pod {metadata['name']}"
            raise Refusal(400, "BadRequest", words)
        if not request.query.get("command"):
            raise Refusal(
                400, "BadRequest", "you must specify at least 1 command for the container"
            )
        container = self._containers.get(metadata["uid"])
        if container is None or "running" not in status["state"]:
            raise Refusal(500, "InternalError", f'container not found ("{wanted}")')

        def serve(handler: Handler, cut: int | None) -> None:
            _Session(handler, container, self.in_background).serve(cut)

        return serve

    def _store_new(
        self, resource: Resource, namespace: str, body: Object, request: Request
    ) -> Object:
        made = super()._store_new(resource, namespace, body, request)
        if resource is not POD or "dryRun" in request.query:
            return made
        self.schedule(made)
        if limit_s := made["spec"].get("activeDeadlineSeconds"):
            self.in_background(lambda: self._end_late(made, float(limit_s)))
        return made

    def _end_late(self, pod: Object, limit_s: float) -> None:
        """End a pod that has run for too long, as the kubelet does."""

        def is_over() -> bool:
            return "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] in (
                "Succeeded",
                "Failed",
            )

        with self.changed:
            if not self.wait_for(is_over, limit_s) and not self.closing:
                pod["status"] |= {"reason": "DeadlineExceeded", "message": _DEADLINE}
                if (container := self._containers.get(pod["metadata"]["uid"])) is not None:
                    container.terminate(pod["spec"]["terminationGracePeriodSeconds"])


class _Session:
    """One command, from the handshake to its end."""

    def __init__(
        self,
        handler: Handler,
        container: Container,
        in_background: Callable[[Callable[[], None]], None],
    ) -> None:
        self._handler = handler
        self._container = container
        self._in_background = in_background
        self._query = parse_qs(urlsplit(handler.path).query, keep_blank_values=True)
        self._writing = threading.Lock()

    def serve(self, cut: int | None) -> None:
        """Run the command; the connection breaks after so many messages of the client."""
        handler = self._handler
        offered = handler.headers.get("Sec-WebSocket-Protocol") or ""
        protocol = next((p.strip() for p in offered.split(",") if p.strip() in PROTOCOLS), None)
        if (handler.headers.get("Upgrade") or "").lower() != "websocket" or protocol is None:
            text = json.dumps(status_object(400, "BadRequest", "Upgrade request required")).encode()
            handler.send_response(400)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text)
            return
        handler.close_connection = True
        key = handler.headers["Sec-WebSocket-Key"].encode()
        handler.send_response(101)
        for name, value in {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Accept": base64.b64encode(hashlib.sha1(key + _GUID).digest()).decode(),
            "Sec-WebSocket-Protocol": protocol,
        }.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.flush()
        self._send(b"", _PING)
        process = self._begin()
        try:
            self._hear(process, protocol, cut)
        except ConnectionAbortedError:
            handler._drop()
        finally:
            _close(process)

    def _begin(self) -> "subprocess.Popen[bytes] | None":
        """Start the command, or say why it cannot be."""
        try:
            process = self._container.execute(self._query["command"], self._wants("stdin"))
        except OSError as error:
            words = f"error executing command in container: failed to exec in container: {error}"
            self._end(status_object(500, "InternalError", words))
            return None
        self._in_background(lambda: self._show(process))
        return process

    def _hear(
        self, process: "subprocess.Popen[bytes] | None", protocol: str, cut: int | None
    ) -> None:
        """Pass the client's input on to the command until the connection closes."""
        for count in itertools.count():
            if count == cut:
                raise ConnectionAbortedError
            opcode, content = self._message()
            if opcode == _CLOSE:
                with contextlib.suppress(OSError):
                    self._send(content, _CLOSE)
                return
            if opcode == _PING:
                self._send(content, _PONG)
            elif opcode != _PONG and content and process is not None:
                channel, rest = content[0], content[1:]
                if channel == CLOSE_CHANNEL and protocol == PROTOCOLS[0] and rest == b"\0":
                    _close(process)
                elif channel == STDIN and process.stdin is not None and not process.stdin.closed:
                    try:
                        process.stdin.write(rest)
                        process.stdin.flush()
                    except OSError:  # the command does not listen any more
                        _close(process)

    def _message(self) -> tuple[int, bytes]:
        """Read a message of the client; that of close where the connection is lost."""
        whole, opcode = b"", 0
        while True:
            head = self._handler.rfile.read(2)
            if len(head) < 2:
                return _CLOSE, b""
            final, code = head[0] & 0x80, head[0] & 0x0F
            length = head[1] & 0x7F
            assert head[1] & 0x80, "a client's frames are masked"
            if length > 125:
                size, form = (2, ">H") if length == 126 else (8, ">Q")
                (length,) = struct.unpack(form, self._handler.rfile.read(size))
            mask, content = self._handler.rfile.read(4), self._handler.rfile.read(length)
            if len(content) < length:
                return _CLOSE, b""
            key = (mask * (length // 4 + 1))[:length]
            plain = (int.from_bytes(content) ^ int.from_bytes(key)).to_bytes(length)
            if code >= _CLOSE:
                return code, plain
            whole, opcode = whole + plain, code or opcode
            if final:
                return opcode, whole

    def _show(self, process: "subprocess.Popen[bytes]") -> None:
        """Send the command's output and its exit status."""
        streams = [(STDOUT, process.stdout), (STDERR, process.stderr)]
        readers = [threading.Thread(target=self._pass_on, args=one) for one in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        code = process.wait()
        status: Object = {"metadata": {}, "status": "Success"}
        if code:
            code = code if code > 0 else 128 - code
            words = f"command terminated with non-zero exit code: exit status {code}"
            cause = {"reason": "ExitCode", "message": str(code)}
            status |= {"status": "Failure", "message": words, "reason": "NonZeroExitCode"}
            status["details"] = {"causes": [cause]}
        self._end(status)

    def _pass_on(self, channel: int, stream: Any) -> None:
        shown = self._wants("stdout" if channel == STDOUT else "stderr")
        for chunk in iter(lambda: stream.read1(_CHUNK), b""):
            if shown:
                with contextlib.suppress(OSError):
                    self._send(bytes([channel]) + chunk, _BINARY)
        stream.close()

    def _end(self, status: Object) -> None:
        with contextlib.suppress(OSError):
            self._send(bytes([ERROR]) + json.dumps(status).encode(), _BINARY)
            self._send(struct.pack(">H", 1000), _CLOSE)

    def _send(self, content: bytes, opcode: int) -> None:
        length = len(content)
        head = bytes([0x80 | opcode])
        if length < 126:
            head += bytes([length])
        else:
            head += struct.pack(">BH", 126, length) if length < 1 << 16 else b""
            head += struct.pack(">BQ", 127, length) if length >= 1 << 16 else b""
        with self._writing:
            self._handler.wfile.write(head + content)

    def _wants(self, stream: str) -> bool:
        values: Sequence[str] = self._query.get(stream) or [""]
        return values[-1] in ("1", "t", "T", "true", "TRUE", "True")


def _close(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None and process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
