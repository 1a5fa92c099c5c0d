"""The notebook view of a run: its state, progress, and loss curve."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.errors import LauncherError, NewerFormat
from toolkit.rendering import page_environment
from toolkit.runs.records import run_directory
from toolkit.runs.records.run_directory import figures, last_figures
from toolkit.runs.records.run_secrets import mask_of
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views import curves
from toolkit.text import untrusted

if TYPE_CHECKING:
    from toolkit.runs.run import Run

_COLOURS = {
    RunState.CANCELLED: "#6b7280",
    RunState.FAILED: "#dc2626",
    RunState.PENDING: "#b45309",
    RunState.PREEMPTED: "#b45309",
    RunState.RUNNING: "#2563eb",
    RunState.SUCCEEDED: "#15803d",
    RunState.UNKNOWN: "#6b7280",
}
_MOST_POINTS = 200
"""Row limit of a sweep's table; more would make the notebook slow."""


class _Extent(NamedTuple):
    """The finished `steps` of a run, or `points` of a sweep."""

    done: int
    total: int
    unit: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve over the steps, in the units of an SVG drawing."""

    points: str
    """`x,y x,y …`"""

    first: int
    last: int
    """The first and last step."""

    lowest: str
    highest: str
    """The lowest and highest value."""

    width: int = 600
    height: int = 160
    left: int = 60
    top: int = 10
    right: int = 590
    bottom: int = 140

    @classmethod
    def of(cls, curve: curves.Curve) -> "Curve | None":
        """Draw a curve; None if it has fewer than two values.

        Long runs are drawn with at most one value per unit of the drawing's width, so that a page
        stays small; the highest and lowest values are those of all steps.
        """
        steps, values = curve.steps, curve.values
        if len(values) < 2:
            return None
        low, high, first, last = min(values), max(values), steps[0], steps[-1]
        every = max(1, len(values) // (cls.right - cls.left))
        drawn = [*zip(steps[:-1:every], values[:-1:every], strict=True), (last, values[-1])]
        wide, tall = (last - first) or 1, (high - low) or 1.0
        points = " ".join(
            f"{cls.left + (cls.right - cls.left) * (step - first) / wide:.1f},"
            f"{cls.bottom - (cls.bottom - cls.top) * (value - low) / tall:.1f}"
            for step, value in drawn
        )
        return cls(
            points=points, first=first, last=last, lowest=f"{low:.4g}", highest=f"{high:.4g}"
        )


def _extent_of(run: "Run", points: Sequence[RunStatus] = ()) -> _Extent | None:
    """Return the progress of a run, or of a sweep by its points' statuses; None if unknown."""
    if run.points:
        ended = sum(status.state.final for status in points)
        return _Extent(ended, len(run.points), "points")
    if (folder := run.live_dir()) is None:
        return None
    steps = untrusted.whole((run_directory.outcome(folder) or {}).get("steps"))
    done = None
    with contextlib.suppress(NewerFormat):  # the page reports it
        done = untrusted.whole((run_directory.last_metrics(folder) or {}).get("step"))
    return None if steps is None else _Extent(done or 0, steps, "steps")


def html_of(run: "Run") -> str:
    """Return the status of a run as an HTML fragment."""
    try:
        points = run.statuses() if run.points else []
        status = run.sum_of(points) if run.points else run.status()
    except LauncherError as error:  # a page must not fail because a cluster is away
        points, status = [], RunStatus(state=RunState.UNKNOWN, reason=str(error))
    return _page_of(run, status, points)


def _page_of(run: "Run", now: RunStatus, statuses: Sequence[RunStatus]) -> str:
    """Return a run as an HTML fragment; all content is escaped, and secrets are left out."""
    mask = mask_of(run.run_dir)
    newest, loss, unread = dict[str, Any](), curves.Curve(), ""
    try:
        if run.run_dir is not None and not run.points:
            newest, loss = curves.newest_and_curve(run.run_dir, "loss")
    except NewerFormat as error:
        unread = str(error)
    points = [
        {
            "name": point.name.rpartition("/")[2],
            "settings": point.settings,
            "state": status.state.upper(),
            "colour": _COLOURS[status.state],
            "said": mask.hide("; ".join(filter(None, [last_figures(point.run_dir), reason]))),
        }
        for point, status in list(zip(run.points, statuses, strict=False))[:_MOST_POINTS]
        for reason in [status.reason.partition("\n")[0]]
    ]
    values = {
        "name": run.name,
        "uri": run.uri,
        "run_dir": run.run_dir,
        "state": now.state.upper(),
        "colour": _COLOURS[now.state],
        "reason": mask.hide(now.reason),
        "extent": _extent_of(run, statuses),
        "curve": Curve.of(loss),
        "figures": figures(newest) or unread,
        "keys": sorted({key for point in run.points for key in point.settings}),
        "points": points,
        "more": max(0, len(statuses) - _MOST_POINTS),
    }
    return page_environment().get_template("notebook/run.html.j2").render(values)


class ProgressDisplay:
    """Shows a run's progress to a waiting caller: a page in a notebook, a bar in a terminal."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._bar: Any = None
        self._handle: Any = None
        self._shown = 0

    @staticmethod
    def is_watched() -> bool:
        """Whether the output is displayed: in Jupyter, or at a terminal."""
        return _in_notebook() or sys.stderr.isatty()

    def show(self, status: RunStatus, points: Sequence[RunStatus]) -> None:
        """Show the state of the run, and for a sweep the state of each point."""
        if not _in_notebook():
            self._show_bar(status, points)
            return
        from IPython import display

        page = display.HTML(_page_of(self._run, status, points))
        if self._handle is None:
            self._handle = display.display(page, display_id=True)
        else:
            self._handle.update(page)

    def _show_bar(self, status: RunStatus, points: Sequence[RunStatus]) -> None:
        import click

        if (extent := _extent_of(self._run, points)) is None:
            return
        if self._bar is None and not status.state.final:
            label = f"{self._run.name} ({extent.unit})"
            self._bar = click.progressbar(
                length=extent.total, label=label, file=sys.stderr, show_pos=True
            )
            self._bar.__enter__()
        if self._bar is not None:
            self._bar.update(extent.done - self._shown)
            self._shown = extent.done

    def close(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


def _in_notebook() -> bool:
    """Whether this is a notebook kernel; IPython in a terminal is not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
