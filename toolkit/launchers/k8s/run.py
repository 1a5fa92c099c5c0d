"""A run on Kubernetes, from its state to its logs and its end."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from toolkit.errors import InputError, LauncherError, Problem, RunNotFound
from toolkit.launchers import registry, rundir
from toolkit.launchers.base import Run, RunState, RunStatus
from toolkit.launchers.k8s.cluster import Cluster, selector_of
from toolkit.launchers.k8s.connection import Away
from toolkit.launchers.k8s.kinds import Kind, Object, pods_of
from toolkit.launchers.k8s.logs import Round, read_lines
from toolkit.launchers.k8s.many import FOR_LIST, FOR_WAIT, evidence_of, statuses
from toolkit.launchers.k8s.pod_reasons import attempt_of, short_name
from toolkit.launchers.k8s.states import judge, state_of
from toolkit.launchers.k8s.watching import Watch
from toolkit.launchers.run_logs import LogView
from toolkit.pods import FILE_MARK, RUN_LABEL

__all__ = ["KubernetesRun"]

_CANCEL_ATTEMPTS = 5


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
    ) -> None:
        super().__init__(record)
        self.cluster = cluster
        self.kind = kind
        self.object_name = object_name or record.uri.rpartition("/")[2]
        self._environ = environ
        self._watch: Watch | None = None

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
        """Ask the cluster; UNKNOWN where the API server is away or the object is gone.

        Raises:
            LauncherError: the server refuses to say, which asking again does not mend.
        """
        try:
            found = self.cluster.get(self.kind, self.object_name)
            return self._gone() if found is None else self._judged(found)[0]
        except Away as error:
            return RunStatus(state=RunState.UNKNOWN, reason=str(error))

    def statuses_of(self, runs: Sequence[Run]) -> list[RunStatus]:
        """Ask where runs of this namespace and kind stand, by one list of them."""
        asked = [run for run in runs if isinstance(run, KubernetesRun)]
        parts = [part for run in asked for part in run.parts]
        names = [part.object_name for part in parts]
        try:
            if self._watch is not None and self._watch.goes_on:
                objects, causes = self._watch.look(), FOR_WAIT
            else:
                items, _ = self.cluster.objects(self.kind, selector_of(RUN_LABEL, names))
                objects, causes = {item["metadata"]["name"]: item for item in items}, FOR_LIST
            told = statuses(self.cluster, self.kind, objects, names, causes=causes)
        except LauncherError as error:
            told = [RunStatus(state=RunState.UNKNOWN, reason=str(error))] * len(names)
        found = iter([status or part._gone() for part, status in zip(parts, told, strict=True)])
        by_run = [[next(found) for _ in run.parts] for run in asked]
        return [
            run.sum_of(own) if run.points else own[0]
            for run, own in zip(asked, by_run, strict=True)
        ]

    @contextlib.contextmanager
    def watching(self, runs: Sequence[Run]) -> Iterator[None]:
        """Keep a watch on runs of this namespace and kind: one connection for all of them."""
        watched = [run for run in runs if isinstance(run, KubernetesRun)]
        names = [part.object_name for run in watched for part in run.parts]
        watch = Watch(self.cluster, self.kind, selector_of(RUN_LABEL, names))
        try:
            with contextlib.suppress(LauncherError):  # then each question is a list of its own
                watch.start()
                for run in watched:
                    run._watch = watch
            yield
        finally:
            for run in watched:
                run._watch = None
            watch.close()

    def cancel(self) -> None:
        """Delete the object; its pods get SIGTERM and their grace period."""
        for _ in range(_CANCEL_ATTEMPTS):
            found = self.cluster.get(self.kind, self.object_name)
            if found is None or state_of(self.kind, found)[0].final:
                return
            # Before the deed: afterwards there is nothing left in the cluster to tell by.
            registry.mark_cancelled(self.uri, environ=self._environ)
            if self.cluster.delete(self.kind, found):
                return
        raise LauncherError(f"{self.uri} changes faster than it can be cancelled; try again")

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield the lines of all pods, each told by its pod's name where there is more than one.

        Raises:
            RunNotFound: the run is gone, and its log with it.
            InputError: the pods of the attempt are gone.
            LauncherError: a later attempt is wanted, and nothing counts them.
        """
        if view.attempt and not self.kind.jobs:
            raise LauncherError(
                f"{self.uri}: nothing counts the attempts of a {self.kind.kind}; all are 0"
            )
        return (line for line in self._read(view, on_status) if FILE_MARK not in line)

    def delivered(self) -> Iterator[str]:
        """Yield the lines in which the pods of a call hand over files.

        Raises:
            RunNotFound: the run is gone, and its log with it.
            LauncherError: the logs cannot be read.
        """
        lines = self._read(LogView(), lambda _: None)
        return (line for line in lines if FILE_MARK in line)

    def _read(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        found = self.cluster.get(self.kind, self.object_name)
        if found is None:
            raise RunNotFound(
                f"the {self.kind.kind} of {self.uri} is gone, and its log with its pods"
            )
        several = pods_of(self.kind, found) > 1

        def look() -> Round:
            if not view.follow:
                pods = self.cluster.pods(self.own_pods)
                self._require_attempt(view, pods)
                return Round(pods=pods)
            return self._look(on_status)

        yield from read_lines(
            self.cluster,
            self.kind,
            view,
            look,
            lambda pod: f"[{short_name(pod)}] " if several else "",
        )

    def _look(self, on_status: Callable[[RunStatus], object]) -> Round:
        """Return the pods, and whether it is over, as a follower wants to know."""
        found = self.cluster.get(self.kind, self.object_name)
        if found is None:
            on_status(self._gone())
            return Round(pods=self.cluster.pods(self.own_pods))
        status, pods = self._judged(found)
        on_status(status)
        if not pods and status.state is not RunState.PENDING:
            pods = self.cluster.pods(self.own_pods)
        return Round(pods=pods, ended=status.state.final)

    def _judged(self, found: Object) -> tuple[RunStatus, Sequence[Object]]:
        """Return where the object stands, and the pods that tell why."""
        known = evidence_of(self.cluster, self.kind, {self.object_name: found})
        evidence = known.get(self.object_name)
        return judge(self.kind, found, evidence), evidence.pods if evidence else ()

    def _require_attempt(self, view: LogView, pods: Sequence[Object]) -> None:
        known = sorted({attempt for pod in pods if (attempt := attempt_of(pod)) is not None})
        if view.attempt is None or view.attempt in known or not known:
            return
        message = (
            f"the pods are of attempt {known[-1]}; those of earlier ones are gone, and what they "
            "printed stands in the run directory, in logs/attempt-N"
        )
        raise InputError([Problem(place=f"--attempt {view.attempt}", message=message)])

    def _redacted(self, lines: Iterator[str]) -> Iterator[str]:
        return rundir.redacted(lines, self.run_dir, self._environ)

    def _gone(self) -> RunStatus:
        """Return where a run stands whose object is no more."""
        if self._is_cancelled():
            return RunStatus(state=RunState.CANCELLED)
        reason = f"the {self.kind.kind} is gone, and was not cancelled from here: it was deleted"
        return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)

    def _is_cancelled(self) -> bool:
        return registry.is_cancelled(self.uri, environ=self._environ)

    def withdraw_cancel(self) -> None:
        """Take back that the run was cancelled, since it goes on."""
        registry.withdraw_cancelled(self.uri, environ=self._environ)

    def unfinished(self) -> "list[KubernetesRun]":
        """Return what has ended without success: this run, or points of a sweep.

        Raises:
            LauncherError: it has succeeded, or not ended.
        """
        found = self.status()
        if found.state is RunState.SUCCEEDED:
            raise LauncherError(f"{self.uri} has succeeded; there is nothing to do")
        if not (found.state.final or found.lost):
            raise LauncherError(
                f"{self.uri} has not ended: {found.state.upper()}"
                + (f" ({found.reason})" if found.reason else "")
                + "; `toolkit wait` for it, or cancel it"
            )
        return [self]
