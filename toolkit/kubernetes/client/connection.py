"""The connection to an API server: requests as plain JSON, and its refusals as our exceptions.

The official client finds the server, its certificates and the credentials, which it renews; besides
exec.py the only module that imports it, at the first request. The
requests are our own: the client's differ from version to version (35 to 37), and none of them can
apply every kind.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.profile import KubernetesProfile
from toolkit.text import untrusted

__all__ = ["Away", "Conflict", "Connection", "Denied", "Expired", "Missing", "NotServed"]

TIMEOUT_S = (5.0, 60.0)
"""How long to connect, and how long to wait for an answer."""

LONGEST_PAUSE_S = 30.0
"""The longest pause that is accepted from a server's Retry-After."""

BODY_BYTES = 256 << 20
"""How large an answer may be: a list of ten thousand pods."""

BODY_S = 300.0
"""How long an answer may take to come."""

_WORDS_BYTES = 1 << 20
"""How much a refusal may say."""

_READ_ATTEMPTS = 4

_NO_LOG = re.compile("previous terminated container .* not found|waiting to start")
"""Messages of the API server with 400 for a container without a log."""

_WITHOUT_CLUSTER = (
    "name a context in the profile, or set KUBECONFIG; "
    "`toolkit render JOB.yaml --to PROFILE | kubectl apply -f -` needs no Python client"
)


class Away(SchedulerMissing):
    """The API server gives no answer, or none for now; asking again may help."""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, connected: bool = True
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.connected = connected


class Missing(LauncherError):
    """The object, or the log, is not there."""


class NotServed(LauncherError):
    """The cluster does not know this kind of object."""


class Conflict(LauncherError):
    """The object exists already, has changed, or another manager owns one of its fields."""


class Denied(LauncherError):
    """This is not allowed, be it by RBAC or by an admission webhook."""


class Expired(LauncherError):
    """The server does not remember what a watch or a list wants to go on from."""


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
        """Whether no answer has accepted the credentials yet; if one did, a refusal means that they
        are too old."""
        self._lock = threading.Lock()

    @property
    def identity(self) -> tuple[str, ...]:
        """A key that distinguishes this cluster from others."""
        if self._given:
            return (f"client {id(self._api_client)}",)
        return (self._environ.get("KUBECONFIG", ""), self.context or "")

    def connect(self) -> None:
        """Find the server and the credentials, so that `context` is known; no request is sent.

        Raises:
            SchedulerMissing: no cluster is named, or the named one cannot be used.
        """
        self._client()

    def credentials(self) -> tuple[Any, dict[str, str]]:
        """Return the official client's configuration, and the header with the credentials."""
        configuration = self._client().configuration
        return configuration, self._authorization(configuration)

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """Send a request and return the answer's JSON.

        Reads are retried after a Retry-After, or if a kept-alive connection turns out to be closed.

        Raises:
            LauncherError: the server refused; its words are in the message.
            Away: no answer, or none for now.
        """
        reads = method in ("GET", "DELETE")
        for attempt in range(1, _READ_ATTEMPTS + 1):
            try:
                with self.open(
                    method, path, query=query, body=body, content_type=content_type
                ) as answer:
                    text = body_of(answer)
                return untrusted.parse_json(text)
            except ValueError as error:
                host = self._client().configuration.host
                raise LauncherError(
                    f"what answers at {host} is no Kubernetes API server: {text[:60]!r}"
                ) from error
            except Away as error:
                if not reads or attempt == _READ_ATTEMPTS or error.retry_after_s is None:
                    raise
                self.sleep(min(error.retry_after_s, LONGEST_PAUSE_S))
        raise AssertionError("the last attempt raises")

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: tuple[float, float] = TIMEOUT_S,
    ) -> Iterator[Any]:
        """Send a request and give the response, to be read as it comes.

        Raises:
            LauncherError: the server refused; its words are in the message.
            Away: no answer, or none for now; also where one breaks off while it is read.
        """
        _, _, errors = self._modules()
        try:
            response = self._send(method, path, query, body, content_type, timeout_s)
            try:
                if response.status >= 400:
                    words = body_of(response, limit=_WORDS_BYTES)
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

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        timeout_s: tuple[float, float],
    ) -> Any:
        """Send a request; once more, where a kept connection was closed or a token is too old."""
        _, _, errors = self._modules()
        from urllib3 import Timeout

        kept = method in ("GET", "DELETE")
        while True:
            client = self._client()
            headers = {"Accept": "application/json", "User-Agent": "torch-deploy-toolkit"}
            headers |= self._authorization(client.configuration)
            if body is not None:
                headers["Content-Type"] = content_type
            url = client.configuration.host.rstrip("/") + path
            if query:
                url += f"?{urlencode(query)}"
            try:
                response = client.rest_client.pool_manager.request(
                    method,
                    url,
                    body=None if body is None else json.dumps(body),
                    headers=headers,
                    timeout=Timeout(connect=timeout_s[0], read=timeout_s[1]),
                    retries=False,
                    preload_content=False,
                )
            except errors.ProtocolError:
                if not kept:
                    raise
                kept = False
                continue
            if response.status == 401 and self._renewed(client):
                response.drain_conn()
                response.release_conn()
                continue
            self._fresh = self._fresh and response.status == 401
            return response

    @staticmethod
    def _authorization(configuration: Any) -> dict[str, str]:
        """Return the header with the token, which this renews where it has a date."""
        for name in ("BearerToken", "authorization"):  # the first since client 36
            if value := configuration.get_api_key_with_prefix(name):
                return {"Authorization": value}
        return {}

    def _client(self) -> Any:
        with self._lock:
            if self._api_client is None:
                self._api_client = self._connect()
                self._fresh = True
            return self._api_client

    def _renewed(self, client: Any) -> bool:
        """Read the kubeconfig again after a refusal, once; whether that is worth another try."""
        with self._lock:
            if self._given or self._api_client is not client:
                return not self._given
            fresh, self._fresh = self._fresh, True
            # Just read and refused all the same: the next question looks for better ones.
            self._api_client = None if fresh else self._connect()
        client.close()
        return not fresh

    def _connect(self) -> Any:
        """Connect by kubeconfig as kubectl does, or else as a pod of the cluster."""
        client, config, _ = self._modules()

        # The client reads KUBECONFIG when it is imported, which may be long ago.
        file = self._environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            if self.context is None:
                _, active = config.list_kube_config_contexts(file)
                self.context = active["name"]  # tomorrow's current context may be another
            return config.new_client_from_config(file, context=self.context)
        except (config.ConfigException, yaml.YAMLError, OSError, TypeError) as error:
            wanted = f"context {self.context!r} of {file}" if self.context else file
            why = f"{wanted} cannot be used ({_first_line(error)})"
        there = any(Path(part).expanduser().exists() for part in file.split(os.pathsep))
        if self.context is None and not there:
            with contextlib.suppress(config.ConfigException):
                inside = client.Configuration()
                config.load_incluster_config(client_configuration=inside)
                return client.ApiClient(inside)
            why = f"there is no {file}, and this is no pod of a cluster"
        raise SchedulerMissing(f"no Kubernetes cluster at hand: {why}; {_WITHOUT_CLUSTER}")

    @staticmethod
    def _modules() -> tuple[Any, Any, Any]:
        try:
            from kubernetes import client, config
            from urllib3 import exceptions
        except ImportError as error:
            raise LauncherError(
                f"the Kubernetes client is missing ({error}); "
                "pip install 'torch-deploy-toolkit[kubernetes]'"
            ) from error
        return client, config, exceptions


def body_of(response: Any, *, limit: int = BODY_BYTES) -> bytes:
    """Return all that a server answers, unpacked.

    Raises:
        LauncherError: it is more than the limit.
        Away: it has not come within `BODY_S`: a server may send a byte now and then.
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


def refusal(status: int, content: bytes, headers: Mapping[str, str]) -> LauncherError:
    """Return the exception for an answer that is no success."""
    text = content.decode(errors="replace").strip()
    try:
        words, by_server = str(untrusted.mapping(untrusted.parse_json(text))["message"]), True
    except (KeyError, ValueError):
        words, by_server = text or f"HTTP status {status}", False
    # A Status object names the missing object; a kind that is not served is refused by the router.
    if status == 404 and (
        not by_server or words.startswith("the server could not find the requested")
    ):
        return NotServed(words)
    if status == 401:
        return LauncherError(f"the cluster does not accept your credentials ({words}); log in anew")
    if status == 429 or status >= 500:
        wait_s = None
        with contextlib.suppress(KeyError, ValueError):
            asked = untrusted.finite(float(headers["Retry-After"]))
            wait_s = asked if asked is not None and asked >= 0 else None
        return Away(f"the Kubernetes API server cannot answer: {words}", retry_after_s=wait_s)
    kind = {403: Denied, 404: Missing, 409: Conflict, 410: Expired}.get(status, LauncherError)
    if status == 400 and _NO_LOG.search(words):
        kind = Missing
    error = kind(f"Kubernetes refused: {words}")
    error.answer = words
    return error


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]
