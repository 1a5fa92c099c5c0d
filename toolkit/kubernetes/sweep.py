"""A sweep on Kubernetes: an object per point, all with the label of the sweep."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from toolkit.errors import LauncherError
from toolkit.kubernetes.client.resources import selector_of
from toolkit.kubernetes.local_state import Settings
from toolkit.kubernetes.logs import Round, read_lines
from toolkit.kubernetes.pods import label_of
from toolkit.kubernetes.run import KubernetesRun
from toolkit.kubernetes.workloads import Object
from toolkit.planning.pods import RUN_LABEL, SWEEP_LABEL
from toolkit.runs.log_reader import LogView
from toolkit.runs.run import unfinished_of
from toolkit.runs.state import RunStatus


class KubernetesSweep(KubernetesRun):
    """All points of a sweep together."""

    @cached_property
    def points(self) -> "tuple[KubernetesPoint, ...]":
        """The points, each a run of its own."""
        return tuple(
            KubernetesPoint(self, index, name, settings)
            for index, (name, settings) in enumerate(self.local.points())
        )

    def statuses(self) -> list[RunStatus]:
        """Return the statuses of all points, by one list request."""
        return self._part_statuses()

    @property
    def selector(self) -> str:
        """The selector of the points' objects and pods."""
        return selector_of(SWEEP_LABEL, [self.object_name])

    def cancel(self) -> None:
        """Delete the objects of all points that have not ended.

        Raises:
            LauncherError: some could not be cancelled; all others are.
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
                for pod in self.cluster.pods(self.selector)
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
    """A point of a sweep: an object of its own."""

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
        self._settings = settings

    @property
    def settings(self) -> Settings:
        """What the point sets."""
        return self._settings
