"""A run or a sweep on Kubernetes: its status, its logs, and cancelling it."""

import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from toolkit.errors import InputError, LauncherError, RunLost
from toolkit.kubernetes.client.connection import Away
from toolkit.kubernetes.client.resources import Cluster, pod_selector_of, selector_of
from toolkit.kubernetes.client.watcher import ObjectWatch
from toolkit.kubernetes.failure import failure_of
from toolkit.kubernetes.glimpse import glimpse_of
from toolkit.kubernetes.local_state import LocalState, Settings
from toolkit.kubernetes.logs import Round, read_lines
from toolkit.kubernetes.pods import attempt_of, label_of, scheduled_of, short_name
from toolkit.kubernetes.restarts import restarts_of
from toolkit.kubernetes.stacks import PodsExchange
from toolkit.kubernetes.status import (
    FOR_LIST,
    FOR_ONE,
    FOR_WAIT,
    STARTS_AGAIN,
    Evidence,
    digest,
    evidence_of,
    is_suspended,
    state_of,
    status_of,
)
from toolkit.kubernetes.volume import fetch
from toolkit.kubernetes.workloads import Object, WorkloadKind, pod_names_of, pods_of
from toolkit.planning.pods import RUN_LABEL, SWEEP_LABEL
from toolkit.runs.evidence.failure import Failure
from toolkit.runs.evidence.restarts import Restart
from toolkit.runs.evidence.stacks import Exchange
from toolkit.runs.records import registry
from toolkit.runs.records.log_reader import LogView
from toolkit.runs.records.run_secrets import mask_of, redacted
from toolkit.runs.records.scheduler_times import Scheduled
from toolkit.runs.run import Run, unfinished_of
from toolkit.runs.state import RunState, RunStatus

SETTLED_S = 120.0
"""After this time no request of an interrupted submission is still in flight: an API server drops a
request after 60 s."""

_CANCEL_ATTEMPTS = 5

_READ_ATTEMPTS = 4

_SHORTEST_PAUSE_S = 0.2

_FAILED_PODS_S = 3.0
"""Poll interval for permanently failed pods while a caller waits, in seconds."""


class KubernetesRun(Run):
    """A run, represented by the object that creates its pods."""

    def __init__(
        self,
        record: registry.RunRecord,
        cluster: Cluster,
        kind: WorkloadKind,
        environ: Mapping[str, str],
        *,
        object_name: str = "",
        begun: float | None = None,
    ) -> None:
        super().__init__(record)
        self.cluster = cluster
        self.kind = kind
        self.environ = environ
        self.object_name = object_name or record.address[2]
        self.local = LocalState(record.name.partition("/")[0], environ)
        """The local files of the run; those of the sweep for a point."""
        self.begun = begun
        """Time of the last progress of an interrupted submission; None for a complete one."""
        self._started = ""
        """The uid of its object, if it was seen running."""
        self._watch: ObjectWatch | None = None
        self._causes = FOR_WAIT
        self._next_look_at_pods = 0.0

    @property
    def selector(self) -> str:
        """The label selector of its object."""
        return selector_of(RUN_LABEL, [self.object_name])

    @property
    def pod_selector(self) -> str:
        """The label selector of its pods."""
        return pod_selector_of(self.kind, self.selector)

    @property
    def batch_key(self) -> tuple[Hashable, ...]:
        """The namespace of a cluster, and the kind: one list request covers all of its runs."""
        return (*self.cluster.connection.identity, self.kind.kind)

    def status(self) -> RunStatus:
        """Query the cluster; UNKNOWN if the API server is away or the object is gone.

        A recorded final status is still returned, from the local state.

        Raises:
            LauncherError: the server refuses, and a retry would not help.
        """
        return self.sum_of(self._part_statuses())

    def _part_statuses(self) -> list[RunStatus]:
        """Return the status of each part, by one request."""
        try:
            return self._look(self.parts, self.selector if self.points else "")
        except Away as error:
            return [part._unanswered(error) for part in self.parts]

    def statuses_of(self, runs: Sequence[Run]) -> list[RunStatus]:
        """Return the statuses of runs of this namespace and kind, by one list request."""
        batch = [run for run in runs if isinstance(run, KubernetesRun)]
        parts = [part for run in batch for part in run.parts]
        try:
            statuses = self._look(parts, selector_of(RUN_LABEL, [p.object_name for p in parts]))
        except LauncherError as error:
            statuses = [part._unanswered(error) for part in parts]
        remaining = iter(statuses)
        by_run = [(run, [next(remaining) for _ in run.parts]) for run in batch]
        return [run.sum_of(own) for run, own in by_run]

    def _look(self, parts: "Sequence[KubernetesRun]", selector: str = "") -> list[RunStatus]:
        """Return the statuses of parts by the watch, a list or, without a selector, one get."""
        objects: Mapping[str, Object] = {}
        if (watch := self._watch) is not None and watch.goes_on:
            objects, causes = watch.look(), self._causes
        elif selector:
            items, _ = self.cluster.objects(self.kind, selector)
            objects, causes = {item["metadata"]["name"]: item for item in items}, FOR_LIST
        else:
            causes = FOR_ONE
            if (obj := self.cluster.get(self.kind, self.object_name)) is not None:
                objects = {self.object_name: obj}
        names = [part.object_name for part in parts]
        present = {name: objects[name] for name in names if name in objects}
        evidence = evidence_of(
            self.cluster,
            self.kind,
            present,
            causes=causes,
            with_failed_pods=self._looks_for_failed_pods(),
        )
        statuses = [
            part._seen(status_of(self.kind, present[name], evidence.get(name)), present[name])
            if name in present
            else part._gone()
            for name, part in zip(names, parts, strict=True)
        ]
        if self._watch is None:
            self._keep_restarts(part for part in parts if part.object_name in present)
        return statuses

    def _keep_restarts(self, parts: "Iterable[KubernetesRun]") -> None:
        """Record the restarts of successful parts, since their pods will be deleted."""
        new = {part.object_name: part for part in parts if part._has_new_success()}
        if not new:
            return
        selector = pod_selector_of(self.kind, selector_of(RUN_LABEL, list(new)))
        with contextlib.suppress(LauncherError):  # the next caller retries
            pods: defaultdict[str, list[Object]] = defaultdict(list)
            for pod in self.cluster.pods(selector):
                pods[label_of(pod, RUN_LABEL)].append(pod)
            for name, part in new.items():
                part.local.write_restarts(name, restarts_of(pods[name]))

    def _has_new_success(self) -> bool:
        """Whether the run has succeeded, and its restarts are not recorded yet."""
        end = self.local.end(self.object_name)
        succeeded = end is not None and end.state is RunState.SUCCEEDED
        return succeeded and self.local.restarts(self.object_name) is None

    def _looks_for_failed_pods(self) -> bool:
        """Whether to look for failed pods now; a waiting caller asks far more often."""
        if self._watch is None:
            return True
        if due := time.monotonic() >= self._next_look_at_pods:
            self._next_look_at_pods = time.monotonic() + _FAILED_PODS_S
        return due

    def _gone(self) -> RunStatus:
        """Return the status of a run without an object in the cluster."""
        if registry.is_cancelled(self.uri, environ=self.environ):
            return RunStatus(state=RunState.CANCELLED, reason="by `toolkit cancel`")
        kind = self.kind.kind
        if self.begun is None:
            reason = f"the {kind} is gone, and was not cancelled from here: it was deleted"
            lost = RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)
            return self.local.end(self.object_name) or lost
        if time.time() < self.begun + SETTLED_S:
            reason = f"its submission was cut short, and the cluster has no {kind} of it yet"
            return RunStatus(state=RunState.UNKNOWN, reason=reason)
        reason = (
            f"its submission was cut short before the cluster had the {kind}; "
            f"`toolkit resubmit {self.local.name}` submits it"
        )
        return RunStatus(state=RunState.FAILED, reason=reason)

    def _unanswered(self, error: LauncherError) -> RunStatus:
        unknown = RunStatus(state=RunState.UNKNOWN, reason=str(error))
        return self.local.end(self.object_name) or unknown

    def _seen(self, status: RunStatus, obj: Object) -> RunStatus:
        """Record a final status, since the object is deleted `ttl` after its end.

        Also record that the run has started. Between two starts, neither a pod nor a condition
        distinguishes the run from one that has never started.
        """
        if status.state.final:
            self.local.write_end(self.object_name, status)
            return status
        if status.state is RunState.UNKNOWN:
            return status
        self.local.delete_end(self.object_name)
        uid = str(obj["metadata"].get("uid") or "")
        if status.state is RunState.RUNNING and self._started != uid:
            self._started = uid
            self.local.write_start(self.object_name, uid)
        elif status.state is RunState.PENDING and not is_suspended(obj):
            self._started = self._started or self.local.start(self.object_name)
            if uid and self._started == uid:
                reason = status.reason or STARTS_AGAIN
                return replace(status, state=RunState.RUNNING, reason=reason)
        return status

    @contextlib.contextmanager
    def watching(self, runs: Sequence[Run], *, explained: bool = False) -> Iterator[None]:
        """Keep a watch on runs of this namespace and kind: one connection for all of them."""
        watched = [run for run in runs if isinstance(run, KubernetesRun)]
        names = [part.object_name for run in watched for part in run.parts]
        alone = len(watched) == 1
        selector = watched[0].selector if alone else selector_of(RUN_LABEL, names)
        watch = ObjectWatch(self.cluster, self.kind, selector, partial(digest, self.kind))
        try:
            with contextlib.suppress(LauncherError):  # then each query is a list request
                watch.start()
                for run in watched:
                    run._watch = watch
                    run._causes = FOR_ONE if explained else FOR_WAIT
            yield
        finally:
            for run in watched:
                run._watch = None
            watch.close()
            self._keep_restarts(part for run in watched for part in run.parts)

    def _pause(self, pause_s: float) -> None:
        if (watch := self._watch) is None:
            return super()._pause(pause_s)
        first_s = min(pause_s, _SHORTEST_PAUSE_S)  # batches frequent changes
        super()._pause(first_s)
        watch.wait(pause_s - first_s)

    def failure(self, *, attempt: int | None = None) -> Failure | None:
        """Return the first failure in an attempt, as JobSet counts them, from the pods' output.

        None if no rank failed, or if the cause is unknown because the object is gone.

        Raises:
            LauncherError: the server refused, or has not answered several requests in a row.
        """
        if self.points:
            return None  # each point has its own

        def question() -> Failure | None:
            obj = self.cluster.get(self.kind, self.object_name)
            if obj is None or state_of(self.kind, obj)[0] is RunState.SUCCEEDED:
                return None
            return failure_of(self.cluster, self.kind, obj, self.pod_selector, attempt)

        failure = self.cluster.connection.patiently(question, attempts=_READ_ATTEMPTS)
        return failure and failure.redacted(mask_of(self.run_dir, self.environ))

    def restarts(self) -> Sequence[Restart]:
        """Return the restarts of the run, as far as its pods show them.

        torchrun's restarts within the pods are only in the run directory.
        """
        if self.points:
            return ()
        if (found := self.local.restarts(self.object_name)) is None:
            try:
                found = restarts_of(self.cluster.pods(self.pod_selector))
            except LauncherError:
                return ()
        mask = mask_of(self.run_dir, self.environ)
        return [replace(one, why=mask.hide(one.why)) for one in found]

    def count_restarts(self) -> int:
        """Return the recorded number of restarts of a successful run, without a request."""
        return len(self.local.restarts(self.object_name) or ())

    @contextlib.contextmanager
    def recorded(self, *names: str) -> Iterator[Path]:
        """Yield a folder with files from the claim, fetched through a running or a helper pod."""
        with tempfile.TemporaryDirectory() as folder:
            fetch(self, lambda: [(name, Path(folder, name)) for name in names])
            yield Path(folder)

    def live_dir(self) -> Path | None:
        """Return a folder with the ends of the record files, printed by a pod of the run."""
        if self.points:
            return None
        glimpse = glimpse_of((*self.batch_key, self.object_name))
        return glimpse.folder(self.cluster, self.pod_selector, self.kind.container)

    def scheduled(self) -> list[Scheduled]:
        """Return the scheduling times of the starts with existing pods."""
        try:
            return scheduled_of(self.cluster.pods(self.pod_selector))
        except LauncherError:
            return []  # goodput has less detail without them

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield the lines of all pods, prefixed with the pod's name if there are several."""
        if view.attempt and not self.kind.jobs:
            raise LauncherError(
                f"{self.uri}: nothing counts the attempts of a {self.kind.kind}; all are 0"
            )
        return self._read(view, on_status)

    def lost_output(self) -> str:
        """Return the deleted pods of an ended run, and the location of their output.

        When one pod has ended the run, the operator of a PyTorchJob deletes the running pods.
        """
        obj = None if self.points else self.cluster.get(self.kind, self.object_name)
        if obj is None or state_of(self.kind, obj)[0] is not RunState.FAILED:
            return ""
        there = {short_name(pod) for pod in self.cluster.pods(self.pod_selector)}
        gone = [name for name in pod_names_of(self.kind, obj) if name not in there]
        if not gone:
            return ""
        where = "; what the ranks printed is in the run directory, logs/attempt-N/POD"
        return (
            f"the output of {', '.join(gone[:5])}{' …' if gone[5:] else ''} is gone with its pod"
            + (where if self.record.profile.get("runs_claim") else "")
        )

    def _read(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        obj = self.cluster.get(self.kind, self.object_name)
        if obj is None:
            raise RunLost(f"the {self.kind.kind} of {self.uri} is gone, and its log with its pods")
        several = pods_of(self.kind, obj) > 1

        def look() -> Round:
            if view.follow:
                return self._round(on_status)
            pods = self.cluster.pods(self.pod_selector)
            attempts = sorted({n for pod in pods if (n := attempt_of(pod)) is not None})
            if view.attempt is not None and attempts and view.attempt not in attempts:
                message = (
                    f"the pods are of attempt {attempts[-1]}; those of earlier ones are gone, and "
                    "their output is in the run directory, in logs/attempt-N"
                )
                raise InputError(message, place=f"--attempt {view.attempt}")
            return Round(pods=pods)

        def prefix(pod: Object) -> str:
            return f"[{short_name(pod)}] " if several else ""

        yield from read_lines(self.cluster, self.kind, view, look, prefix)

    def _round(self, on_status: Callable[[RunStatus], object]) -> Round:
        """Return the pods, and whether the run has ended, for a follower of its log."""
        obj = self.cluster.get(self.kind, self.object_name)
        if obj is None:
            on_status(self._gone())
            return Round(pods=self.cluster.pods(self.pod_selector))
        by_name = evidence_of(self.cluster, self.kind, {self.object_name: obj})
        evidence = by_name.get(self.object_name, Evidence())
        status = self._seen(status_of(self.kind, obj, evidence), obj)
        on_status(status)
        pods = evidence.pods
        if not pods and status.state is not RunState.PENDING:
            pods = self.cluster.pods(self.pod_selector)
        return Round(pods=pods, ended=status.state.final)

    def _exchange(self) -> Exchange:
        return PodsExchange(self.cluster, self.pod_selector, self.kind.container)

    def _redacted(self, lines: Iterator[str]) -> Iterator[str]:
        return redacted(lines, self.run_dir, self.environ)

    def cancel(self) -> None:
        """Delete the object; its pods get SIGTERM and their grace period.

        Raises:
            LauncherError: the server refuses, or an interrupted submission may still arrive.
        """
        for _ in range(_CANCEL_ATTEMPTS):
            obj = self.cluster.get(self.kind, self.object_name)
            if obj is None and not (gone := self._gone()).state.final and not gone.lost:
                raise LauncherError(f"{self.uri} cannot be cancelled now: {gone.reason}; try again")
            if obj is None or state_of(self.kind, obj)[0].final:
                return
            # Before the deletion: afterwards the cluster has no trace of the run.
            registry.mark_cancelled(self.uri, environ=self.environ)
            if self.cluster.delete(self.kind, obj):
                return
        raise LauncherError(f"{self.uri} changes faster than it can be cancelled; try again")

    def withdraw_end(self) -> None:
        """Clear the recorded end and cancellation of a run that continues."""
        self.local.delete_end(self.object_name)
        registry.withdraw_cancelled(self.uri, environ=self.environ)

    def unfinished(self) -> "list[KubernetesRun]":
        """Return the parts that ended without success: this run, or points of a sweep.

        Raises:
            LauncherError: the run has succeeded, or not ended.
        """
        status = self.status()
        if status.state is RunState.SUCCEEDED:
            raise LauncherError(f"{self.uri} has succeeded; there is nothing to do")
        if not (status.state.final or status.lost):
            raise LauncherError(
                f"{self.uri} has not ended: {status.state.upper()}"
                + (f" ({status.reason})" if status.reason else "")
                + "; `toolkit wait` for it, or cancel it"
            )
        return [self]


# ---- Sweeps


class KubernetesSweep(KubernetesRun):
    """All points of a sweep: one object per point, with the label of the sweep."""

    @cached_property
    def points(self) -> "tuple[KubernetesPoint, ...]":
        """The points of the sweep; each is a run."""
        return tuple(
            KubernetesPoint(self, index, name, settings)
            for index, (name, settings) in enumerate(self.local.points())
        )

    def statuses(self) -> list[RunStatus]:
        """Return the statuses of all points, by one list request."""
        return self._part_statuses()

    @property
    def selector(self) -> str:
        """The selector of the points' objects."""
        return selector_of(SWEEP_LABEL, [self.object_name])

    def cancel(self) -> None:
        """Delete the objects of all points that have not ended.

        Raises:
            LauncherError: some points could not be cancelled; all others were.
        """
        errors: list[LauncherError] = []
        for point in self.points:
            try:
                point.cancel()
            except LauncherError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def unfinished(self) -> list[KubernetesRun]:
        """Return the points that have ended without success.

        Raises:
            LauncherError: all have succeeded, or one has not ended.
        """
        return [self.points[index] for index in unfinished_of(self, self.statuses())]

    def _read(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        points = {point.object_name: point for point in self.points}

        def look() -> Round:
            ended = True
            if view.follow:
                status = self.status()
                on_status(status)
                ended = status.state.final or status.lost
            pods = [
                pod
                for pod in self.cluster.pods(self.pod_selector)
                if label_of(pod, RUN_LABEL) in points
            ]
            return Round(
                pods=sorted(pods, key=lambda pod: points[label_of(pod, RUN_LABEL)].index),
                ended=ended,
            )

        def prefix(pod: Object) -> str:
            return f"[{points[label_of(pod, RUN_LABEL)].point_name}] "

        return read_lines(self.cluster, self.kind, view, look, prefix)


class KubernetesPoint(KubernetesRun):
    """A point of a sweep, with a separate object."""

    def __init__(self, sweep: KubernetesSweep, index: int, name: str, settings: Settings) -> None:
        whole = sweep.record
        super().__init__(
            replace(whole, uri=f"{whole.uri}_{index}", name=f"{whole.name}/{name}"),
            sweep.cluster,
            sweep.kind,
            sweep.environ,
            object_name=f"{sweep.object_name}-{index}",
            begun=sweep.begun,
        )
        self.sweep = sweep
        self.index = index
        self.point_name = name
        self.settings = settings
