"""A report of runs: one page of HTML with curves, timeline, goodput, failures and provenance.

The page needs no network and no other file; docs/how-to/reports.md shows one. Its content comes
from the run directory, which is untrusted: it is escaped, secrets are left out, and the page's
Content-Security-Policy blocks all loading.
"""

import contextlib
import html
import itertools
import json
import math
import os
import secrets
import shlex
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from toolkit import __version__
from toolkit.errors import InputError, LauncherError
from toolkit.job.spec import JobSpec
from toolkit.rendering import page_environment, template_text
from toolkit.runs.evidence.rank_waits import RankWaits, mean_waits, waits_in
from toolkit.runs.evidence.restarts import Restart, in_words
from toolkit.runs.evidence.stacks import Stall, stalls_of, steps_left_out
from toolkit.runs.records import run_directory
from toolkit.runs.records.log_reader import (
    LogFilter,
    LogView,
    attempt_folders,
    attempt_numbers,
    attempt_spans,
    end_of,
    nodes_of,
)
from toolkit.runs.records.provenance import origin_lines, origin_of
from toolkit.runs.records.run_secrets import mask_of
from toolkit.runs.state import RunState, RunStatus, sum_of
from toolkit.runs.views.curves import Curve, Start, curves_and_starts
from toolkit.runs.views.goodput import BUCKETS, Goodput, Price, goodput_of
from toolkit.text import secret_scan, untrusted
from toolkit.text.quantities import rounded_duration
from toolkit.text.yaml_reader import read_document

if TYPE_CHECKING:
    from toolkit.runs.run import Run

MARK = "<!-- A report of torch-deploy-toolkit -->"
"""Marker in every report: a new report may overwrite only files that contain it."""

_POINTS = 24_000
"""Points of all curves together: some 600 KB."""

_MOST_POINTS, _FEWEST_POINTS = 2000, 8
"""Points of one curve."""

_MOST_RUNS = 200
_MOST_ATTEMPTS = 50
_MOST_STARTS, _FEWEST_STARTS = 200, 5
"""Row limit of all timelines together, and minimum per run: the newest starts of the ranks."""

_MOST_LINES = 200
"""Line limit of a failure, and of a stall's stacks."""

_MOST_STALLS = 5
_MOST_RANKS = 32
"""Row limit of the rank table; it lists the ranks that wait least."""

_DRAWN_RANKS = 8
_LINE = 300
"""Character limit of a stack line."""

_FILE_BYTES = 100 << 10
"""Byte limit of a job file or script in the page."""

_MOST_SETTINGS = 8
"""Column limit of a comparison, and axis limit of its parallel coordinates."""

_RECORDED = ("events.jsonl", "metrics.jsonl", "outcome.json")

_FIRST = ("loss", "test_loss", "test_accuracy", "accuracy", "lr", "samples_per_s")
"""The curves that come first."""

_BEST = (("test_accuracy", -1), ("accuracy", -1), ("test_loss", 1), ("loss", 1))
"""Metrics that rank runs, each with its direction: -1 if the highest value is best, else 1."""

_LOG_LINES, _LOG_BYTES = 20, 1 << 16
"""How much of the log's end is shown."""

_MOST_IN_LABEL = 3
"""Setting limit of a run's label in a comparison."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page about one or several runs."""

    title: str
    html: str
    """The whole page."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file; an earlier report is overwritten.

        Raises:
            InputError: the file exists and is not a report, or cannot be written.
        """
        target = Path(path)
        with contextlib.suppress(FileNotFoundError):
            _require_report(target)
        # An unguessable name: in a folder that others can write, another name could exist already.
        draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
        try:
            # A folder's name need not be UTF-8.
            untrusted.write_bytes(draft, self.html.encode(errors="replace"), anew=True)
            draft.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise InputError(f"cannot be written: {error.strerror}", place=str(path)) from error
        return target

    def _repr_html_(self) -> str:
        """Show the page in a notebook, isolated from the notebook's styles and scripts."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="{html.escape(self.title)}" '
            'sandbox="allow-scripts" style="width: 100%; height: 60em; border: 0"></iframe>'
        )


def _require_report(path: Path) -> None:
    """Make sure that a file is a report, so that it may be overwritten.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is not a report.
    """
    try:
        with untrusted.open_untrusted(path) as file:
            if MARK.encode() in file.read(256):
                return
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"cannot be replaced: {error.strerror}", place=str(path)) from None
    raise InputError("exists and is not a report; name another file with --output", place=str(path))


@dataclass(kw_only=True)
class _Facts:
    """The content of a report about one run."""

    run: "Run"
    status: RunStatus
    goodput: Goodput | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    restarts: Sequence[Restart] = ()
    steps: int | None = None
    waits: list[RankWaits] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Sentences about data that could not be read."""

    @property
    def last(self) -> dict[str, float]:
        """The newest value of each curve."""
        return {name: curve.values[-1] for name, curve in self.curves.items()}


def report(runs: "Sequence[Run]") -> Report:
    """Return a report of runs; of a sweep, all its points are compared.

    Raises:
        InputError: the number of runs is 0 or too large.
    """
    parts = [part for run in runs for part in run.parts]
    if not 0 < len(parts) <= _MOST_RUNS:
        raise InputError(f"{len(parts)} runs; a report is of 1 to {_MOST_RUNS}", place="report")
    statuses = _statuses(runs)
    facts = [_facts(part, status) for part, status in zip(parts, statuses, strict=True)]
    order = _order_of(facts)
    title = runs[0].name if len(runs) == 1 else f"{len(parts)} runs"
    names = sorted({name for one in facts for name in one.curves}, key=_place_of)
    comparison = _comparison(facts, names, order) if len(facts) > 1 else None
    most_starts = max(_MOST_STARTS // len(facts), _FEWEST_STARTS)
    values = {
        "title": title,
        "mark": MARK,
        "version": __version__,
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": [_shown(one, most_starts, alone=len(facts) == 1) for one in facts],
        "charts": [_chart(name, facts) for name in names],
        "buckets": _buckets(facts),
        "comparison": comparison,
        "single": _details(facts[0]) if len(facts) == 1 else None,
        "data": _script_json(
            _data(facts, names, most_starts, comparison) | {"axes": _axes(facts, comparison)}
        ),
        "styles": _parts("uplot/uPlot.min.css", "report.css"),
        "scripts": _parts("uplot/uPlot.iife.min.js", "report.js"),
    }
    page = page_environment().get_template("report/report.html.j2").render(values)
    return Report(title=title, html=page)


def _order_of(facts: list[_Facts]) -> str:
    """Sort the best run first, by the first metric that any run has; describe the order."""
    for name, sign in _BEST:
        if any(name in one.last for one in facts):
            facts.sort(key=lambda one: _rank(one.last.get(name), sign))
            return f"{name}, {'lowest' if sign > 0 else 'highest'} first"
    return ""


def _rank(value: float | None, sign: int) -> tuple[bool, float]:
    unknown = value is None or math.isnan(value)
    return unknown, 0.0 if value is None or unknown else sign * value


def _parts(*names: str) -> str:
    """Return the files that the page contains unchanged."""
    return "\n".join(template_text(f"report/{name}") for name in names)


def _statuses(runs: "Sequence[Run]") -> Iterator[RunStatus]:
    for run in runs:
        try:
            yield from run.statuses() if run.points else [run.status()]
        except LauncherError as error:  # a page must not fail because a cluster is away
            unknown = RunStatus(state=RunState.UNKNOWN, reason=str(error))
            yield from [unknown] * len(run.parts)


def _facts(run: "Run", status: RunStatus) -> _Facts:
    facts = _Facts(run=run, status=status)
    if run.run_dir is not None:
        facts.waits = waits_in(run.run_dir)
    until = None if status.state.final else datetime.now().timestamp()
    try:
        facts.restarts = run.restarts()
        with run.recorded(*_RECORDED) as folder:
            recorded = (folder / "metrics.jsonl").is_file()
            goodput = goodput_of(
                folder, submitted=run.record.created, until=until, times=run.scheduled()
            )
            facts.goodput = replace(goodput, price=Price.of(run.record.profile))
            facts.curves, facts.starts = curves_and_starts(folder)
            outcome = run_directory.outcome(folder) or {}
            facts.steps = untrusted.whole(outcome.get("steps"))
    except LauncherError as error:
        facts.missing.append(str(error))
    else:
        if run.run_dir and (why := steps_left_out(run.run_dir)):
            facts.missing.append(f"log_pattern: {why}")
        if not recorded:
            facts.missing.append(
                "no steps are recorded, so the report has no curves; `log_pattern` in the job file "
                "finds the steps in what the script prints"
            )
        if facts.goodput and not facts.goodput.starts:
            facts.goodput = None
    return facts


def _shown(facts: _Facts, most_starts: int, *, alone: bool) -> dict[str, Any]:
    """Return a run's header: the output of `toolkit status`, and the timeline."""
    run, goodput = facts.run, facts.goodput
    mask = mask_of(run.run_dir)
    step = max((curve.steps[-1] for curve in facts.curves.values()), default=None)
    if goodput and goodput.step is not None:
        step = goodput.step
    created = datetime.fromtimestamp(run.record.created).astimezone()
    return {
        "name": run.name if alone else run.name.rpartition("/")[2],
        "uri": run.uri,
        "state": facts.status.state.upper(),
        "reason": mask.hide(facts.status.reason),
        "sentence": mask.hide(_sentence(facts, step)),
        "created": created.isoformat(sep=" ", timespec="seconds"),
        "run_dir": str(run.run_dir) if run.run_dir else "",
        "step": step,
        "steps_in_all": facts.steps,
        "last": {name: f"{value:.4g}" for name, value in facts.last.items()},
        "goodput": f"{goodput.share:.1%}" if goodput else "",
        "elapsed": rounded_duration(goodput.elapsed_s) if goodput else "",
        "ranks": goodput.ranks if goodput else None,
        "rank_hours": _hours(goodput.rank_s) if goodput else "",
        "cost": _cost(goodput) if goodput else "",
        "steps_again": goodput.steps_again if goodput else 0,
        "rows": _timeline(goodput, most_starts) if goodput and goodput.elapsed_s else [],
        "more_rows": max(goodput.starts - most_starts, 0) if goodput else 0,
        "missing": [mask.hide(text) for text in facts.missing],
    }


def _sentence(facts: _Facts, step: int | None) -> str:
    """Return the text after a run's state: progress, reason and interruptions."""
    took = f"after {rounded_duration(facts.goodput.elapsed_s)}" if facts.goodput else ""
    in_all = f" of {facts.steps}" if facts.steps else ""
    where = "" if step is None else f"at step {step}{in_all}"
    parts = [", ".join(filter(None, [took, where])), facts.status.reason, in_words(facts.restarts)]
    return "; ".join(filter(None, parts))


def _hours(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds / 3600:.4g}"


def _cost(goodput: Goodput) -> str:
    if goodput.price is None or goodput.rank_s is None:
        return ""
    return goodput.price.of_ranks(goodput.rank_s)


def _timeline(goodput: Goodput, most: int) -> list[dict[str, Any]]:
    """Return a row for each of the newest starts, its spans in percent of the elapsed time."""
    numbers = goodput.numbers or ((0, 0),)
    first = max(len(numbers) - most, 0)
    rows: list[dict[str, Any]] = [
        {"attempt": attempt, "restart": restart, "spans": []}
        for attempt, restart in numbers[first:]
    ]
    for span in goodput.spans:
        if span.start >= first:
            rows[span.start - first]["spans"].append(
                {
                    "bucket": span.bucket,
                    "left": 100 * span.begin / goodput.elapsed_s,
                    "width": 100 * span.seconds / goodput.elapsed_s,
                    "said": f"{span.bucket}: {rounded_duration(span.seconds)}",
                }
            )
    return rows


def _buckets(facts: Sequence[_Facts]) -> list[dict[str, Any]]:
    """Return the rows of the goodput table: each bucket's time in all runs together."""
    known = [one.goodput for one in facts if one.goodput]
    elapsed = sum(goodput.elapsed_s for goodput in known)
    rows = []
    for bucket, meaning in BUCKETS.items():
        seconds = sum(goodput.seconds[bucket] for goodput in known)
        if seconds > 0:
            rows.append(
                {
                    "bucket": bucket,
                    "meaning": meaning,
                    "seconds": seconds,
                    "share": f"{seconds / elapsed:.1%}",
                    "took": rounded_duration(seconds),
                }
            )
    return rows


def _place_of(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _chart(name: str, facts: Sequence[_Facts]) -> dict[str, Any]:
    """Return the texts of a chart, including one for readers who cannot see it."""
    curves = [one.curves[name] for one in facts if name in one.curves]
    if len(curves) > 1:
        lasts = [curve.values[-1] for curve in curves]
        said = f"{len(curves)} runs; last values from {min(lasts):.4g} to {max(lasts):.4g}"
    else:
        (curve,) = curves
        low = min(range(len(curve.values)), key=curve.values.__getitem__)
        high = max(range(len(curve.values)), key=curve.values.__getitem__)
        said = (
            f"last {curve.values[-1]:.4g} at step {curve.steps[-1]}; "
            f"lowest {curve.values[low]:.4g} at step {curve.steps[low]}; "
            f"highest {curve.values[high]:.4g} at step {curve.steps[high]}"
        )
    return {"name": name, "said": said}


def _comparison(facts: Sequence[_Facts], names: Sequence[str], order: str) -> dict[str, Any]:
    """Return how the runs differ: the settings with different values, and the results."""
    settings = [settings_of(one.run) for one in facts]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    differing = [
        key for key in keys if key != "name" and len({one.get(key) for one in settings}) > 1
    ]
    shown = differing[:_MOST_SETTINGS]
    return {
        "settings": shown,
        "more": len(differing) - len(shown),
        "rows": [[one.get(key, "") for key in shown] for one in settings],
        "order": order,
        "states": sum_of([one.status for one in facts]).reason.partition(":")[0],
        "results": [name for name in names if name != "lr"][:4],
    }


def _axes(facts: Sequence[_Facts], comparison: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the axes of the parallel coordinates: the settings that differ, and the results."""
    if comparison is None or not comparison["settings"]:
        return []
    settings = [
        {"name": key, "values": [row[at] for row in comparison["rows"]]}
        for at, key in enumerate(comparison["settings"])
    ]
    results = [
        {
            "name": name,
            "values": [f"{one.last[name]:.7g}" if name in one.last else "" for one in facts],
        }
        for name in comparison["results"]
    ]
    return settings + results


def settings_of(run: "Run") -> dict[str, str]:
    """Return a run's settings: those of its sweep point, or the values of its job file."""
    if run.settings:
        return {key: str(value) for key, value in run.settings.items()}
    text = _text_of(run, "job.yaml")
    try:
        return dict(_flat(read_document(text, "job.yaml").data)) if text else {}
    except InputError:
        return {}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a job file by dotted key; for `args`, the value of each option."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif not isinstance(value, list | tuple):
        yield key, str(value)
    elif key != "args":
        yield key, " ".join(map(str, value))
    else:
        words = deque(str(word) for word in value)
        while words:
            word = words.popleft()
            if not word.startswith("-"):
                yield key, word
            elif "=" in word or not words or words[0].startswith("--"):
                name, _, content = word.partition("=")
                yield name, content or "on"
            else:
                yield word, words.popleft()


def _details(facts: _Facts) -> dict[str, Any]:
    """Return the sections of a one-run report below its header."""
    run = facts.run
    return {
        "command": _command(run),
        "log": list(_last_lines(run)),
        "attempts": list(_attempts(run)),
        "marks": _marks(facts, _MOST_STARTS),
        "failures": list(_failures(run, facts)),
        "stalls": list(_stalls(run)),
        "ranks": _ranks(facts),
        "origin": list(origin_lines(origin_of(run))),
        "files": [
            {"name": name, "text": text} for name in _written(run) if (text := _text_of(run, name))
        ],
    }


def _command(run: "Run") -> str:
    """Return the command that torchrun starts, with its arguments; "" without a job file."""
    text, point = _text_of(run, "job.yaml"), None
    if not text and run.settings and run.run_dir is not None:
        point = run.run_dir.name
        text = _read(run.run_dir.parent, "job.yaml")
    try:
        job = JobSpec.model_validate(read_document(text, "job.yaml").data)
    except (InputError, ValidationError):
        return ""
    own = next((one for one in (job.points if point else ()) if one.name == point), None)
    entry = [str(word) for word in (job.at(own) if own else job).entry]
    words = ["python", *entry] if entry[0] == "-m" else entry[entry[0] == "--no-python" :]
    variables = [f"{name}={value}" for name, value in (own.env if own else {}).items()]
    return secret_scan.conceal(mask_of(run.run_dir).hide(shlex.join([*variables, *words])))


def _last_lines(run: "Run") -> Iterator[str]:
    """Yield the last lines of the newest attempt's log, if this machine sees it."""
    if run.run_dir is None or not (numbers := attempt_numbers(run.run_dir)):
        return
    text = b""
    for span in attempt_spans(run.run_dir, numbers[-1])[:1]:
        with contextlib.suppress(OSError):
            text = end_of(span, _LOG_BYTES)
    lines = text.decode(errors="replace").splitlines()
    begun = lines[1:] if len(text) == _LOG_BYTES else lines  # the first one may be torn
    mask = mask_of(run.run_dir)
    shown = LogFilter(LogView()).shown(begun, ended=True)
    for line in deque(shown, maxlen=_LOG_LINES):
        yield untrusted.shortened(mask.hide(line), _LINE)


def _attempts(run: "Run") -> Iterator[dict[str, Any]]:
    """Yield the newest attempts, if this machine sees their folders."""
    if run.run_dir is None:
        return
    mask = mask_of(run.run_dir)
    for folder in attempt_folders(run.run_dir)[-_MOST_ATTEMPTS:]:
        nodes = " ".join(nodes_of(folder))
        yield {
            "number": folder.name.removeprefix("attempt-"),
            "nodes": nodes[:1000],
            "exit_status": run_directory.exit_status_of(folder),
            "reason": mask.hide(run_directory.reason_of(folder).text),
        }


def _failures(run: "Run", facts: _Facts) -> Iterator[str]:
    """Yield the first failure of each attempt, with its traceback."""
    numbers: list[int | None] = [None]
    if run.run_dir is not None and (folders := attempt_folders(run.run_dir)):
        numbers = [int(folder.name.removeprefix("attempt-")) for folder in folders]
    for number in numbers[-_MOST_ATTEMPTS:]:
        try:
            failure = run.failure(attempt=number)
        except LauncherError as error:
            facts.missing.append(f"the first failure is unknown: {error}")
            continue
        if failure is not None:
            yield "\n".join(list(failure.lines())[:_MOST_LINES])


def _stalls(run: "Run") -> Iterator[dict[str, str]]:
    """Yield the newest stalls, with the stacks of all ranks, if this machine sees them."""
    if run.run_dir is None:
        return
    mask = mask_of(run.run_dir)

    def shown(stall: Stall) -> dict[str, str]:
        ended = "; the rank was killed" if stall.kills else ""
        lines = itertools.islice(stall.stacks.lines(), _MOST_LINES)
        return {
            "said": mask.hide(f"attempt {stall.attempt}: {stall.why}{ended}"),
            "stacks": mask.hide("\n".join(line[:_LINE] for line in lines)),
        }

    yield from map(shown, stalls_of(run.run_dir, _MOST_STALLS))


def _ranks(facts: _Facts) -> dict[str, Any] | None:
    """Return the rank table: the share of time that each rank waits, and its own step."""
    records, goodput = facts.waits, facts.goodput
    if not records:
        return None
    means = mean_waits(records)
    made = goodput.steps + goodput.steps_again if goodput else 0
    step_s = 0.0
    if goodput and made:
        step_s = (goodput.seconds["productive"] + goodput.seconds["lost work"]) / made
    nodes = {rank: node for record in records for rank, node in record.nodes.items()}
    rows = [
        {
            "rank": rank,
            "node": nodes[rank],
            "share": f"{share:.1%}",
            "own": f"{(1 - share) * step_s:.3g} s" if step_s else "",
        }
        for rank, share in itertools.islice(means.items(), _MOST_RANKS)
    ]
    return {"rows": rows, "more": len(means) - len(rows), "drawn": min(len(means), _DRAWN_RANKS)}


def _rank_series(facts: _Facts) -> dict[str, Any]:
    """Return the chart data of the ranks that wait least."""
    every = max(len(facts.waits) // _MOST_POINTS, 1)
    records = sorted(facts.waits[::every], key=lambda record: record.time)
    shown = sorted(itertools.islice(mean_waits(facts.waits), _DRAWN_RANKS))
    return {
        "time": [round(record.time - facts.run.record.created, 2) for record in records],
        "series": [
            {"label": f"rank {rank}", "values": [record.waits.get(rank) for record in records]}
            for rank in shown
        ],
    }


def _written(run: "Run") -> list[str]:
    """Return the names of the job file and the rendered script."""
    if run.run_dir is None:
        return []
    names = [entry.name for entry in untrusted.entries(run.run_dir)]
    scripts = [name for name in names if name == "run.sh" or name.endswith(".sbatch")]
    return [*(name for name in names if name == "job.yaml"), *scripts]


def _text_of(run: "Run", name: str) -> str:
    """Return a file of the run directory, without secrets; "" if there is none."""
    return _read(run.run_dir, name) if run.run_dir else ""


def _read(folder: Path, name: str) -> str:
    try:
        text = untrusted.read_text(folder / name, limit=_FILE_BYTES, below=folder)
    except OSError:
        return ""
    return secret_scan.conceal(mask_of(folder).hide(text))


def _labels(facts: Sequence[_Facts], comparison: Mapping[str, Any] | None) -> list[str]:
    """Return the runs' curve labels: the differing settings, if few and distinct; else names."""
    names = [one.run.name.rpartition("/")[2] for one in facts]
    if comparison is None or not 0 < len(comparison["settings"]) <= _MOST_IN_LABEL:
        return names
    keys = [key.lstrip("-") for key in comparison["settings"]]
    labels = [
        " ".join(f"{key}={value}" for key, value in zip(keys, row, strict=True))
        for row in comparison["rows"]
    ]
    return labels if len({*labels}) == len(labels) else names


def _data(
    facts: Sequence[_Facts],
    names: Sequence[str],
    most_starts: int,
    comparison: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the chart data of the page."""
    count = sum(len(one.curves) for one in facts)
    most = min(max(_POINTS // max(count, 1), _FEWEST_POINTS), _MOST_POINTS)
    return {
        "ranks": _rank_series(facts[0]) if len(facts) == 1 else None,
        "runs": [
            {
                "name": label,
                "curves": {
                    name: _points(one.curves[name].thinned(most), one.run.record.created)
                    for name in names
                    if name in one.curves
                },
                "starts": _marks(one, most_starts),
            }
            for one, label in zip(facts, _labels(facts, comparison), strict=True)
        ],
    }


def _marks(facts: _Facts, most: int) -> list[dict[str, Any]]:
    """Return the newest starts after the first one, each with the interruption before it."""
    restarts = sorted(facts.restarts, key=lambda one: one.time)
    ends = [one.time for one in restarts]
    marks, before = [], 0
    for start in facts.starts[-most:]:
        until = bisect_right(ends, start.time)
        number = f", restart {start.restart}" if start.restart else ""
        why = in_words(restarts[before:until]) if before < until else "the ranks started again"
        marks.append(
            {
                "step": start.step,
                "time": round(start.time - facts.run.record.created, 2),
                "said": f"attempt {start.attempt}{number}, from step {start.step}: {why}",
            }
        )
        before = max(until, before)
    return marks


def _points(curve: Curve, created: float) -> dict[str, list[float]]:
    """Return a curve as the page draws it; times in seconds since the submission."""
    return {
        "step": list(curve.steps),
        "time": [round(when - created, 2) for when in curve.times],
        "value": [float(f"{value:.7g}") for value in curve.values],
    }


def _script_json(data: Mapping[str, Any]) -> str:
    """Return JSON for a script element: nothing in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
