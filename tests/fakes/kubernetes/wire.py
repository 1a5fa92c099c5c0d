"""The HTTP of the API server: answers, streams, and faults on demand."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import yaml

__all__ = ["Answer", "Fault", "Object", "Query", "Refusal", "Request", "Server", "status_object"]

Object = dict[str, Any]
Query = Mapping[str, str]
Answer = tuple[int, Any]


@dataclass(kw_only=True)
class Request:
    """A client's request."""

    method: str
    path: str
    query: Query
    body: Any = None
    content_type: str = ""
    agent: str = ""
    token: str = ""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the answer."""

    def is_on(self, key: str) -> bool:
        """Whether a parameter is true, as Go's ParseBool reads it."""
        return self.query.get(key, "") in ("1", "t", "T", "true", "TRUE", "True")


class Cluster(Protocol):
    """The cluster that answers the requests."""

    changed: Any
    faults: "list[Fault]"
    requests: list[tuple[str, str, Query]]

    def answer(self, request: Request) -> Answer: ...


@dataclass(kw_only=True)
class Fault:
    """A fault of the next requests that match."""

    method: str = ".*"
    """GET, POST, PUT, PATCH or DELETE; a regular expression."""

    path: str = ".*"
    """A regular expression for the whole path."""

    query: str = ".*"
    """A regular expression that is searched in the query as it was sent, like `watch=`."""

    status: int | None = None
    """The status to answer; None drops the connection, 200 answers as if nothing was wrong."""

    message: str = "please apply at your earliest convenience"
    """The server's words."""

    reason: str = "Fault"
    """The reason in the Status object."""

    retry_after: str | None = None
    """The header Retry-After."""

    text: str | None = None
    """A plain answer instead of a Status object, as proxies give it."""

    arrives: bool = False
    """Whether the request is done before its answer goes wrong."""

    latency_s: float = 0.0
    """Seconds before anything is done."""

    held: threading.Event | None = None
    """Event to wait for before anything is done."""

    cut: int | None = None
    """A stream (watch, log) is answered, and its connection breaks after so many lines."""

    times: int = 1
    """How many requests it hits."""


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(
        self, status: int, reason: str, message: str, details: Object | None = None
    ) -> None:
        self.answer = status, status_object(status, reason, message, details=details)
        super().__init__(message)


class Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, cluster: Cluster, port: int = 0) -> None:
        self.cluster = cluster
        self._open: set[Any] = set()
        super().__init__(("127.0.0.1", port), _Handler)

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
        query = {key: v[-1] for key, v in parse_qs(url.query, keep_blank_values=True).items()}
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.headers.get("Content-Type") or ""
        with cluster.changed:
            cluster.requests.append((self.command, url.path, query))
            fault = self._fault(cluster, url.path, url.query)
        if fault is not None and fault.latency_s:
            time.sleep(fault.latency_s)
        if fault is not None and fault.held is not None:
            fault.held.wait()
        request = Request(
            method=self.command,
            path=url.path,
            query=query,
            content_type=kind.partition(";")[0].strip(),
            agent=self.headers.get("User-Agent") or "",
            token=(self.headers.get("Authorization") or "").removeprefix("Bearer ").strip(),
        )
        headers: dict[str, str] = {}
        if "protobuf" in kind:
            words = "the body of the request was in an unknown format: only JSON and YAML are read"
            fault = Fault(status=415, reason="UnsupportedMediaType", message=words)
        passes = fault is None or fault.status == 200 or fault.cut is not None
        if passes or (fault is not None and fault.arrives):
            try:
                request.body = yaml.safe_load(content) if "yaml" in kind else _json(content)
                status, answer = cluster.answer(request)
            except ValueError as error:
                status, answer = 400, status_object(400, "BadRequest", str(error))
        if fault is not None and not passes:
            if fault.status is None:
                self._drop()
                return
            status = fault.status
            answer = fault.text or status_object(status, fault.reason, fault.message)
            if fault.retry_after is not None:
                headers["Retry-After"] = fault.retry_after
        if callable(answer):  # it takes over the connection
            answer(self, fault.cut if fault is not None else None)
            return
        if isinstance(answer, Iterator):
            self._stream(answer, fault.cut if fault is not None else None)
            return
        text = answer if isinstance(answer, str) else json.dumps(answer)
        kind = "text/plain; charset=utf-8" if isinstance(answer, str) else "application/json"
        self.send_response(status)
        for key, value in ({"Content-Type": kind} | headers).items():
            self.send_header(key, value)
        for warning in request.warnings:
            self.send_header("Warning", f"299 - {json.dumps(warning)}")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _fault(self, cluster: Cluster, path: str, query: str) -> Fault | None:
        for fault in cluster.faults:
            hit = re.fullmatch(fault.method, self.command) and re.fullmatch(fault.path, path)
            if fault.times and hit and re.search(fault.query, query):
                fault.times -= 1
                return fault
        return None

    def _drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _stream(self, chunks: Iterator[bytes], cut: int | None) -> None:
        self.send_response(200)
        is_log = urlsplit(self.path).path.endswith("/log")
        self.send_header("Content-Type", "text/plain" if is_log else "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        try:
            for index, chunk in enumerate(chunks):
                if index == cut:
                    raise ConnectionAbortedError
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if cut is not None:
                raise ConnectionAbortedError
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionAbortedError:
            self._drop()
        finally:
            getattr(chunks, "close", lambda: None)()


def _json(content: bytes) -> Any:
    return json.loads(content) if content else None


def status_object(
    code: int,
    reason: str,
    message: str,
    *,
    word: str = "Failure",
    details: Object | None = None,
) -> Object:
    found: Object = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": word,
        "message": message,
        "reason": reason,
        "code": code,
    }
    return found | ({"details": details} if details else {})
