"""Runs on a Kubernetes cluster with the Kubeflow Training Operator."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from toolkit.errors import LauncherError, RunNotFound
from toolkit.launchers import registry, rundir
from toolkit.launchers.base import Launcher, Run, RunState, RunStatus, new_run_name
from toolkit.launchers.k8s_api import Away, Cluster
from toolkit.launchers.k8s_logs import read_lines
from toolkit.launchers.k8s_status import judge, stuck_object
from toolkit.launchers.run_logs import LogView
from toolkit.planning import KubernetesPlan
from toolkit.planning import plan as make_plan
from toolkit.profile import KubernetesProfile
from toolkit.rendering import render

__all__ = ["KubernetesLauncher", "KubernetesRun"]

_RUN_LABEL = "torch-deploy-toolkit/run"
_JOB_ANNOTATION = "torch-deploy-toolkit/job"
_CANCEL_ATTEMPTS = 5


class KubernetesRun(Run):
    """A PyTorchJob of a cluster."""

    def __init__(
        self, record: registry.RunRecord, cluster: Cluster, environ: Mapping[str, str]
    ) -> None:
        super().__init__(record)
        self._cluster = cluster
        self._environ = environ
        self._object = record.uri.rpartition("/")[2]

    def status(self) -> RunStatus:
        """Ask the cluster; UNKNOWN where the API server is away or the object is gone.

        Raises:
            LauncherError: the server refuses to say, which asking again does not mend.
        """
        try:
            job = self._cluster.job(self._object)
            if job is None:
                return self._gone()
            if (status := judge(job)).state is RunState.SUCCEEDED:
                return status
            return judge(job, *self._causes(job))
        except Away as error:
            return RunStatus(state=RunState.UNKNOWN, reason=str(error))

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield the lines of all pods, each told by its pod's name where there is more than one.

        Raises:
            LauncherError: lines of certain ranks or of a later attempt are wanted.
        """
        if view.ranks:
            raise LauncherError(
                f"{self.uri}: lines of pods do not say their rank; "
                r"--grep '^\[worker-1\]' shows those of a pod"
            )
        if view.attempt:
            raise LauncherError(f"{self.uri}: on Kubernetes nothing counts attempts; all are 0")
        return self._read(view, on_status)

    def _read(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        job = self._cluster.job(self._object)
        if job is None:
            raise RunNotFound(f"the PyTorchJob of {self.uri} is gone, and its log with its pods")
        workers = job["spec"]["pytorchReplicaSpecs"]["Worker"].get("replicas", 1)
        yield from read_lines(
            self._cluster,
            self._object,
            prefixed=workers > 1,
            ended=(lambda: self._nothing_more(on_status)) if view.follow else None,
        )

    def _redacted(self, lines: Iterator[str]) -> Iterator[str]:
        return rundir.redacted(lines, self.run_dir, self._environ)

    def cancel(self) -> None:
        """Delete the PyTorchJob; its pods get SIGTERM and their grace period."""
        for _ in range(_CANCEL_ATTEMPTS):
            job = self._cluster.job(self._object)
            if job is None or judge(job).state.final:
                return
            # Before the deed: afterwards there is nothing left in the cluster to tell by.
            registry.mark_cancelled(self.uri, environ=self._environ)
            if self._cluster.delete(job):
                return
        raise LauncherError(f"{self.uri} changes faster than it can be cancelled; try again")

    def _causes(self, job: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the pods of a job, and the warnings that tell why nothing starts."""
        pods: list[Any] = []
        warnings: list[Any] = []
        try:
            pods = self._cluster.pods(self._object)
            if (stuck := stuck_object(job, pods)) is not None:
                warnings = self._cluster.warnings(stuck)
        except Away:
            raise
        except LauncherError:
            pass  # who may not see pods or events is still told the state
        return pods, warnings

    def _nothing_more(self, on_status: Callable[[RunStatus], object]) -> bool:
        found = self.status()
        on_status(found)
        return found.state.final or self._is_gone()

    def _is_gone(self) -> bool:
        try:
            return self._cluster.job(self._object) is None
        except Away:
            return False

    def _gone(self) -> RunStatus:
        if registry.is_cancelled(self.uri, environ=self._environ):
            return RunStatus(state=RunState.CANCELLED)
        reason = "the PyTorchJob is gone, and was not cancelled from here: somebody deleted it"
        return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)


class KubernetesLauncher(Launcher[KubernetesPlan]):
    """Creates PyTorchJobs."""

    def __init__(
        self,
        profile: KubernetesProfile,
        *,
        api_client: Any = None,
        sleep: Callable[[float], None] = time.sleep,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepare to submit; nothing is imported or asked yet.

        Args:
            profile: The site.
            api_client: A `kubernetes.client.ApiClient`; by kubeconfig or in the cluster without.
            sleep: Waits between two attempts.
            environ: Where KUBECONFIG and the user's list of runs are looked for.
        """
        self._profile = profile
        self._environ = environ
        self._cluster = Cluster(profile, api_client=api_client, sleep=sleep, environ=environ)

    def submit(self, plan: KubernetesPlan) -> KubernetesRun:
        """Create a new PyTorchJob; it is what `render` shows, with a name of its own."""
        name = new_run_name(plan.job.name)
        body = yaml.safe_load(render(make_plan(plan.job, plan.profile, run_name=name)))

        def ours(found: Any) -> bool:
            metadata = (found or {}).get("metadata", {})
            label = metadata.get("labels", {}).get(_RUN_LABEL)
            digest = metadata.get("annotations", {}).get(_JOB_ANNOTATION)
            return bool((label, digest) == (name, plan.job.digest))

        self._cluster.create(body, ours=ours)
        profile = self._profile.model_copy(update={"context": self._cluster.context})
        record = registry.remember(
            uri=f"k8s://{profile.namespace}/{name}",
            name=name,
            job=plan.job.name,
            profile=profile,
            environ=self._environ,
        )
        return self.open(record)

    def open(self, record: registry.RunRecord) -> KubernetesRun:
        """Return the handle of an earlier run."""
        return KubernetesRun(record, self._cluster, self._environ)
