"""Submits runs to a Kubernetes cluster, and opens earlier runs.

The launcher journals a submission first (toolkit/runs/records/submission_journal.py). If the client
is killed or gets no answer, this record opens the run later: its existing objects are listed, and
half-created runs are completed.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import InputError, LauncherError, RunNotFound, SchedulerMissing
from toolkit.job.kubernetes_options import Workload
from toolkit.kubernetes import workloads
from toolkit.kubernetes.client.connection import Conflict, Connection, Denied, NotServed
from toolkit.kubernetes.client.resources import Cluster, selector_of
from toolkit.kubernetes.local_state import LocalState
from toolkit.kubernetes.pods import label_of, seconds_of
from toolkit.kubernetes.run import SETTLED_S, KubernetesPoint, KubernetesRun, KubernetesSweep
from toolkit.kubernetes.status import Change, changes_of
from toolkit.kubernetes.submission import TOGETHER, complete, remove, submit_all, withdraw
from toolkit.kubernetes.workloads import KINDS, Object, RunObjects, WorkloadKind
from toolkit.planning.kubernetes import KubernetesPlan
from toolkit.planning.pods import RUN_LABEL, SWEEP_LABEL, payload_dir_of
from toolkit.profile import KubernetesProfile
from toolkit.rendering import render
from toolkit.runs.long_operation import operation
from toolkit.runs.records import provenance, registry, submission_journal
from toolkit.runs.run import Launcher, Run, new_run_name
from toolkit.text import untrusted

_FILE_BYTES = 1 << 34
"""Maximum size of a submitted file; the pickled arguments of a call may be large."""

_FORGOTTEN_S = 86_400.0
"""How long to list a run that was never created, in seconds."""


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
        """Prepare to submit; nothing is imported or requested yet.

        Args:
            profile: The site.
            api_client: A `kubernetes.client.ApiClient`; default: by kubeconfig, or in-cluster.
            sleep: Waits between retries.
            environ: The environment that locates KUBECONFIG and the user's list of runs.
        """
        self._profile = profile
        self._environ = environ
        self._intents = registry.intents_folder(environ)
        self._cluster = Cluster(
            Connection(profile, api_client=api_client, sleep=sleep, environ=environ)
        )

    def submit(
        self, plan: KubernetesPlan, *, files: Mapping[str, bytes] | None = None
    ) -> KubernetesRun:
        """Create the objects of `render(plan.named(NAME))` and return the run.

        If an earlier submission of the same plan was interrupted after its objects were created,
        that run is returned instead.

        Args:
            plan: What to start.
            files: Files for the pods, by path in the run directory. A ConfigMap mounts them at
                `plan.payload_dir`; files too large for it go to the run directory itself.

        Raises:
            LauncherError: the cluster refused; no object remains.
            SchedulerMissing: no cluster, or none that answers.
        """
        registry.check(environ=self._environ)
        self._cluster.connection.connect()
        name = new_run_name(plan.job.name)
        kind = KINDS[plan.workload]
        facts: dict[str, Any] = {
            "context": self._cluster.connection.context,
            "workload": plan.workload,  # the job may choose its own
            "master": self._profile.master and plan.workload == "PyTorchJob",
        }
        profile = self._profile.model_copy(update=facts)
        payload = files or {}
        if not payload and (run := self._cut_short(plan, profile)) is not None:
            return run
        manifest = workloads.manifest_for(plan.named(name), payload)
        runs = workloads.objects_by_run(manifest, kind, payload)
        local = LocalState(name, self._environ)
        local.write(plan.job, manifest, payload)
        record = registry.RunRecord(
            uri=f"k8s://{profile.namespace}/{name}",
            name=name,
            job=plan.job.name,
            profile=plan.recorded(profile),
            created=time.time(),
            provenance=provenance.collect(),
            run_dir=local.folder if files else None,
        )
        data = {"record": record.as_json(), "files": list(payload)}
        with submission_journal.begin(self._intents, name, data) as intent:
            try:
                submit_all(self._cluster, runs, goes_on=intent.goes_on)
            except submission_journal.UnknownOutcome as error:
                raise submission_journal.UnknownOutcome(
                    f"{error}; `toolkit status {name}` tells whether it has arrived, and "
                    f"`toolkit resubmit {name}` submits it if not"
                ) from error
            except LauncherError:
                local.delete()
                intent.done()
                raise
            registry.add(record, environ=self._environ)
            intent.done()
        return _opened(record, self._cluster, kind, self._environ)

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Continue an ended run, or the failed points of a sweep, from the newest checkpoints.

        The object is deleted and recreated under its name, so that it finds its run directory.

        Raises:
            LauncherError: the run has succeeded or not ended, or the cluster refused.
        """
        assert isinstance(run, KubernetesRun)
        if chain > 1:
            raise LauncherError("--chain is Slurm's; on Kubernetes retries.requeue starts again")
        if run.begun is not None:
            return self._finish(run)
        if self._profile.runs_claim is None:
            raise LauncherError(
                f"{run.uri}: profile {self._profile.name!r} names no runs_claim, so its "
                "checkpoints are gone with its pods; submit the job anew"
            )
        parts = run.unfinished()
        if payload_dir_of(run.local.job()):
            raise LauncherError(f"{run.uri}: its code is gone with its pods; call it again")
        manifest = run.local.manifest()
        names, token = {part.object_name for part in parts}, secrets.token_hex(4)
        runs = [
            workloads.started_again(objects, token)
            for objects in workloads.objects_by_run(manifest, run.kind)
            if objects.name in names
        ]
        what, count = f"deleting the objects of {len(runs)} ended runs", len(runs)
        with operation(what, long=count > TOGETHER) as report:
            for done, objects in enumerate(runs):
                report(done, count, f"{done} of {count}")
                remove(self._cluster, objects)
        for part in parts:
            part.withdraw_end()
        submit_all(self._cluster, runs)
        return run

    def _finish(self, run: KubernetesRun) -> Run:
        """Finish an interrupted submission: create the missing objects."""
        record = (run.sweep if isinstance(run, KubernetesPoint) else run).record
        with submission_journal.claim(self._intents, record.name) as intent:
            _, missing = _interrupted(run, intent)
            submit_all(self._cluster, missing, goes_on=intent.goes_on)
            self._add(record)
            intent.done()
        whole = _opened(record, self._cluster, run.kind, self._environ)
        for part in whole.parts:
            part.withdraw_end()
        return whole.point(str(run.index)) if isinstance(run, KubernetesPoint) else whole

    def open(self, record: registry.RunRecord) -> KubernetesRun:
        """Return the handle of an earlier run, or sweep."""
        kind = KINDS[self._profile.workload]
        intent = submission_journal.take(self._intents, record.name)
        if intent is None:
            return _opened(record, self._cluster, kind, self._environ)
        with intent:
            return self._recovered(record, kind, intent)

    def _recovered(
        self, record: registry.RunRecord, kind: WorkloadKind, intent: submission_journal.Intent
    ) -> KubernetesRun:
        """Return a run with an interrupted submission, and its existing objects."""
        run = _opened(record, self._cluster, kind, self._environ, begun=intent.begun)
        age_s = time.time() - intent.begun
        try:
            runs, missing = _interrupted(run, intent)
            _tidy(run, runs, missing, settled=age_s > SETTLED_S)
        except (LauncherError, InputError):
            return run  # its status gives the reason
        if len(missing) < len(runs):
            self._add(record)
            if not missing:
                intent.done()
                return _opened(record, self._cluster, kind, self._environ)
        elif age_s > _FORGOTTEN_S:
            intent.done()
            if not self._is_known(record):
                run.local.delete()
        return run

    def _cut_short(self, plan: KubernetesPlan, profile: KubernetesProfile) -> KubernetesRun | None:
        """Return a run of this plan from an interrupted submission of this user.

        None if no such run exists, the cluster has none of its objects, or the run has ended.
        """
        kind, stored = KINDS[plan.workload], plan.recorded(profile)
        for data in list(submission_journal.orphans(self._intents)):
            record = registry.parse(data.get("record"))
            if record is None or record.profile != stored or data.get("files"):
                continue
            try:
                manifest = LocalState(record.name, self._environ).manifest()
            except (LauncherError, InputError):
                continue
            if manifest != render(plan.named(record.name)):
                continue
            if (intent := submission_journal.take(self._intents, record.name)) is None:
                continue
            with intent:
                run = self._recovered(record, kind, intent)
                arrived = self._is_known(record)
            if arrived and not run.status().state.final:
                if run.begun is not None:  # a sweep without some of its points
                    self._finish(run)
                return _opened(record, self._cluster, kind, self._environ)
        return None

    def _add(self, record: registry.RunRecord) -> None:
        """Record a run, unless it is already recorded."""
        if not self._is_known(record):
            registry.add(record, environ=self._environ)

    def _is_known(self, record: registry.RunRecord) -> bool:
        # This process holds the run's journal entry, so the registry does not list it for that.
        return any(other.name == record.name for other in registry.records(environ=self._environ))


# ---- Interrupted submissions


def _opened(
    record: registry.RunRecord,
    cluster: Cluster,
    kind: WorkloadKind,
    environ: Mapping[str, str],
    *,
    begun: float | None = None,
) -> KubernetesRun:
    """Return the handle of a run, or of a sweep, with `begun` as in `KubernetesRun`."""
    is_sweep = bool(LocalState(record.name, environ).points())
    run_class = KubernetesSweep if is_sweep else KubernetesRun
    return run_class(record, cluster, kind, environ, begun=begun)


def _interrupted(
    run: KubernetesRun, intent: submission_journal.Intent
) -> tuple[list[RunObjects], list[RunObjects]]:
    """Return the objects of an interrupted submission by run, and the runs without a workload.

    Raises:
        LauncherError: its local files are gone, or the API server does not answer.
    """
    cluster, kind, folder = run.cluster, run.kind, run.local.folder
    try:
        files = {
            str(path): untrusted.read_bytes(folder / str(path), limit=_FILE_BYTES, below=folder)
            for path in intent.data["files"]
        }
    except (KeyError, OSError, TypeError) as error:
        raise LauncherError(
            f"what was to be submitted as {run.local.name} is gone: {error}"
        ) from error
    runs = workloads.objects_by_run(run.local.manifest(), kind, files)
    if len(runs) > 1:
        try:
            items, _ = cluster.objects(kind, selector_of(SWEEP_LABEL, [run.local.name]))
        except Denied:  # permission to submit does not imply permission to list
            pass
        else:
            names = {item["metadata"]["name"] for item in items}
            return runs, [objects for objects in runs if objects.name not in names]
    pairs = [(one, cluster.get(kind, one.name)) for one in runs]
    return runs, [one for one, obj in pairs if not workloads.is_of(one.workload, obj)]


def _tidy(
    run: KubernetesRun, runs: Sequence[RunObjects], missing: Sequence[RunObjects], *, settled: bool
) -> None:
    """Complete each half-created run, and delete companions of runs that were never created.

    Runs are created in batches, in order: only the last batch can be half-created.
    """
    absent = {objects.name for objects in missing}
    last = max((n for n, objects in enumerate(runs) if objects.name not in absent), default=0)
    start = last - last % TOGETHER
    for objects in runs[start : start + 2 * TOGETHER]:
        if objects.name not in absent:
            obj = run.cluster.get(run.kind, objects.name)
            if obj is not None and (objects.companions or objects.payloads):
                complete(run.cluster, objects, obj)
        elif settled:
            withdraw(run.cluster, objects)


# ---- Runs of other clients, dry runs, and watching a namespace


def run_in_cluster(
    uri: str, *, api_client: Any = None, environ: Mapping[str, str] = os.environ
) -> KubernetesRun:
    """Return the handle of a run in the current context's cluster, submitted by any client.

    The URI is `k8s://NAMESPACE/NAME`.

    Raises:
        RunNotFound: the cluster has no such object, or the toolkit did not render it.
        LauncherError: the cluster cannot be queried.
    """
    match = registry.OBJECT_URI.fullmatch(uri)
    assert match is not None, uri
    namespace, name = match["namespace"], match["name"]
    profile = KubernetesProfile(name="current", namespace=namespace)
    cluster = Cluster(Connection(profile, api_client=api_client, environ=environ))
    denied: list[LauncherError] = []
    for workload, kind in KINDS.items():
        try:
            obj = cluster.get(kind, name)
        except NotServed:
            continue
        except Denied as error:
            denied.append(error)
            continue
        if obj is None:
            continue
        if label_of(obj, RUN_LABEL) != name:
            raise RunNotFound(
                f"{uri}: this {workload} has no label {RUN_LABEL}; only what this toolkit has "
                "rendered can be asked about"
            )
        profile_facts = {"workload": workload, "context": cluster.connection.context}
        record = registry.RunRecord(
            uri=uri,
            name=name,
            job=label_of(obj, "app.kubernetes.io/name") or name,
            profile=profile.model_copy(update=profile_facts).model_dump(mode="json"),
            created=seconds_of(obj["metadata"].get("creationTimestamp")),
        )
        return KubernetesRun(record, cluster, kind, environ)
    if denied:
        raise denied[0]
    raise RunNotFound(
        f"no run {uri!r}: nothing of this name was submitted from here, and namespace "
        f"{namespace!r} has no {', '.join(KINDS)} called {name!r}"
    )


def dry_run(
    documents: Sequence[Object], profile: KubernetesProfile, *, api_client: Any = None
) -> list[tuple[Object, str]]:
    """Validate the objects of a manifest by a server-side dry run; nothing is created.

    An object with a namespace other than the profile's is validated there. Returns each object with
    the server's error message; empty if the server accepts the object.

    Raises:
        SchedulerMissing: no cluster, or none that answers.
    """
    cluster = Cluster(Connection(profile, api_client=api_client))
    answers = []
    for document in documents:
        refusal = ""
        try:
            if workloads.holds_supervisor(document):  # requires permission to create it
                with contextlib.suppress(Conflict):
                    cluster.create(workloads.resource_of(document), document, dry_run=True)
            else:
                cluster.apply(workloads.resource_of(document), document, dry_run=True)
        except SchedulerMissing:
            raise
        except NotServed as error:
            refusal = f"the cluster knows no {document['kind']} ({error})"
        except LauncherError as error:
            refusal = error.answer or str(error)
        answers.append((document, refusal))
    return answers


def watch_states(
    profile: KubernetesProfile,
    workload: Workload,
    *,
    api_client: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Change]:
    """Yield the state of each run of a namespace and kind, then every change, without end.

    It needs one list request and one connection for any number of runs; close the iterator to end
    it.

    Raises:
        LauncherError: the server refuses.
    """
    cluster = Cluster(Connection(profile, api_client=api_client, environ=environ))
    return changes_of(cluster, KINDS[workload], RUN_LABEL)
