"""A run on Kubernetes, from its state to its logs and its end."""

import contextlib
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, LauncherError, Problem, RunLost
from toolkit.kubernetes import local_state
from toolkit.kubernetes.batch_status import FOR_LIST, FOR_ONE, FOR_WAIT, evidence_of, statuses
from toolkit.kubernetes.client.connection import Away
from toolkit.kubernetes.client.resources import Cluster, selector_of
from toolkit.kubernetes.delivered_files import is_delivery, key_of, part_of
from toolkit.kubernetes.final_logs import failure_of
from toolkit.kubernetes.logs import Round, read_lines
from toolkit.kubernetes.pods import attempt_of, short_name
from toolkit.kubernetes.reopen import cut_short
from toolkit.kubernetes.status import judge, state_of
from toolkit.kubernetes.watcher import Watch
from toolkit.kubernetes.workloads import Kind, Object, pods_of
from toolkit.planning.pods import RUN_LABEL
from toolkit.runs import registry
from toolkit.runs.failure import Failure
from toolkit.runs.log_reader import LogView
from toolkit.runs.run import Run
from toolkit.runs.run_directory import read_metrics
from toolkit.runs.run_secrets import mask_of, redacted
from toolkit.runs.state import RunState, RunStatus

__all__ = ["KubernetesRun"]

_CANCEL_ATTEMPTS = 5

_SHORTEST_PAUSE_S = 0.2


class KubernetesRun(Run):
    """An object of a cluster that makes the pods of a run."""

    def __init__(
        self,
        record: registry.RunRecord,
        cluster: Cluster,
        kind: Kind,
        environ: Mapping[str, str],
        *,
        object_name: str = "",
        begun: float | None = None,
    ) -> None:
        super().__init__(record)
        self.cluster = cluster
        self.kind = kind
        self.object_name = object_name or record.address[2]
        self._environ = environ
        self.begun = begun
        """When its submission went on last, if it was cut short; else None."""
        self._watch: Watch | None = None
        self._causes = FOR_WAIT

    @property
    def parts(self) -> "Sequence[KubernetesRun]":
        """The runs that have an object of their own: this one."""
        return (self,)

    @property
    def own_pods(self) -> str:
        """The selector of its pods."""
        return selector_of(RUN_LABEL, [self.object_name])

    @property
    def place(self) -> Hashable:
        """The namespace of a cluster, and the kind: one list answers for all of it."""
        return (*self.cluster.identity, self.kind.kind)

    def status(self) -> RunStatus:
        """Query the cluster; UNKNOWN where the API server is away or the object is gone.

        A final status that was seen earlier is still returned, from the local state.

        Raises:
            LauncherError: the server refuses to say, which asking again does not mend.
        """
        try:
            if (watch := self._watch) is not None and watch.goes_on:
                return self._told(watch.look(), [self], self._causes)[0]
            obj = self.cluster.get(self.kind, self.object_name)
            return self._gone() if obj is None else self._judged(obj)[0]
        except Away as error:
            return self._unanswered(error)

    def statuses_of(self, runs: Sequence[Run]) -> list[RunStatus]:
        """Return the statuses of runs of this namespace and kind, by one list request."""
        asked = [run for run in runs if isinstance(run, KubernetesRun)]
        parts = [part for run in asked for part in run.parts]
        names = [part.object_name for part in parts]
        try:
            by_name = self._look(selector_of(RUN_LABEL, names), parts)
        except LauncherError as error:
            by_name = [part._unanswered(error) for part in parts]
        remaining = iter(by_name)
        by_run = [[next(remaining) for _ in run.parts] for run in asked]
        return [
            run.sum_of(own) if run.points else own[0]
            for run, own in zip(asked, by_run, strict=True)
        ]

    def _look(self, selector: str, parts: "Sequence[KubernetesRun]") -> list[RunStatus]:
        """Return where parts stand that a selector picks: by the watch, or by one list.

        Raises:
            LauncherError: the server is away, or refuses.
        """
        if (watch := self._watch) is not None and watch.goes_on:
            return self._told(watch.look(), parts, self._causes)
        items, _ = self.cluster.objects(self.kind, selector)
        return self._told({item["metadata"]["name"]: item for item in items}, parts, FOR_LIST)

    def _told(
        self,
        objects: Mapping[str, Object],
        parts: "Sequence[KubernetesRun]",
        causes: frozenset[RunState],
    ) -> list[RunStatus]:
        """Return where parts stand by their objects, and in some states why."""
        names = [part.object_name for part in parts]
        by_name = statuses(self.cluster, self.kind, objects, names, causes=causes)
        return [
            part._gone() if status is None else part._seen(status)
            for part, status in zip(parts, by_name, strict=True)
        ]

    @property
    def own_objects(self) -> str:
        """The selector of the objects of its parts."""
        return selector_of(RUN_LABEL, [self.object_name])

    @contextlib.contextmanager
    def watching(self, runs: Sequence[Run], *, explained: bool = False) -> Iterator[None]:
        """Keep a watch on runs of this namespace and kind: one connection for all of them."""
        watched = [run for run in runs if isinstance(run, KubernetesRun)]
        names = [part.object_name for run in watched for part in run.parts]
        alone = len(watched) == 1
        selector = watched[0].own_objects if alone else selector_of(RUN_LABEL, names)
        watch = Watch(self.cluster, self.kind, selector)
        try:
            with contextlib.suppress(LauncherError):  # then each question is a list of its own
                watch.start()
                for run in watched:
                    run._watch = watch
                    run._causes = FOR_ONE if explained else FOR_WAIT
            yield
        finally:
            for run in watched:
                run._watch = None
            watch.close()

    def _pause(self, pause_s: float) -> None:
        if (watch := self._watch) is None:
            return super()._pause(pause_s)
        first_s = min(pause_s, _SHORTEST_PAUSE_S)  # what changes often is not looked at each time
        super()._pause(first_s)
        watch.wait(pause_s - first_s)

    def failure(self, *, attempt: int | None = None) -> Failure | None:
        """Return what failed first in an attempt, by what its pods have printed.

        None if no rank failed, or the cause is unknown:
        where the object is gone, or no server answers.

        Args:
            attempt: Which one, as JobSet counts them; the newest where it is None.
        """
        if self.points:
            return None  # each has its own
        try:
            obj = self.cluster.get(self.kind, self.object_name)
            if obj is None or state_of(self.kind, obj)[0] is RunState.SUCCEEDED:
                return None
            failed = failure_of(self.cluster, self.kind, obj, self.own_pods, attempt)
        except LauncherError:
            return None
        return failed and failed.redacted(mask_of(self.run_dir, self._environ))

    def _measured(self) -> list[dict[str, Any]]:
        """Return what the run has measured, as it stands on the claim of its pods.

        It is read in a pod of the run, or in one that is made for it.
        """
        from toolkit.kubernetes.volume import fetch

        with tempfile.TemporaryDirectory() as folder:
            fetch(self, {"metrics.jsonl": Path(folder, "metrics.jsonl")})
            return read_metrics(Path(folder))

    def cancel(self) -> None:
        """Delete the object; its pods get SIGTERM and their grace period.

        Raises:
            LauncherError: the server refuses, or a submission that was cut short may still arrive.
        """
        for _ in range(_CANCEL_ATTEMPTS):
            obj = self.cluster.get(self.kind, self.object_name)
            if obj is None and not (gone := self._gone()).state.final and not gone.lost:
                raise LauncherError(f"{self.uri} cannot be cancelled now: {gone.reason}; try again")
            if obj is None or state_of(self.kind, obj)[0].final:
                return
            # Before the deed: afterwards the cluster holds no trace of the run.
            registry.mark_cancelled(self.uri, environ=self._environ)
            if self.cluster.delete(self.kind, obj):
                return
        raise LauncherError(f"{self.uri} changes faster than it can be cancelled; try again")

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield the lines of all pods, with the pod's name in front if there are several.

        Raises:
            RunLost: the run is gone, and its log with it.
            InputError: the pods of the attempt are gone.
            LauncherError: a later attempt is wanted, and nothing counts them.
        """
        if view.attempt and not self.kind.jobs:
            raise LauncherError(
                f"{self.uri}: nothing counts the attempts of a {self.kind.kind}; all are 0"
            )
        key = self.key
        return (line for line in self._read(view, on_status) if part_of(line, key) is None)

    @property
    def key(self) -> str:
        """What the lines are signed with by which its pods hand over files; empty for no call."""
        return key_of(self.record.run_dir)

    def delivered(self) -> Iterator[str]:
        """Yield the lines in which the pods of a call hand over files.

        Raises:
            RunLost: the run is gone, and its log with it.
            LauncherError: the logs cannot be read.
        """
        lines = self._read(LogView(), lambda _: None)
        return (line for line in lines if is_delivery(line))

    def _read(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        obj = self.cluster.get(self.kind, self.object_name)
        if obj is None:
            raise RunLost(f"the {self.kind.kind} of {self.uri} is gone, and its log with its pods")
        several = pods_of(self.kind, obj) > 1

        def look() -> Round:
            if not view.follow:
                pods = self.cluster.pods(self.own_pods)
                self._require_attempt(view, pods)
                return Round(pods=pods)
            return self._round(on_status)

        yield from read_lines(
            self.cluster,
            self.kind,
            view,
            look,
            lambda pod: f"[{short_name(pod)}] " if several else "",
        )

    def _round(self, on_status: Callable[[RunStatus], object]) -> Round:
        """Return the pods, and whether it is over, as a follower wants to know."""
        obj = self.cluster.get(self.kind, self.object_name)
        if obj is None:
            on_status(self._gone())
            return Round(pods=self.cluster.pods(self.own_pods))
        status, pods = self._judged(obj)
        on_status(status)
        if not pods and status.state is not RunState.PENDING:
            pods = self.cluster.pods(self.own_pods)
        return Round(pods=pods, ended=status.state.final)

    def _judged(self, obj: Object) -> tuple[RunStatus, Sequence[Object]]:
        """Return the status of the object, and the pods that explain it."""
        gathered = evidence_of(self.cluster, self.kind, {self.object_name: obj})
        evidence = gathered.get(self.object_name)
        status = self._seen(judge(self.kind, obj, evidence))
        return status, evidence.pods if evidence else ()

    def _require_attempt(self, view: LogView, pods: Sequence[Object]) -> None:
        attempts = sorted({attempt for pod in pods if (attempt := attempt_of(pod)) is not None})
        if view.attempt is None or view.attempt in attempts or not attempts:
            return
        message = (
            f"the pods are of attempt {attempts[-1]}; those of earlier ones are gone, and what "
            "they printed stands in the run directory, in logs/attempt-N"
        )
        raise InputError([Problem(place=f"--attempt {view.attempt}", message=message)])

    def _redacted(self, lines: Iterator[str]) -> Iterator[str]:
        return redacted(lines, self.run_dir, self._environ)

    def _gone(self) -> RunStatus:
        """Return where a run stands whose object is no more."""
        if self._is_cancelled():
            return RunStatus(state=RunState.CANCELLED)
        if self.begun is not None:
            return cut_short(self.kind, self.begun, self._kept_as)
        if (
            ended := local_state.end_of(self._kept_as, self.object_name, self._environ)
        ) is not None:
            return ended
        reason = f"the {self.kind.kind} is gone, and was not cancelled from here: it was deleted"
        return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)

    def _unanswered(self, error: LauncherError) -> RunStatus:
        """Return the status of a run when the API server does not answer."""
        ended = local_state.end_of(self._kept_as, self.object_name, self._environ)
        return ended or RunStatus(state=RunState.UNKNOWN, reason=str(error))

    def _seen(self, status: RunStatus) -> RunStatus:
        """Record a final status, since the object is deleted `ttl` after its end."""
        if status.state.final:
            local_state.remember_end(self._kept_as, self.object_name, status, self._environ)
        elif status.state is not RunState.UNKNOWN:
            local_state.forget_end(self._kept_as, self.object_name, self._environ)
        return status

    @property
    def _kept_as(self) -> str:
        """The name of the run, or of the sweep that it is a point of."""
        return self.name.partition("/")[0]

    def _is_cancelled(self) -> bool:
        return registry.is_cancelled(self.uri, environ=self._environ)

    def withdraw_end(self) -> None:
        """Take back that the run has ended or was cancelled, since it goes on."""
        local_state.forget_end(self._kept_as, self.object_name, self._environ)
        registry.withdraw_cancelled(self.uri, environ=self._environ)

    def unfinished(self) -> "list[KubernetesRun]":
        """Return the parts that have ended without success: this run, or points of a sweep.

        Raises:
            LauncherError: it has succeeded, or not ended.
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
