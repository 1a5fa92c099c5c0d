"""The Kubernetes API server: the few questions that a run asks, and its answers as plain data.

The one place that imports the client, and only once there is something to ask.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.profile import KubernetesProfile

__all__ = ["Away", "Cluster", "Missing"]

GROUP, VERSION, PLURAL = "kubeflow.org", "v1", "pytorchjobs"
FIELD_MANAGER = "torch-deploy-toolkit"

_TIMEOUT_S = (5.0, 60.0)
"""How long to connect, and how long to wait for an answer."""

_LOG_TIMEOUT_S = (5.0, 300.0)
"""A rank may be silent for long; the reader asks again after this much."""

_ATTEMPTS = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0

_NO_LOG = re.compile("previous terminated container .* not found|waiting to start")
"""What the API server says with 400 where a container has no log."""

_WITHOUT_CLUSTER = (
    "name a context in the profile, or set KUBECONFIG; "
    "`toolkit render JOB.yaml --to PROFILE | kubectl apply -f -` needs no Python client"
)


class Away(SchedulerMissing):
    """The API server gives no answer, or none for now; asking again may help."""


class Missing(LauncherError):
    """The object, or the log, is not there."""


class Cluster:
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
        self._api_client = api_client
        self._sleep = sleep
        self._environ = environ

    def create(self, body: Mapping[str, Any], *, ours: Callable[[Any], bool]) -> None:
        """Create a PyTorchJob, once, even where answers get lost on the way.

        Args:
            body: The object.
            ours: Whether an object that is there already is this one.

        Raises:
            LauncherError: the server refused; its words are in the message.
            SchedulerMissing: no server, or none that answers.
        """
        client, _, errors = self._modules()
        api, name = client.CustomObjectsApi(self._connection()), body["metadata"]["name"]
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            wait_s = pause_s
            try:
                api.create_namespaced_custom_object(
                    *(GROUP, VERSION, self.namespace, PLURAL, dict(body)),
                    field_manager=FIELD_MANAGER,
                    field_validation="Strict",
                    _request_timeout=_TIMEOUT_S,
                )
                return
            except client.ApiException as error:
                if error.status == 409 and ours(self.job(name)):
                    return  # the attempt whose answer was lost did arrive
                if not _passing(error):
                    raise _refused(error) from error
                failed = _refused(error)
                with contextlib.suppress(KeyError, ValueError):
                    wait_s = float((error.headers or {})["Retry-After"])
            except errors.MaxRetryError as error:
                raise _no_answer(error) from error  # never connected, after attempts of its own
            except errors.HTTPError as error:
                failed = _no_answer(error)
            if attempt < _ATTEMPTS:
                self._sleep(min(wait_s, _LONGEST_PAUSE_S))
                pause_s *= 2
        raise Away(
            f"{failed} ({_ATTEMPTS} attempts; `kubectl -n {self.namespace} get {PLURAL} {name}` "
            "shows whether one has arrived)"
        )

    def job(self, name: str) -> dict[str, Any] | None:
        """Return the PyTorchJob, or None where there is none."""
        client, _, _ = self._modules()
        api = client.CustomObjectsApi(self._connection())
        try:
            with self._translated():
                found = api.get_namespaced_custom_object(
                    *(GROUP, VERSION, self.namespace, PLURAL, name), _request_timeout=_TIMEOUT_S
                )
        except Missing:
            return None
        return dict(found)

    def delete(self, job: Mapping[str, Any]) -> bool:
        """Delete a PyTorchJob that has not changed since it was read; its pods get their grace.

        Returns:
            Whether it is done; False where the object has changed, so that it must be read again.
        """
        client, _, _ = self._modules()
        metadata = job["metadata"]
        api = client.CustomObjectsApi(self._connection())
        # Foreground: the object stays until the pods have ended, so that all can see it stop.
        body = client.V1DeleteOptions(
            propagation_policy="Foreground",
            preconditions=client.V1Preconditions(
                uid=metadata["uid"], resource_version=metadata["resourceVersion"]
            ),
        )
        try:
            with self._translated():
                api.delete_namespaced_custom_object(
                    *(GROUP, VERSION, self.namespace, PLURAL, metadata["name"]),
                    body=body,
                    _request_timeout=_TIMEOUT_S,
                )
        except Missing:
            return True
        except _Conflict:
            return False
        return True

    def pods(self, job_name: str) -> list[dict[str, Any]]:
        """Return the pods of a PyTorchJob by rank."""
        client, _, _ = self._modules()
        with self._translated():
            answer = client.CoreV1Api(self._connection()).list_namespaced_pod(
                self.namespace,
                label_selector=f"training.kubeflow.org/job-name={job_name}",
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
        return sorted(_items(answer), key=_rank)

    def warnings(self, name: str) -> list[dict[str, Any]]:
        """Return the warning events about an object, oldest first."""
        client, _, _ = self._modules()
        with self._translated():
            answer = client.CoreV1Api(self._connection()).list_namespaced_event(
                self.namespace,
                field_selector=f"involvedObject.name={name},type=Warning",
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
        return sorted(_items(answer), key=_when)

    @contextlib.contextmanager
    def log(self, pod: str, *, previous: bool, follow: bool) -> Iterator[Any]:
        """Open the log of a pod's container, each line with its time, as a response to stream.

        Raises:
            Missing: the pod or the log of its container is gone.
        """
        client, _, _ = self._modules()
        with self._translated():
            response: Any = client.CoreV1Api(self._connection()).read_namespaced_pod_log(
                pod,
                self.namespace,
                container="pytorch",
                previous=previous,
                follow=follow,
                timestamps=True,
                _preload_content=False,
                _request_timeout=_LOG_TIMEOUT_S if follow else _TIMEOUT_S,
            )
            try:
                yield response
            finally:
                response.close()
                response.release_conn()

    def _connection(self) -> Any:
        if self._api_client is None:
            self._api_client = self._connect()
        return self._api_client

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

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        client, _, errors = self._modules()
        try:
            yield
        except client.ApiException as error:
            raise _refused(error) from error
        except errors.HTTPError as error:
            raise _no_answer(error) from error


class _Conflict(LauncherError):
    """The object has changed since it was read."""


def _passing(error: Any) -> bool:
    """Tell whether the same request may be answered better in a moment."""
    return bool(error.status == 429 or error.status >= 500)


def _refused(error: Any) -> LauncherError:
    try:
        words = json.loads(error.body)["message"]
    except (KeyError, TypeError, ValueError):
        words = (error.body or error.reason or f"HTTP status {error.status}").strip()
        if error.status == 404:  # a Status object says which object is missing; this is the router
            return LauncherError(
                f"the cluster knows no PyTorchJob ({words}): the Kubeflow Training Operator "
                "(training-operator v1) is not installed there; ask its administrators"
            )
    if error.status == 401:
        return LauncherError(f"the cluster does not accept your credentials ({words}); log in anew")
    if _passing(error) or error.status == 0:
        return Away(f"the Kubernetes API server cannot answer: {words}")
    kind = {404: Missing, 409: _Conflict}.get(error.status, LauncherError)
    if error.status == 400 and _NO_LOG.search(words):
        kind = Missing
    return kind(f"Kubernetes refused: {words}")


def _no_answer(error: Exception) -> Away:
    reason = getattr(error, "reason", None) or error
    return Away(f"the Kubernetes API server does not answer: {_first_line(reason)}")


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]


def _items(answer: Any) -> list[dict[str, Any]]:
    try:
        return list(json.loads(answer.data)["items"])
    finally:
        answer.release_conn()


def _rank(pod: Mapping[str, Any]) -> tuple[int, str]:
    metadata = pod["metadata"]
    index = metadata["labels"].get("training.kubeflow.org/replica-index", "")
    return (int(index) if index.isdecimal() else 0, metadata["name"])


def _when(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
