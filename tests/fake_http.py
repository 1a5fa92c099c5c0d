"""The HTTP of `FakeKubernetes`: answers, streams, and faults on demand."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

__all__ = ["Answer", "Fault", "Object", "Query", "Refusal", "Server", "status_object"]

Object = dict[str, Any]
Query = Mapping[str, str]
Answer = tuple[int, Any]


class Cluster(Protocol):
    """What answers the requests."""

    changed: Any
    faults: "list[Fault]"
    requests: list[tuple[str, str, Query]]

    def answer(self, method: str, path: str, query: Query, body: Any) -> Answer: ...


@dataclass(kw_only=True)
class Fault:
    """What goes wrong with the next requests that match."""

    method: str
    """GET, POST or DELETE."""

    path: str = ".*"
    """A regular expression for the whole path."""

    status: int | None = None
    """The status to answer; None drops the connection."""

    message: str = "please apply at your earliest convenience"
    """The server's words."""

    retry_after: str | None = None
    """The header Retry-After."""

    arrives: bool = False
    """Whether the request is done before its answer goes wrong."""

    times: int = 1
    """How many requests it hits."""


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.answer = status, status_object(status, reason, message)
        super().__init__(message)


class Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cluster = cluster
        self._open: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients hang up, and connections are dropped on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        url, cluster = urlsplit(self.path), self.server.cluster
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(content) if content else None
        with cluster.changed:
            cluster.requests.append((self.command, url.path, query))
            fault = self._fault(cluster, url.path)
        headers = {}
        if fault is None or fault.arrives:
            status, answer = cluster.answer(self.command, url.path, query, body)
        if fault is not None:
            if fault.status is None:
                self._drop()
                return
            status = fault.status
            answer = status_object(status, "Fault", fault.message)
            if fault.retry_after is not None:
                headers["Retry-After"] = fault.retry_after
        if isinstance(answer, Iterator):
            self._stream(answer)
            return
        text = answer if isinstance(answer, str) else json.dumps(answer)
        kind = "text/plain; charset=utf-8" if isinstance(answer, str) else "application/json"
        self.send_response(status)
        for key, value in ({"Content-Type": kind} | headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_PUT = do_DELETE = do_GET

    def _fault(self, cluster: Cluster, path: str) -> Fault | None:
        for fault in cluster.faults:
            if fault.times and fault.method == self.command and re.fullmatch(fault.path, path):
                fault.times -= 1
                return fault
        return None

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _stream(self, chunks: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for chunk in chunks:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionAbortedError:
            self._drop()


def status_object(code: int, reason: str, message: str, *, word: str = "Failure") -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": word,
        "message": message,
        "reason": reason,
        "code": code,
    }
