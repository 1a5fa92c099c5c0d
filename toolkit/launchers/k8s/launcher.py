"""Submits to a Kubernetes cluster."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import LauncherError, SchedulerMissing
from toolkit.kubernetes_options import Workload
from toolkit.launchers import registry
from toolkit.launchers.base import Launcher, Run, new_run_name
from toolkit.launchers.k8s import kept, watching
from toolkit.launchers.k8s.cluster import Cluster
from toolkit.launchers.k8s.connection import Connection, NotServed
from toolkit.launchers.k8s.kinds import KINDS, Kind, Object, place_of
from toolkit.launchers.k8s.run import KubernetesRun
from toolkit.launchers.k8s.submission import Group, groups_of, remove, submit, with_files
from toolkit.launchers.k8s.sweep import KubernetesPoint, opened
from toolkit.planning import KubernetesPlan
from toolkit.planning import plan as make_plan
from toolkit.pods import RUN_LABEL
from toolkit.profile import KubernetesProfile
from toolkit.rendering import render

__all__ = ["KubernetesLauncher", "dry_run", "watch_states"]


class KubernetesLauncher(Launcher[KubernetesPlan]):
    """Applies manifests."""

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
        self._cluster = Cluster(
            Connection(profile, api_client=api_client, sleep=sleep, environ=environ)
        )

    def submit(
        self, plan: KubernetesPlan, *, files: Mapping[str, bytes] | None = None
    ) -> KubernetesRun:
        """Start a new run; its objects are those that `render` shows, with a name of its own.

        Args:
            plan: What to start.
            files: What pods shall find in `plan.payload_dir`, by path in the run directory: at
                most 1 MiB, in a ConfigMap.

        Raises:
            LauncherError: the cluster refused; nothing is left there.
            SchedulerMissing: no cluster, or none that answers.
        """
        registry.check(environ=self._environ)
        name = new_run_name(plan.job.name)
        kind = KINDS[plan.workload]
        made = make_plan(plan.job, plan.profile, run_name=name)
        groups = groups_of(render(made), kind)
        if files:
            groups = [with_files(group, files) for group in groups]
        folder = kept.keep(name, plan.job, self._environ, files=files or {})
        try:
            self._submit(kind, groups)
        except LauncherError:
            kept.forget(name, self._environ)
            raise
        known: dict[str, Any] = {
            "context": self._cluster.connection.context,
            "workload": plan.workload,  # the job may have its own wish
            "master": self._profile.master and plan.workload == "PyTorchJob",
        }
        profile = self._profile.model_copy(update=known)
        record = registry.remember(
            uri=f"k8s://{profile.namespace}/{name}",
            name=name,
            job=plan.job.name,
            profile=profile,
            run_dir=folder if files else None,
            environ=self._environ,
        )
        return opened(record, self._cluster, kind, self._environ)

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Let a run that has ended go on from its checkpoints; of a sweep, what did not succeed.

        The object is deleted and made again under its name, so that it finds its run directory.

        Raises:
            LauncherError: it has succeeded or not ended, or the cluster refused.
        """
        assert isinstance(run, KubernetesRun)
        if chain > 1:
            raise LauncherError("--chain is Slurm's; on Kubernetes retries.requeue starts again")
        if self._profile.runs_claim is None:
            raise LauncherError(
                f"{run.uri}: profile {self._profile.name!r} names no runs_claim, so its "
                "checkpoints are gone with its pods; submit the job anew"
            )
        again = run.unfinished()
        whole = run.sweep if isinstance(run, KubernetesPoint) else run
        job = kept.job_of(whole.name, self._environ)
        plan = make_plan(job, self._profile, run_name=whole.object_name)
        if plan.payload_dir:
            raise LauncherError(f"{run.uri}: its code is gone with its pods; call it again")
        names = {part.object_name for part in again}
        groups = [group for group in groups_of(render(plan), run.kind) if group.name in names]
        for group in groups:
            remove(self._cluster, run.kind, group.name)
        for part in again:
            part.withdraw_cancel()
        self._submit(run.kind, groups)
        return run

    def open(self, record: registry.RunRecord) -> KubernetesRun:
        """Return the handle of an earlier run, or sweep."""
        kind = KINDS[self._profile.workload]
        return opened(record, self._cluster, kind, self._environ)

    def _submit(self, kind: Kind, groups: Sequence[Group]) -> None:
        """Make all runs; if one is refused, those before it are taken back."""
        for index, group in enumerate(groups):
            try:
                submit(self._cluster, kind, group)
            except LauncherError:
                for made in groups[:index]:
                    with contextlib.suppress(LauncherError):
                        if (found := self._cluster.get(kind, made.name)) is not None:
                            self._cluster.delete(kind, found, changed=True)
                raise


def dry_run(
    documents: Sequence[Object],
    profile: KubernetesProfile,
    *,
    api_client: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> list[tuple[Object, str]]:
    """Ask the API server what it would say to objects; nothing is made.

    Args:
        documents: The objects of a manifest.
        profile: The site; an object that names another namespace is asked about there.
        api_client: A `kubernetes.client.ApiClient`; by kubeconfig or in the cluster without.
        environ: Where KUBECONFIG is looked for.

    Returns:
        Each object, and what the server has against it; empty where it would take it.

    Raises:
        SchedulerMissing: no cluster, or none that answers.
    """
    cluster = Cluster(Connection(profile, api_client=api_client, environ=environ))

    def words(document: Object) -> str:
        try:
            cluster.apply(place_of(document), document, dry_run=True)
        except SchedulerMissing:
            raise
        except NotServed as error:
            return f"the cluster knows no {document['kind']} ({error})"
        except LauncherError as error:
            return str(error).removeprefix("Kubernetes refused: ")
        return ""

    return [(document, words(document)) for document in documents]


def watch_states(
    profile: KubernetesProfile,
    workload: Workload,
    *,
    api_client: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[watching.Change]:
    """Yield the state of each run of a namespace and kind, and every change of it, for ever.

    One list and one connection, however many runs; closing the iterator ends it.

    Raises:
        LauncherError: the server refuses.
    """
    cluster = Cluster(Connection(profile, api_client=api_client, environ=environ))
    return watching.watch_states(cluster, KINDS[workload], RUN_LABEL)
