"""The first failed rank of a run, and the cause.

The evidence: a rank with a main function wrapped by `@record`, as in `train/`, leaves an error
file; other ranks leave a traceback in their stderr; torchrun's final report lists the failed ranks,
with their signals. `judge` weighs it, as for the supervisor. On Slurm and on this machine the
evidence is in the attempt's folder; for pods, `toolkit/kubernetes/failure.py` reads it from their
logs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from toolkit.runs.evidence.rank_folders import RankStart, reports_of, starts_of
from toolkit.runs.records import run_directory
from toolkit.runs.records.log_reader import attempt_folders
from toolkit.supervisor.evidence.rank_end import RankEnd, in_words, judge, kind_of, order
from toolkit.supervisor.evidence.torchrun_report import Reported
from toolkit.supervisor.evidence.traceback import Trace, last_trace
from toolkit.text import untrusted
from toolkit.text.secret_scan import Mask

_MOST_EARLIER = 50
"""Limit of failures of earlier starts that are shown, the newest ones."""

_UNREPORTED_S = 120.0
"""An unreported rank may have failed up to this many seconds before the reported failures."""

_WELL = ("done", "cancelled", "preempted", "requeued", "walltime", "fenced", "terminated")
"""Statuses of the retry policy for attempts that ended without a failure."""

_STOPPED = ("cancelled", "preempted", "requeued", "terminated", "walltime")
"""Statuses of attempts stopped by a signal; a rank may have failed to write its checkpoint."""

_TOLD = "stopped by "
"""The beginning of the error that `train` reports to torchrun after a stop signal."""

_NOT_BEGUN = ("gave_up", "no_progress")
"""Statuses of attempts that may have ended before starting anything."""

# ---- The failure of a run


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of the rank that failed first."""

    kind: str
    """`exception`; `signal`: the rank was killed; `exit`: it exited with a status, without a
    traceback; `echo`: it only reports the loss of another rank, so the cause is unknown."""

    rank: int | None = None
    """The global rank, if known."""

    local_rank: int | None = None
    """The local rank on its node, if known."""

    node: str
    """The node's name; `node-1` on this machine; the pod's short name on Kubernetes."""

    attempt: int
    """The attempt of the run."""

    restart: int = 0
    """The number of earlier restarts by its torchrun within the attempt."""

    time: float
    """When, in seconds since 1970."""

    message: str
    """The exception with its message, or the rank's signal or exit status."""

    traceback: tuple[str, ...] = ()
    """The lines of its traceback; without one, the last lines of its stderr."""

    earlier: "tuple[Failure, ...]" = ()
    """The first failure of each earlier start, after which torchrun restarted all ranks."""

    def __str__(self) -> str:
        return in_words(self.kind, self.rank, self.local_rank, self.node, self.message)

    def lines(self) -> Iterator[str]:
        """Yield the text for users; the traceback comes last."""
        if (more := len(self.earlier) - _MOST_EARLIER) > 0:
            yield f"{more} earlier failures are not shown"
        for before in self.earlier[-_MOST_EARLIER:]:
            yield f"earlier failure, in {before._when(counted=True)}: {before}"
        when = self._when(counted=bool(self.restart or self.earlier))
        yield headline(self, when=f", in {when}")
        yield from self.traceback

    def _when(self, *, counted: bool) -> str:
        again = f", restart {self.restart}" if counted else ""
        return f"attempt {self.attempt}{again}, {datetime.fromtimestamp(self.time):%H:%M:%S}"

    def redacted(self, mask: Mask) -> "Failure":
        """Return the failure with `***NAME***` instead of every secret."""
        return replace(
            self,
            message=mask.hide(self.message),
            traceback=tuple(mask.hide(line) for line in self.traceback),
            earlier=tuple(before.redacted(mask) for before in self.earlier),
        )


def headline(failure: object, *, when: str = "") -> str:
    """Return the line that opens every report of a first failure.

    `status` and sweeps print `first failure: …`; `logs` and the end of a run add `when`, such as
    `, in attempt 0, 14:05:09`.
    """
    return f"first failure{when}: {failure}"


def first_failure(run_dir: Path, number: int | None = None) -> Failure | None:
    """Return an attempt's first failure; None if no rank failed, or the cause is unknown.

    If the attempt has several starts of the ranks, the last one counts. Ranks that have only lost
    another rank often notice the loss before that rank's torchrun does, so they come last. The
    default is the newest attempt. In a stopped attempt, only an exception that a rank has raised
    itself is a failure.
    """
    attempt = _newest(run_dir) if number is None else run_dir / "logs" / f"attempt-{number}"
    if attempt is None or run_directory.exit_status_of(attempt) == 0:
        return None
    ended_well = _ended_well(run_dir, attempt)
    if ended_well and run_directory.reason_of(attempt).word not in _STOPPED:
        return None
    starts = starts_of(attempt)
    reports = reports_of(run_dir, attempt, starts)
    bases = {start.key: reported.rank - reported.local_rank for start, reported in reports.items()}
    last = dict.fromkeys([*(start for start in starts if start.last), *reports])
    failures = [f for start in last if (f := _judged(attempt, start, bases, reports.get(start)))]
    if (attempt / "exit_status").exists() and all(one.kind == "echo" for one in failures):
        since = min((one.time for one in failures), default=0.0) - _UNREPORTED_S
        silent = [_unreported(attempt, start, bases) for start in last if start.key not in bases]
        failures += [one for one in silent if one and one.time >= since]
    if ended_well:
        own = [one for one in failures if one.kind == "exception"]
        failures = [one for one in own if not one.message.startswith(_TOLD)]
    first = first_of(failures)
    if first is None:
        return None
    earlier = earlier_failures(attempt, starts, bases)
    return replace(first, earlier=tuple(earlier[number] for number in sorted(earlier)))


def earlier_failures(
    attempt: Path, starts: Iterable[RankStart], bases: Mapping[str, int]
) -> dict[int, Failure]:
    """Return the first failure of each start after which torchrun has restarted the ranks.

    The keys are restart counts. `bases` has the first rank of each node, by the node's key, if
    known.
    """
    before: defaultdict[int, list[RankStart]] = defaultdict(list)
    for start in starts:
        if not start.last:
            before[start.restart].append(start)
    found: dict[int, Failure] = {}
    for restart, ranks in before.items():
        judged = [_judged(attempt, s, bases) or _unreported(attempt, s, bases) for s in ranks]
        if first := first_of(filter(None, judged)):
            found[restart] = first
    return found


def first_of(failures: Iterable[Failure]) -> Failure | None:
    """Return the first failure."""
    return min(failures, key=lambda one: order(one.kind, one.time), default=None)


def _newest(run_dir: Path) -> Path | None:
    """Return the newest attempt that has started torchrun."""
    for attempt in reversed(attempt_folders(run_dir)):
        if any(e.is_folder and e.name.startswith("node-") for e in untrusted.entries(attempt)):
            return attempt
        if run_directory.reason_of(attempt).word not in _NOT_BEGUN:
            return None
    return None


def _ended_well(run_dir: Path, attempt: Path) -> bool:
    content, word = run_directory.outcome(run_dir) or {}, run_directory.reason_of(attempt).word
    status = content.get("status") if attempt.name == f"attempt-{content.get('attempt')}" else ""
    if status == "fatal" and word in run_directory.STOP_WORDS:
        return False  # the attempt failed while it was being stopped
    stopped = not word and (status == "preempted" or run_directory.cancel_requested(run_dir))
    return run_directory.exit_status_of(attempt) == 0 or word in _WELL or stopped


def _judged(
    attempt: Path, start: RankStart, bases: Mapping[str, int], reported: Reported | None = None
) -> Failure | None:
    """Return the failure of a rank by its files and torchrun's report."""
    error, stderr = start.error(), start.stderr()
    verdict = judge(
        reported.exitcode if reported else None,
        error=error and error[:2],
        stderr=stderr,
        out_of_memory=(attempt / f"oom-{start.key}").exists(),
    )
    if verdict is None:
        return None
    time = reported.time if reported else 0.0
    if error:
        time = error[2]
    elif verdict.source == "traceback":
        time = start.silent_since()
    failure = _failure(attempt, start, bases, last_trace(stderr), verdict, time)
    return replace(failure, rank=reported.rank) if reported else failure


def _unreported(attempt: Path, start: RankStart, bases: Mapping[str, int]) -> Failure | None:
    """Return a rank's failure from the end of its stderr, if its torchrun was killed as well."""
    trace = last_trace(start.stderr())
    if trace is None or not trace.at_end or kind_of(trace.message) == "echo":
        return None
    verdict = RankEnd("exception", trace.message, trace.lines, "traceback")
    return _failure(attempt, start, bases, trace, verdict, start.silent_since())


def _failure(
    attempt: Path,
    start: RankStart,
    bases: Mapping[str, int],
    trace: Trace | None,
    verdict: RankEnd,
    time: float,
) -> Failure:
    rank = trace.rank if trace else None
    if rank is None and start.key in bases:
        rank = bases[start.key] + start.local_rank
    return Failure(
        kind=verdict.kind,
        rank=rank,
        local_rank=start.local_rank,
        node=start.node,
        attempt=int(attempt.name.split("-")[1]),
        restart=start.restart,
        time=time,
        message=verdict.message,
        traceback=verdict.traceback,
    )
