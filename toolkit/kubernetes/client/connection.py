"""The connection to an API server: requests in plain JSON, error responses as exceptions.

The official client finds the server, the certificates and the credentials, and renews the
credentials. Only this module and exec.py import it, at the first request.

This module sends the requests itself: the client's methods differ between versions (35 to 37), and
none of them applies every kind. Its `dynamic` part (37) first lists the whole API, caches it in a
file of the shared temporary folder, has no `fieldValidation`, and reads an answer of any size into
memory. Its `watch` reads lines of any length, never lists anew after a 410 and has no back-off for
a 429. Retries, limits and error mapping would still have to be written around it.
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import yaml

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.profile import KubernetesProfile
from toolkit.text import untrusted

T = TypeVar("T")

TIMEOUT_S = (5.0, 60.0)
"""Connect timeout and read timeout."""

FIRST_PAUSE_S = 0.5

LONGEST_PAUSE_S = 30.0
"""The longest Retry-After pause that is honoured."""

BODY_BYTES = 256 << 20
"""Maximum size of a response: a list of ten thousand pods."""

BODY_S = 300.0
"""Maximum time to read a response."""

_REFUSAL_BYTES = 1 << 20
_LINE_BYTES = 64 << 20
_READ_ATTEMPTS = 4

_NO_LOG = re.compile("previous terminated container .* not found|waiting to start")
"""Messages of the API server, with status 400, for a container without a log."""


_UNKNOWN_FIELD = ("failed to create typed patch object", "not declared in schema")
"""Message of status 500 for an unknown field in a server-side apply (seen on 1.34.9)."""


_WEBHOOK = 'failed calling webhook "'
"""Message of status 500 when a webhook does not answer (seen on 1.35); its name follows."""


class Away(SchedulerMissing):
    """The API server does not respond, or not now; a retry may help."""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, connected: bool = True
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.connected = connected


class Missing(LauncherError):
    """The object or the log does not exist."""


class NotServed(LauncherError):
    """The cluster does not know this kind of object."""


class Conflict(LauncherError):
    """The object already exists, has changed, or another field manager owns one of its fields."""


class Denied(LauncherError):
    """RBAC or an admission webhook denied the request."""


class Expired(LauncherError):
    """The resource version from which a watch or a list should continue has expired."""


def unless_refused(question: Callable[[], T]) -> T | None:
    """Return the server's answer; None if it refuses, for example for lack of permission."""
    try:
        return question()
    except Away:
        raise
    except LauncherError:
        return None


class Connection:
    """A namespace of a cluster, as one profile reaches it."""

    def __init__(
        self,
        profile: KubernetesProfile,
        *,
        api_client: Any = None,
        sleep: Callable[[float], None] = time.sleep,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.namespace = profile.namespace
        self.context = profile.context
        self.sleep = sleep
        self._api_client = api_client
        self._given = api_client is not None
        self._environ = environ
        self._fresh = True
        """Whether the server has not accepted these credentials yet. After it has, a refusal means
        that the credentials have expired."""
        self._lock = threading.Lock()

    @property
    def identity(self) -> tuple[str, ...]:
        """A key that identifies this namespace of this cluster."""
        if self._given:
            return (f"client {id(self._api_client)}", self.namespace)
        return (self._environ.get("KUBECONFIG", ""), self.context or "", self.namespace)

    def connect(self) -> Any:
        """Return the official client, which sets `context`; no request is sent.

        Raises:
            SchedulerMissing: no cluster is named, or the named one cannot be used.
        """
        with self._lock:
            if self._api_client is None:
                self._api_client = self._new_client()
                self._fresh = True
            return self._api_client

    def credentials(self) -> tuple[Any, dict[str, str]]:
        """Return the official client and the header with the token; renew an old token."""
        client = self.connect()
        for name in ("BearerToken", "authorization"):  # the first since client 36
            if value := client.configuration.get_api_key_with_prefix(name):
                return client, {"Authorization": value}
        return client, {}

    def ask(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None
    ) -> Any:
        """Send a request and return the answer's JSON.

        Reads are retried after a Retry-After, or if a keep-alive connection was closed.

        Raises:
            LauncherError: the server refused; its words are in the message.
            Away: no answer, or none for now.
        """

        def answer() -> Any:
            with self.open(method, path, query=query, body=body) as response:
                text = body_of(response)
            try:
                return untrusted.parse_json(text)
            except ValueError as error:
                host = self.connect().configuration.host
                raise LauncherError(
                    f"what answers at {host} is not a Kubernetes API server: {text[:60]!r}"
                ) from error

        attempts = _READ_ATTEMPTS if method in ("GET", "DELETE") else 1
        return self.patiently(answer, attempts=attempts, only_if_told=True)

    def patiently(
        self, question: Callable[[], T], *, attempts: int, only_if_told: bool = False
    ) -> T:
        """Retry with back-off while the server is away; give up if the connection is refused.

        `only_if_told` retries only if the server sends a Retry-After.
        """
        for attempt in range(1, attempts + 1):
            try:
                return question()
            except Away as error:
                wait_s = error.retry_after_s
                if wait_s is None and not only_if_told and error.connected:
                    wait_s = FIRST_PAUSE_S * 2 ** (attempt - 1)
                if wait_s is None or attempt == attempts:
                    raise
                self.sleep(min(wait_s, LONGEST_PAUSE_S))
        raise AssertionError("the last attempt raises")

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: tuple[float, float] = TIMEOUT_S,
    ) -> Iterator[Any]:
        """Send a request and yield the response as a stream.

        Raises:
            LauncherError: the server refused; its words are in the message.
            Away: no answer, or none for now, or the response broke off while it was read.
        """
        self.connect()  # which reports a missing library
        from urllib3 import Timeout
        from urllib3 import exceptions as errors

        target = path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "User-Agent": "torch-deploy-toolkit"}
        if body is not None:
            # Every PATCH is a server-side apply.
            kind = "apply-patch+yaml" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        content = None if body is None else json.dumps(body)
        try:
            timeout = Timeout(connect=timeout_s[0], read=timeout_s[1])
            response = self._send(method, target, headers, body=content, timeout=timeout)
            try:
                if response.status >= 400:
                    words = body_of(response, limit=_REFUSAL_BYTES)
                    raise refusal(response.status, words, response.headers)
                yield response
            finally:
                response.close()
                response.release_conn()
        except errors.HTTPError as error:
            never = (errors.ConnectTimeoutError, errors.NewConnectionError)
            raise Away(
                f"the Kubernetes API server does not answer: {_first_line(error)}",
                connected=not isinstance(error, never),
            ) from error

    def _send(self, method: str, target: str, headers: Mapping[str, str], **request: Any) -> Any:
        """Send a request; retry once if a keep-alive connection was closed or the token expired."""
        from urllib3 import exceptions as errors

        again = method in ("GET", "DELETE")
        while True:
            client, authorization = self.credentials()
            try:
                response = client.rest_client.pool_manager.request(
                    method,
                    client.configuration.host.rstrip("/") + target,
                    headers={**headers, **authorization},
                    retries=False,
                    preload_content=False,
                    **request,
                )
            except errors.ProtocolError:
                if not again:
                    raise
                again = False
                continue
            if response.status == 401 and self._renewed(client):
                response.drain_conn()
                response.release_conn()
                continue
            self._fresh = self._fresh and response.status == 401
            return response

    def _renewed(self, client: Any) -> bool:
        """Read the kubeconfig again, once, after a refusal; return whether a retry makes sense."""
        with self._lock:
            if self._given or self._api_client is not client:
                return not self._given
            fresh, self._fresh = self._fresh, True
            # Fresh credentials were refused as well: the next request reads the kubeconfig again.
            self._api_client = None if fresh else self._new_client()
        client.close()
        return not fresh

    def _new_client(self) -> Any:
        """Connect by kubeconfig as kubectl does, or else by the service account of a pod."""
        try:
            from kubernetes import client
            from kubernetes import config as config_module
        except ImportError as error:
            raise LauncherError(
                f"the Kubernetes client is missing ({error}); pip install kubernetes jsonpatch"
            ) from error
        config: Any = config_module
        # The client reads KUBECONFIG only once, when it is imported.
        file = self._environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            if self.context is None:
                _, active = config.list_kube_config_contexts(file)
                self.context = active["name"]  # the current context may change later
            return config.new_client_from_config(file, context=self.context)
        except (config.ConfigException, yaml.YAMLError, OSError, TypeError) as error:
            source = f"context {self.context!r} of {file}" if self.context else file
            why = f"{source} cannot be used ({_first_line(error)})"
        exists = any(Path(part).expanduser().exists() for part in file.split(os.pathsep))
        if self.context is None and not exists:
            with contextlib.suppress(config.ConfigException):
                configuration = client.Configuration()
                config.load_incluster_config(client_configuration=configuration)
                return client.ApiClient(configuration)
            why = f"{file} does not exist, and this is not a pod"
        raise SchedulerMissing(
            f"no Kubernetes cluster found: {why}; name a context in the profile, or set "
            "KUBECONFIG; `toolkit render JOB.yaml --to PROFILE | kubectl apply --server-side -f -` "
            "needs no Python client"
        )


def body_of(response: Any, *, limit: int = BODY_BYTES) -> bytes:
    """Return the body of a response, decompressed.

    Raises:
        LauncherError: the body is larger than the limit.
        Away: it took longer than `BODY_S`; a server may send a byte now and then.
    """
    parts, size, until = [], 0, time.monotonic() + BODY_S
    for part in response.stream(1 << 16, decode_content=True):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise LauncherError(f"the Kubernetes API server answers more than {limit:,} bytes")
        if time.monotonic() > until:
            raise Away(f"the Kubernetes API server has not answered within {BODY_S:g} s")
    return b"".join(parts)


def lines_of(response: Any) -> Iterator[bytes]:
    """Yield the lines of a response as they come."""
    rest = bytearray()
    for chunk in response.stream(amt=None, decode_content=False):
        rest += chunk
        if b"\n" in chunk:
            *whole, rest = rest.split(b"\n")
            yield from map(bytes, whole)
        if len(rest) > _LINE_BYTES:
            raise LauncherError("the API server sends a line without an end")
    if rest:
        yield bytes(rest)


def hang_up(response: Any) -> None:
    """Unblock the thread that reads a response by shutting down its socket; None is ignored."""
    connection = getattr(response, "connection", None)
    if (sock := getattr(connection, "sock", None)) is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def refusal(status: int, content: bytes, headers: Mapping[str, str]) -> LauncherError:
    """Return the exception for an error response."""
    text = content.decode(errors="replace").strip()
    try:
        words, by_server = str(untrusted.mapping(untrusted.parse_json(text))["message"]), True
    except (KeyError, ValueError):
        words, by_server = text or f"HTTP status {status}", False
    # A Status object names a missing object; for an unknown kind, the router answers.
    if status == 404 and (
        not by_server or words.startswith("the server could not find the requested")
    ):
        return NotServed(words)
    if status == 401:
        return LauncherError(
            f"the cluster does not accept your credentials ({words}); log in again"
        )
    if status == 429 or (status >= 500 and not all(part in words for part in _UNKNOWN_FIELD)):
        wait_s = None
        with contextlib.suppress(KeyError, ValueError):
            wait_s = untrusted.finite(float(headers["Retry-After"]))
        if wait_s is not None and wait_s < 0:
            wait_s = None
        who = "the Kubernetes API server cannot answer"
        if webhook := words.partition(_WEBHOOK)[2].partition('"')[0]:
            who = f"the operator behind webhook {webhook} does not answer"
        return Away(f"{who}: {words}", retry_after_s=wait_s)
    kind = {403: Denied, 404: Missing, 409: Conflict, 410: Expired}.get(status, LauncherError)
    if status == 400 and _NO_LOG.search(words):
        kind = Missing
    error = kind(f"Kubernetes refused: {words}")
    error.answer = words
    return error


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]
