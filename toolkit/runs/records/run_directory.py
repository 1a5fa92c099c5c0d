"""The run directory as the launchers write and read it; see docs/reference/run-directory.md.

Files that a training script does not write (outcome, metrics) are missing from the report.
"""

import contextlib
import importlib.util
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import LauncherError, NewerFormat
from toolkit.job.spec import JobSpec
from toolkit.runs.records.log_reader import (
    Span,
    attempt_folders,
    attempt_numbers,
    last_objects,
    modified_at,
)
from toolkit.runs.records.record_version import require_known
from toolkit.runs.state import RunState, RunStatus
from toolkit.supervisor.policy import sentence
from toolkit.text import untrusted
from toolkit.text.yaml_reader import write_document

_CANCEL = "cancel_requested"

_NOT_OTHERS = 0o755
"""The maximum folder mode: only the owner can write."""

_OUTCOME_BYTES = 1 << 20
_REASON = 4000
"""Character limit of a displayed reason."""

_REASON_BYTES, _STATUS_BYTES = 1 << 16, 16
_LAST_BYTES = 1 << 16
"""How much of a file's end is read; it contains the newest figures."""

_METRICS_BYTES, _LINE_BYTES = 1 << 30, 1 << 16
"""Read limit of the metrics (millions of steps), and byte limit of a record."""

_MOST_FIGURES, _FIGURE = 40, 40
"""Limit of displayed figures per step, and character limit of a name or value."""

PLACE = frozenset(
    {"version", "time", "attempt", "restart", "step", "steps", "count", "epoch", "samples_seen"}
)
"""The keys of a `metrics.jsonl` record that are not metrics."""


_OUTCOMES = {
    "done": RunState.SUCCEEDED,
    "fatal": RunState.FAILED,
    "preempted": RunState.PREEMPTED,
    "retryable": RunState.FAILED,
    "running": RunState.FAILED,  # it ended before it could record how
}

_WORDS = {
    "cancelled": RunState.CANCELLED,
    "fatal": RunState.FAILED,  # a start that it stopped may have recorded preempted
    "gave_up": RunState.FAILED,
    "no_progress": RunState.FAILED,
    "retryable": RunState.FAILED,  # a failure on another node stops ranks as a preemption does
    "terminated": RunState.CANCELLED,  # no attempt has followed, unlike after a preemption
}
"""States by the first word of an attempt's reason, which overrides the outcome."""

STOP_WORDS = ("cancelled", "terminated", "walltime")
"""First words for a signal sent to the script; the ranks may have failed nevertheless."""

_OVER = ("done", "fatal", "cancelled", "no_progress", "gave_up")
"""First words after which the next job of a chain ends immediately, as in train.sbatch.j2."""


def make(parent: Path, name: str) -> Path:
    """Create a new run directory with its `logs/` and return its absolute path.

    Only the owner can write there, whatever the umask: its files decide which commands run.

    Raises:
        LauncherError: it exists, or cannot be created.
    """
    run_dir = parent.absolute() / name
    try:
        for above in reversed(run_dir.parents):
            above.mkdir(_NOT_OTHERS, exist_ok=True)
        run_dir.mkdir(_NOT_OTHERS)
        (run_dir / "logs").mkdir(_NOT_OTHERS)
    except FileExistsError:
        raise LauncherError(f"{run_dir} exists already; it holds another run") from None
    except OSError as error:
        raise LauncherError(f"{run_dir} cannot be made: {error.strerror}") from error
    return run_dir


def write_inputs(
    run_dir: Path,
    job: JobSpec,
    *,
    script: str,
    file_name: str,
    files: Mapping[str, bytes] = {},
) -> None:
    """Write the resolved job file and the rendered script.

    `files` are further files for the job, by path below the run directory.

    Raises:
        LauncherError: they cannot be written.
    """
    resolved = write_document(job.as_written())
    try:
        untrusted.write_bytes(run_dir / "job.yaml", resolved.encode())
        untrusted.write_bytes(run_dir / file_name, script.encode())
        for name, content in files.items():
            for folder in reversed(Path(name).parents):
                (run_dir / folder).mkdir(_NOT_OTHERS, exist_ok=True)
            untrusted.write_bytes(run_dir / name, content)
    except OSError as error:
        raise LauncherError(f"{run_dir} cannot be written: {error.strerror}") from error


def require_own(path: Path) -> None:
    """Make sure that only this user can have written a file or folder that affects execution.

    Raises:
        LauncherError: it is missing, is a link, belongs to another user, or is writable by others.
    """
    try:
        info = path.lstat()
    except OSError as error:
        raise LauncherError(f"{path} cannot be read: {error.strerror}") from error
    if stat.S_ISLNK(info.st_mode):
        raise LauncherError(f"{path} is a symbolic link, which may lead anywhere; it is not used")
    if info.st_uid != os.getuid():
        raise LauncherError(
            f"{path} belongs to the user with the id {info.st_uid}, who would decide what runs in "
            "your name; submit the job yourself"
        )
    if info.st_mode & 0o022:
        raise LauncherError(
            f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):o}), who would "
            f"decide what runs in your name; look at it, then `chmod go-w {path}`"
        )


def outcome(run_dir: Path) -> Mapping[str, Any] | None:
    """Return the outcome written by the training, or None without one of a known version."""
    with contextlib.suppress(NewerFormat):
        return _known_outcome(run_dir)
    return None


def _known_outcome(run_dir: Path) -> Mapping[str, Any] | None:
    """Return the outcome, or None without one.

    Raises:
        NewerFormat: it has an unknown version.
    """
    try:
        content = untrusted.read_json(f"{run_dir}/outcome.json", limit=_OUTCOME_BYTES)
    except (OSError, ValueError):
        return None
    return require_known(content, "outcome.json") if isinstance(content, dict) else None


def request_cancel(run_dir: Path) -> None:
    """Write a marker file that distinguishes a cancelled run from a failed one."""
    with contextlib.suppress(OSError):  # a full disk must not keep a run alive
        untrusted.write_bytes(run_dir / _CANCEL, b"")
        os.utime(run_dir / _CANCEL, follow_symlinks=False)  # it may exist from an earlier call


def withdraw_cancel(run_dir: Path) -> None:
    """Remove the marker file, because the run will continue."""
    with contextlib.suppress(OSError):
        (run_dir / _CANCEL).unlink(missing_ok=True)


def cancel_requested(run_dir: Path) -> bool:
    """Whether a user has cancelled the run."""
    return os.path.exists(f"{run_dir}/{_CANCEL}")  # noqa: PTH110  # called for each of many runs


def ended_status(run_dir: Path) -> RunStatus:
    """Return the status of an ended run, from the files in its run directory.

    An outcome of a newer version is ignored, and the reason states the version.
    """
    try:
        return _status_by(_known_outcome(run_dir) or {}, run_dir)
    except NewerFormat as error:
        status = _status_by({}, run_dir)
        shown = "" if status.state is RunState.UNKNOWN else status.reason
        return replace(status, reason="; ".join(filter(None, [shown, str(error)])))


def _status_by(content: Mapping[str, Any], run_dir: Path) -> RunStatus:
    attempt = untrusted.whole(content.get("attempt"))
    if content.get("status") == "done" and attempt is not None:
        # The case of most runs in a long list: two lookups by name, without listing a folder.
        own, later = (f"{run_dir}/logs/attempt-{number}" for number in (attempt, attempt + 1))
        if os.path.exists(own) and not os.path.exists(later):  # noqa: PTH110
            return RunStatus(state=RunState.SUCCEEDED)
    numbers = attempt_numbers(run_dir)
    if numbers and content.get("attempt") != numbers[-1]:
        content = {}  # from an earlier attempt; the newest one has no outcome
    state = _OUTCOMES.get(str(content.get("status")))
    if state is RunState.SUCCEEDED:
        return RunStatus(state=state)
    reason, word = untrusted.shortened(str(content.get("reason") or ""), _REASON), ""
    if state is None:
        state, reason = _exit_status(run_dir)
        if state is RunState.UNKNOWN and not cancel_requested(run_dir):
            return RunStatus(state=state, reason=reason, lost=True)
    elif content.get("status") == "running":
        reason = f"killed at step {untrusted.whole(content.get('step'))} or later; see the logs"
    if state is not RunState.SUCCEEDED and numbers:
        written = reason_of(run_dir / f"logs/attempt-{numbers[-1]}")
        if content.get("status") != "fatal" or written.word not in STOP_WORDS:
            state, reason = _WORDS.get(written.word, state), written.text or reason
            word = written.word
    if state is RunState.SUCCEEDED:
        return RunStatus(state=state)
    if cancel_requested(run_dir):
        if state is RunState.UNKNOWN:
            reason = "cancelled" if numbers else "before it began"
        state = RunState.CANCELLED
    return RunStatus(state=state, reason=reason, word=word)


def changed_at(run_dir: Path) -> float:
    """Return the time of the newest recorded start, end or cancellation."""
    places = [run_dir / name for name in ("logs", "jobs.jsonl", "outcome.json", _CANCEL)]
    return max(map(modified_at, [*places, *attempt_folders(run_dir)[-1:]]))


def has_attempts(run_dir: Path) -> bool:
    """Whether the run has ever started."""
    return bool(attempt_numbers(run_dir))


def is_over(run_dir: Path) -> bool:
    """Whether the newest attempt has ended the run, even if jobs of a chain are still pending."""
    return newest_reason(run_dir).word in _OVER


class Reason(NamedTuple):
    """Why an attempt ended, as written by the retry policy."""

    word: str
    """The policy's status, such as `fatal`."""

    text: str
    """The sentence for users: how the attempt ended, why, and what happens next."""


def reason_of(attempt: Path) -> Reason:
    """Return the reason in an attempt's folder; empty texts without one."""
    try:
        path = attempt / "reason"
        text = untrusted.read_text(path, limit=_REASON_BYTES, below=attempt.parents[1]).strip()
    except OSError:
        text = ""
    return Reason(text.partition(":")[0], untrusted.shortened(sentence(text), _REASON))


def newest_reason(run_dir: Path) -> Reason:
    """Return the newest attempt's reason; empty texts if it has none."""
    attempts = attempt_folders(run_dir)
    return reason_of(attempts[-1]) if attempts else Reason("", "")


def last_reason(run_dir: Path) -> str:
    """Return the newest attempt's reason and decision, or "" without one."""
    texts = (reason_of(attempt).text for attempt in reversed(attempt_folders(run_dir)))
    return next(filter(None, texts), "")


def ended_silently(run_dir: Path) -> bool:
    """Whether the newest attempt left neither a reason nor an exit status."""
    attempts = attempt_folders(run_dir)
    return (
        bool(attempts) and not reason_of(attempts[-1]).text and exit_status_of(attempts[-1]) is None
    )


def reason_did_not_fit(run_dir: Path) -> bool:
    """Whether the newest attempt's reason is empty because the disk was full."""
    attempts = attempt_folders(run_dir)
    with contextlib.suppress(OSError):
        return bool(attempts) and os.lstat(attempts[-1] / "reason").st_size == 0
    return False


def exit_status_of(attempt: Path) -> int | None:
    """Return the exit status of an attempt; None until it is written."""
    with contextlib.suppress(OSError, ValueError):
        path = attempt / "exit_status"
        return int(untrusted.read_text(path, limit=_STATUS_BYTES, below=attempt.parents[1]))
    return None


def _exit_status(run_dir: Path) -> tuple[RunState, str]:
    """Return state and reason by the newest attempt's exit status, without an outcome."""
    attempts = attempt_folders(run_dir)
    status = exit_status_of(attempts[-1]) if attempts else None
    if status is None:
        full = ""
        with contextlib.suppress(OSError):
            full = ": No space left on device" if os.statvfs(run_dir).f_bavail == 0 else ""
        return RunState.UNKNOWN, f"the run left no outcome and no exit status{full}"
    if status == 0:
        return RunState.SUCCEEDED, ""
    return RunState.FAILED, f"exit status {status}; see {attempts[-1]}"


# ---- Metrics: one row per step


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return one row per step, in the order of the steps; empty without records.

    Training and evaluation records of a step form one row. Steps repeated after a failure count
    once: a new start invalidates earlier records from its first step on.

    Raises:
        NewerFormat: a record has an unknown version.
    """
    rows: list[dict[str, Any]] = []
    for record in recorded_metrics(run_dir):
        while record.opens_start and rows and rows[-1]["step"] >= record.voids_from:
            rows.pop()
        if not rows or rows[-1]["step"] != record.step:
            rows.append({})
        rows[-1] |= record.figures
    return rows


class MetricRecord(NamedTuple):
    """One record of `metrics.jsonl`."""

    step: int
    attempt: int
    restart: int
    opens_start: bool
    """Whether it is the first record of a rank start."""
    values: Mapping[str, Any]
    """The whole record."""
    voids_from: int
    """The first step whose earlier records a new start invalidates: the record's own step, or the
    next one if the start first evaluates the step from which it continues."""

    @property
    def figures(self) -> dict[str, Any]:
        """The record as a row of a table; rows share the names of columns."""
        return {sys.intern(key): value for key, value in self.values.items() if key != "version"}


def recorded_metrics(run_dir: Path) -> Iterator[MetricRecord]:
    """Yield the records of a run; lines may be truncated by a kill, or incomplete.

    Raises:
        NewerFormat: a record has an unknown version.
    """
    path = run_dir / "metrics.jsonl"
    return metric_records(untrusted.stream_json(path, limit=_METRICS_BYTES, line_limit=_LINE_BYTES))


def metric_records(lines: Iterable[object]) -> Iterator[MetricRecord]:
    """Yield the records of `metrics.jsonl`."""
    return filter(None, map(MetricReader().read, lines))


class MetricReader:
    """Reads the records of `metrics.jsonl` in order, and detects each start of the ranks.

    Attempt and restart do not identify a start: torchrun counts no restart when its members
    change, and rank 0 may then be on a node where torchrun has a lower restart count. A start
    begins when these numbers differ from those of the previous record, or when a step is repeated.
    Records of an attempt after those of a newer attempt are left out.
    """

    def __init__(self) -> None:
        self._newest, self._last = (-1, -1), -1
        self._recorded: set[str] = set()  # of the last step

    def read(self, line: object) -> MetricRecord | None:
        """Return the record in a line's JSON; None if it has no valid record.

        Raises:
            NewerFormat: it has an unknown version.
        """
        values = require_known(untrusted.mapping(line), "metrics.jsonl")
        step = untrusted.whole(values.get("step"))
        attempt, restart = (untrusted.whole(values.get(k)) or 0 for k in ("attempt", "restart"))
        if step is None or attempt < self._newest[0]:
            return None
        keys = values.keys() - PLACE
        again = step < self._last or (step == self._last and not self._recorded.isdisjoint(keys))
        opens = (attempt, restart) != self._newest or again
        adds = step == self._last and self._recorded.isdisjoint(keys)
        if adds:
            self._recorded |= keys
        else:
            self._recorded = set(keys)
        self._newest, self._last = (attempt, restart), step
        return MetricRecord(step, attempt, restart, opens, values, step + adds)


def last_metrics(run_dir: Path) -> Mapping[str, Any] | None:
    """Return the newest whole record of `metrics.jsonl`, or None.

    Raises:
        NewerFormat: it has an unknown version.
    """
    row = next(last_objects(Span(path=run_dir / "metrics.jsonl"), _LAST_BYTES), None)
    return None if row is None else require_known(row, "metrics.jsonl")


def last_figures(run_dir: Path | None) -> str:
    """Return the newest figures as one line, or why they cannot be read."""
    try:
        return figures(last_metrics(run_dir) or {}) if run_dir else ""
    except NewerFormat as error:
        return str(error)


def table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame if pandas is installed, else unchanged."""
    if importlib.util.find_spec("pandas") is None:
        return list(rows)
    import pandas

    return pandas.DataFrame(list(rows))


def figures(metrics: Mapping[str, Any]) -> str:
    """Return the figures of a step as one line; a very long list is cut."""
    hidden = ("version", "time", "attempt", "restart")
    named = [(key, value) for key, value in metrics.items() if key not in hidden]
    shown = [
        f"{untrusted.shortened(key, _FIGURE)} "
        + (f"{value:.4g}" if isinstance(value, float) else untrusted.shortened(str(value), _FIGURE))
        for key, value in named[:_MOST_FIGURES]
    ]
    return ", ".join(shown + ["…"] * (len(named) > _MOST_FIGURES))
