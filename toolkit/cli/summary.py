"""Where a run stands, in figures and lines for people."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from toolkit.api import statuses
from toolkit.runs import run_directory
from toolkit.runs.metrics import figures
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus

__all__ = ["lines", "listed", "whole"]


def listed(
    runs: Iterable[Run], *, states: Iterable[RunState] = (), brief: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of `toolkit list`; `toolkit status` shows more of a sweep.

    Args:
        runs: The runs; all are queried together.
        states: The states of the runs to return; all where it is empty.
        brief: Whether to return the states alone, without what costs further reads:
        newest metrics, dates and places.
    """
    asked, wanted, environ = list(runs), set(states), dict(os.environ)
    pairs = zip(asked, statuses(asked), strict=True)
    return [
        _standing(run, status, environ) if brief else _summary(run, status, environ=environ)
        for run, status in pairs
        if not wanted or status.state in wanted
    ]


def whole(run: Run) -> dict[str, Any]:
    """Return the content of `toolkit status`: of a sweep, each point, all by one question."""
    if not run.points:
        content = _summary(run, run.status())
        failed = run.failure() if content["state"] == RunState.FAILED.upper() else None
        return content | {"failure": {"summary": str(failed), **asdict(failed)} if failed else None}
    found_of = run.statuses()
    mask = run_directory.mask_of(run.run_dir)
    points = [
        {
            "uri": point.uri,
            "name": point.name.rpartition("/")[2],
            "state": content.state.upper(),
            "reason": mask.hide(content.reason),
            "settings": dict(point.settings),
            "run_dir": str(point.run_dir),
            "metrics": run_directory.last_metrics(point.run_dir) if point.run_dir else None,
        }
        for point, content in zip(run.points, found_of, strict=True)
    ]
    return _summary(run, run.sum_of(found_of)) | {"points": points}


def _standing(run: Run, status: RunStatus, environ: Mapping[str, str]) -> dict[str, Any]:
    reason = status.reason
    return {
        "uri": run.uri,
        "name": run.name,
        "state": status.state.upper(),
        "reason": run_directory.mask_of(run.run_dir, environ).hide(reason) if reason else "",
    }


def _summary(
    run: Run,
    status: RunStatus,
    *,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    created = datetime.fromtimestamp(run.record.created).astimezone()
    folder = run.run_dir
    return (
        _standing(run, status, environ)
        | {
            "expected_start": status.expected_start or None,
            "created": created.isoformat(timespec="seconds"),
            "run_dir": str(folder) if folder else None,
            "metrics": run_directory.last_metrics(folder) if folder else None,
        }
        | ({"remote": run.record.remote} if run.record.remote else {})
    )


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a summary as `toolkit status` prints it."""
    for key, value in summary.items():
        if key == "failure" and value:
            yield f"first failure: {value['summary']}"
        elif key not in ("points", "expected_start") and value not in (None, ""):
            shown = figures(value) if isinstance(value, dict) else value
            yield f"{key + ':':<10} {shown}"
    points = summary.get("points", [])
    width = max((len(point["name"]) for point in points), default=0)
    for point in points:
        reason = point["reason"].partition("\n")[0]
        text = "; ".join(filter(None, [figures(point["metrics"] or {}), reason]))
        yield f"{point['name']:<{width}}  {point['state']:<9}  {text}".rstrip()
