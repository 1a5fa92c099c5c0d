"""A sweep on Kubernetes: an object per point, all with the label of the sweep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.connection import Away
from toolkit.kubernetes.client.resources import Cluster, selector_of
from toolkit.kubernetes.local_state import Settings, points_of
from toolkit.kubernetes.logs import Round, read_lines
from toolkit.kubernetes.run import KubernetesRun
from toolkit.kubernetes.workloads import Kind, Object
from toolkit.planning.pods import RUN_LABEL, SWEEP_LABEL
from toolkit.runs import registry
from toolkit.runs.log_reader import LogView
from toolkit.runs.run import unfinished_of
from toolkit.runs.state import RunStatus

__all__ = ["KubernetesPoint", "KubernetesSweep"]


class KubernetesSweep(KubernetesRun):
    """All points of a sweep together."""

    @cached_property
    def points(self) -> "tuple[KubernetesPoint, ...]":
        """The points, each a run of its own."""
        points = points_of(self.record.name, self._environ)
        return tuple(
            KubernetesPoint(self, index, name, settings)
            for index, (name, settings) in enumerate(points)
        )

    @property
    def parts(self) -> "Sequence[KubernetesPoint]":
        """The points."""
        return self.points

    def status(self) -> RunStatus:
        """Return the status of the sweep, from those of its points."""
        return self.sum_of(self.statuses())

    def statuses(self) -> list[RunStatus]:
        """Return the statuses of all points, by one list request.

        Raises:
            LauncherError: the server refuses to say.
        """
        try:
            return self._look(self.own_objects, self.points)
        except Away as error:
            return [point._unanswered(error) for point in self.points]

    @property
    def own_objects(self) -> str:
        """The selector of the points' objects."""
        return selector_of(SWEEP_LABEL, [self.object_name])

    def cancel(self) -> None:
        """Delete the objects of all points that have not ended.

        Raises:
            LauncherError: some could not be cancelled; all others are.
        """
        failed: list[LauncherError] = []
        for point in self.points:
            try:
                point.cancel()
            except LauncherError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def unfinished(self) -> list[KubernetesRun]:
        """Return the points that have ended without success.

        Raises:
            LauncherError: all have succeeded, or one has not ended.
        """
        return [self.points[index] for index in unfinished_of(self, self.statuses())]

    def _read(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        names = {point.object_name: point.point_name for point in self.points}
        order = {point.object_name: point.index for point in self.points}

        def look() -> Round:
            ended = True
            if view.follow:
                status = self.status()
                on_status(status)
                ended = status.state.final or status.lost
            pods = self.cluster.pods(f"{SWEEP_LABEL}={self.object_name}")
            ours = [pod for pod in pods if _run_of(pod) in names]
            return Round(pods=sorted(ours, key=lambda pod: order[_run_of(pod)]), ended=ended)

        return read_lines(
            self.cluster, self.kind, view, look, lambda pod: f"[{names[_run_of(pod)]}] "
        )


class KubernetesPoint(KubernetesRun):
    """A point of a sweep: an object of its own."""

    def __init__(self, sweep: KubernetesSweep, index: int, name: str, settings: Settings) -> None:
        whole = sweep.record
        record = replace(whole, uri=f"{whole.uri}_{index}", name=f"{whole.name}/{name}")
        super().__init__(
            record,
            sweep.cluster,
            sweep.kind,
            sweep._environ,
            object_name=f"{sweep.object_name}-{index}",
            begun=sweep.begun,
        )
        self.sweep = sweep
        self.index = index
        self.point_name = name
        self._settings = settings

    @property
    def settings(self) -> Settings:
        """What the point sets."""
        return self._settings


def _run_of(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(RUN_LABEL))


def opened(
    record: registry.RunRecord,
    cluster: Cluster,
    kind: Kind,
    environ: Mapping[str, str],
    *,
    begun: float | None = None,
) -> KubernetesRun:
    """Return the handle of a run, or of a sweep; `begun` as in `KubernetesRun`."""
    sweep = bool(points_of(record.name, environ))
    made = KubernetesSweep if sweep else KubernetesRun
    return made(record, cluster, kind, environ, begun=begun)
