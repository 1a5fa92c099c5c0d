"""Where a run stands, in figures and lines for people."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from toolkit import secrecy
from toolkit.errors import LauncherError
from toolkit.launchers import rundir
from toolkit.launchers.base import Run, RunState, RunStatus

__all__ = ["lines", "short", "whole"]


def short(run: Run) -> dict[str, Any]:
    """Return what `toolkit list` says of a run; `toolkit status` says more of a sweep."""
    try:
        found = run.status()
    except LauncherError as error:  # one place that is away must not hide the others
        found = RunStatus(state=RunState.UNKNOWN, reason=str(error))
    return _summary(run, found)


def whole(run: Run) -> dict[str, Any]:
    """Return what `toolkit status` says: of a sweep, each point, all by one question."""
    if not run.points:
        return short(run)
    statuses = run.statuses()
    secrets = rundir.secrets_of(run.run_dir)
    points = [
        {
            "uri": point.uri,
            "name": point.name.rpartition("/")[2],
            "state": found.state.upper(),
            "reason": secrecy.redact(found.reason, secrets),
            "settings": dict(point.settings),
            "run_dir": str(point.run_dir),
            "metrics": rundir.last_metrics(point.run_dir) if point.run_dir else None,
        }
        for point, found in zip(run.points, statuses, strict=True)
    ]
    return _summary(run, run.sum_of(statuses)) | {"points": points}


def _summary(run: Run, found: RunStatus) -> dict[str, Any]:
    created = datetime.fromtimestamp(run.record.created).astimezone()
    return {
        "uri": run.uri,
        "name": run.name,
        "state": found.state.upper(),
        "reason": secrecy.redact(found.reason, rundir.secrets_of(run.run_dir)),
        "created": created.isoformat(timespec="seconds"),
        "run_dir": str(run.run_dir) if run.run_dir else None,
        "metrics": rundir.last_metrics(run.run_dir) if run.run_dir else None,
    }


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a summary as `toolkit status` prints it."""
    for key, value in summary.items():
        if key != "points" and value not in (None, ""):
            shown = _figures(value) if isinstance(value, dict) else value
            yield f"{key + ':':<10} {shown}"
    points = summary.get("points", [])
    width = max((len(point["name"]) for point in points), default=0)
    for point in points:
        reason = point["reason"].partition("\n")[0]
        said = "; ".join(filter(None, [_figures(point["metrics"] or {}), reason]))
        yield f"{point['name']:<{width}}  {point['state']:<9}  {said}".rstrip()


def _figures(metrics: Mapping[str, Any]) -> str:
    hidden = ("version", "time", "attempt", "restart")
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in metrics.items()
        if key not in hidden
    )
