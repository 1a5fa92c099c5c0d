"""The rows of `toolkit list`, the content of `toolkit status` and `goodput`.

A module apart from the commands, since `toolkit --help` imports their modules.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.api import statuses
from toolkit.errors import LauncherError, NewerFormat
from toolkit.runs.evidence.failure import headline
from toolkit.runs.evidence.progress import Progress, ProgressReader
from toolkit.runs.evidence.quiet_nodes import quiet_nodes
from toolkit.runs.evidence.rank_waits import newest_waits
from toolkit.runs.evidence.restarts import in_words, number_of
from toolkit.runs.evidence.stacks import newest_stall, newest_straggler, steps_left_out
from toolkit.runs.evidence.startup import waits_for
from toolkit.runs.records import run_directory
from toolkit.runs.records.proof_record import exceptions_of
from toolkit.runs.records.run_secrets import mask_of
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.views.goodput import BUCKETS, Goodput
from toolkit.text.quantities import rounded_duration

NO_ROWS = "you have no active runs"
"""The message of `toolkit top` without active runs."""

_GOODPUT_BYTES = 64 << 20
"""Up to so many bytes of steps, some 300,000, `status` reads them all for the goodput so far."""


def rows_of(
    runs: Iterable[Run], *, states: Iterable[RunState] = (), brief: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of `toolkit list`; `toolkit status` shows more of a sweep.

    All runs are queried together. Brief rows have only names, states, reasons, dates, folders and
    the number of restarts, since newest metrics cost further reads. Without states to select, all
    are returned.
    """
    runs, selected, environ = list(runs), set(states), dict(os.environ)
    row = _standing if brief else _summary
    return [
        row(run, status, environ)
        for run, status in zip(runs, statuses(runs), strict=True)
        if not selected or status.state in selected
    ]


class GoodputSoFar:
    """The goodput of a running run, computed now and then: each time all its steps are read."""

    def __init__(self) -> None:
        self._next = 0.0
        self._found: dict[str, Any] | None = None

    def of(self, run: Run, status: RunStatus) -> dict[str, Any] | None:
        """Return it; None where this machine does not see the run directory, or it is too large."""
        if status.state is not RunState.RUNNING or run.run_dir is None or run.record.remote_dir:
            return None
        if (began := time.monotonic()) >= self._next:
            self._found = _goodput(run, run.run_dir)
            self._next = time.monotonic() + max(10.0, 50 * (time.monotonic() - began))
        return self._found


def _goodput(run: Run, run_dir: Path) -> dict[str, Any] | None:
    try:
        if (run_dir / "metrics.jsonl").lstat().st_size > _GOODPUT_BYTES:
            return None
        goodput = run.goodput()
    except (OSError, LauncherError):
        return None
    lost = {bucket: s for bucket, s in goodput.seconds.items() if bucket != "productive"}
    most = max(lost, key=lost.__getitem__)
    share = lost[most] / goodput.elapsed_s if goodput.elapsed_s else 0.0
    rest = f"; most of the rest: {most} ({share:.0%})" if share >= 0.005 else ""
    return {"summary": f"{goodput.share:.0%} so far{rest}", "share": goodput.share}


def summary_of(
    run: Run, status: RunStatus | None = None, goodput: GoodputSoFar | None = None
) -> dict[str, Any]:
    """Return the content of `toolkit status`; all points of a sweep are queried together.

    Args:
        run: The run.
        status: Its status, if the caller has queried it already; for a sweep it is not used.
        goodput: The summary's before, if it is shown again and again.
    """
    if not run.points:
        status = status or run.status()
        failure = _failure(run) if status.state is RunState.FAILED else None
        live = _live_dir(run, status)
        progress = _progress(run, live, {})
        left_out = live if status.state is RunState.RUNNING else run.run_dir
        return _summary(run, status) | {
            "progress": {"summary": str(progress), **asdict(progress)} if progress else None,
            "waits_for": _waits_for(run, status, progress),
            "goodput": (goodput or GoodputSoFar()).of(run, status),
            "nodes": _quiet_nodes(run, status),
            "stall": _hidden(run, newest_stall(live)) if live else None,
            "straggler": _hidden(run, newest_straggler(live)) if live else None,
            "ranks": _ranks(live),
            "proof": _proof(run),
            "log_pattern": _hidden(run, steps_left_out(left_out)) if left_out else None,
            "restarts": _restarts(run),
            "failure": failure,
        }
    point_statuses = run.statuses()
    mask = mask_of(run.run_dir)
    points = [
        {
            "uri": point.uri,
            "name": point.name.rpartition("/")[2],
            "state": status.state.upper(),
            "reason": mask.hide(status.reason),
            "settings": dict(point.settings),
            "restarts": _counted(point),
            "run_dir": str(point.run_dir),
            **_metrics(point.run_dir),
        }
        for point, status in zip(run.points, point_statuses, strict=True)
    ]
    return _summary(run, run.sum_of(point_statuses)) | {"points": points}


def _standing(
    run: Run, status: RunStatus, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    reason, folder = status.reason, run.run_dir
    created = datetime.fromtimestamp(run.record.created).astimezone()
    return {
        "uri": run.uri,
        "name": run.name,
        "state": status.state.upper(),
        "reason": mask_of(folder, environ).hide(reason) if reason else "",
        "created": created.isoformat(timespec="seconds"),
        "run_dir": str(folder) if folder else None,
        "restarts": _counted(run),
    }


def _counted(run: Run) -> dict[str, int] | None:
    """Return how often a run was interrupted, without the reasons, which cost further reads."""
    return {"count": count} if (count := run.count_restarts()) else None


def _summary(
    run: Run, status: RunStatus, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    return (
        _standing(run, status, environ)
        | {
            "expected_start": status.expected_start or None,
            "place_in_queue": status.place_in_queue,
            **_metrics(run.run_dir),
        }
        | ({"remote": run.record.remote} if run.record.remote else {})
    )


def _metrics(folder: Path | None) -> dict[str, Any]:
    """Return the newest figures, or why they are not read."""
    try:
        return {"metrics": run_directory.last_metrics(folder) if folder else None}
    except NewerFormat as error:
        return {"metrics": None, "unread": str(error)}


def _live_dir(run: Run, status: RunStatus) -> Path | None:
    """Return where the records of a running run can be read."""
    return run.live_dir() if status.state is RunState.RUNNING else None


def _hidden(run: Run, text: str | None) -> str | None:
    return text and mask_of(run.run_dir).hide(text)


def _progress(run: Run, live: Path | None, readers: dict[str, ProgressReader]) -> Progress | None:
    """Return how far a run is, while it runs and where its records can be read."""
    if live is None:
        return None
    if run.uri not in readers:
        readers[run.uri] = ProgressReader(live)
    return readers[run.uri].progress()


def _waits_for(run: Run, status: RunStatus, progress: Progress | None) -> str | None:
    """Return what a running run waits for that has made no step since it began."""
    if status.state is not RunState.RUNNING or run.run_dir is None:
        return None
    return waits_for(run.run_dir, progress)


def _quiet_nodes(run: Run, status: RunStatus) -> str | None:
    """Return which nodes of a running run have given no sign of life for a while."""
    if status.state is not RunState.RUNNING or run.run_dir is None:
        return None
    return quiet_nodes(run.run_dir)


def _ranks(live: Path | None) -> dict[str, Any] | None:
    """Return how long the ranks of a running run wait for each other."""
    waits = newest_waits(live) if live else None
    return {"summary": str(waits), **asdict(waits)} if waits else None


def _proof(run: Run) -> str | None:
    """Return in what a run is not known to train as one process would."""
    try:
        return exceptions_of(run.run_dir) if run.run_dir else None
    except NewerFormat as error:
        return str(error)


def _restarts(run: Run) -> dict[str, Any] | None:
    """Return what has interrupted a run, where that is known."""
    if not (found := run.restarts()):
        return None
    return {
        "summary": in_words(found),
        "count": len(found),
        "away_s": sum(one.away_s for one in found),
        "each": [asdict(one) for one in found],
    }


def _failure(run: Run) -> dict[str, Any] | None:
    try:
        failure = run.failure()
    except LauncherError as error:
        return {"summary": f"unknown: {error}"}
    return {"summary": str(failure), **asdict(failure)} if failure else None


def summary_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a summary as `toolkit status` prints it."""
    for key, text in summary_fields(summary):
        yield text if key == "failure" else f"{key + ':':<10} {text}"
    points = summary.get("points", [])
    width = max((len(point["name"]) for point in points), default=0)
    for point in points:
        yield f"{point['name']:<{width}}  {point['state']:<9}  {point_text(point)}".rstrip()


def summary_fields(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a summary that `toolkit status` shows, with their texts."""
    for key, value in summary.items():
        if key == "waits_for" and value:
            yield "waits for", value
        elif key == "failure" and value:
            yield key, headline(value["summary"])
        elif key in ("progress", "ranks", "goodput", "restarts") and value:
            yield key, value["summary"]
        elif key not in ("points", "expected_start", "place_in_queue") and value not in (None, ""):
            yield key, run_directory.figures(value) if isinstance(value, dict) else str(value)


def point_text(point: Mapping[str, Any]) -> str:
    """Return the newest metrics of a sweep's point, and the reason of its state."""
    reason = point["reason"].partition("\n")[0]
    figures = run_directory.figures(point["metrics"] or {}) or point.get("unread")
    return "; ".join(filter(None, [restarts_text(point), figures, reason]))


def age_of(created: datetime) -> str:
    """Return how long ago a run was submitted, in its largest unit."""
    seconds = max((datetime.now(UTC) - created).total_seconds(), 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def restarts_text(row: Mapping[str, Any]) -> str:
    """Return the number of restarts in a row; empty where there are none."""
    return number_of(restarts["count"]) if (restarts := row.get("restarts")) else ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run among others, as `toolkit top` shows it."""

    name: str
    state: RunState
    progress: Progress | None
    """How far it is, while it runs."""

    note: str
    """Why it waits or has ended; a rank that hangs or is slow."""

    def __str__(self) -> str:
        """Describe the run in one line: its progress, or the reason for which it waits."""
        return "; ".join(filter(None, [str(self.progress or ""), self.note]))


def top_rows(
    runs: Iterable[tuple[Run, RunStatus]], readers: dict[str, ProgressReader]
) -> list[Row]:
    """Return a row for each run.

    Args:
        runs: The runs with their statuses.
        readers: By URI, those of the rows before; new ones are added.
    """
    rows = []
    for run, status in runs:
        reason, live = status.reason.partition("\n")[0], _live_dir(run, status)
        progress = _progress(run, live, readers)
        waits = f"waits for {what}" if (what := _waits_for(run, status, progress)) else ""
        stall = f"stalled: {why}" if live and (why := newest_stall(live)) else ""
        notes = [stall, newest_straggler(live) if live else "", reason]
        note = "; ".join(filter(None, [waits, *(_hidden(run, note) for note in notes)]))
        rows.append(Row(name=run.name, state=status.state, progress=progress, note=note))
    return rows


def top_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row: name, state, progress or reason."""
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        yield f"{row.name:<{width}}  {row.state.upper():<9}  {row}".rstrip()


def goodput_lines(name: str, goodput: Goodput) -> Iterator[str]:
    """Yield a run's goodput as `toolkit goodput` prints it: the largest buckets first."""
    if not goodput.elapsed_s:
        found = "`log_pattern` in the job file finds the steps in what the script prints"
        yield f"{name}: nothing is recorded; {found}"
        return
    step = "no step" if goodput.step is None else f"step {goodput.step}"
    steps = "1 step" if goodput.steps_again == 1 else f"{goodput.steps_again} steps"
    again = f", {steps} made again" if goodput.steps_again else ""
    starts = "1 start" if goodput.starts == 1 else f"{goodput.starts} starts"
    yield (
        f"{name}: goodput {goodput.share:.1%} of {rounded_duration(goodput.elapsed_s)} "
        f"({step}{again}, {starts})"
    )
    for bucket, seconds in sorted(goodput.seconds.items(), key=lambda item: -item[1]):
        share = seconds / goodput.elapsed_s if seconds else 0.0
        if share >= 0.0005:  # as 0.1%
            took = rounded_duration(seconds)
            yield f"  {share:>6.1%}  {took:>12}  {bucket:<13}  {BUCKETS[bucket]}"
    if goodput.price and goodput.rank_s is not None and goodput.productive_rank_s is not None:
        cost, useful = map(goodput.price.of_ranks, (goodput.rank_s, goodput.productive_rank_s))
        yield f"  {cost} for {goodput.rank_s / 3600:.4g} rank hours; {useful} for steps that count"


def no_diff(origin: Mapping[str, Any]) -> str:
    """Say why the origin of a run has no diff."""
    git = origin["git"]
    if not git:
        return "it was not submitted from a git working tree"
    if not git.get("dirty"):
        return "nothing was changed since its commit"
    return "its changes are in new files, are too large, or were recorded elsewhere"
