"""The interface of all launchers: Launcher and Run; and runs that are shown but never acted on."""

import abc
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

from toolkit.errors import InputError, LauncherError, RunLost, RunNotFound
from toolkit.planning import LaunchPlan
from toolkit.runs.records import run_directory
from toolkit.runs.records.log_reader import LogView, read_run, spans_of
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.records.run_secrets import mask_of, redacted
from toolkit.runs.state import RunState, RunStatus, sum_of
from toolkit.text.quantities import whole_number

if TYPE_CHECKING:
    from toolkit.runs.evidence.failure import Failure
    from toolkit.runs.evidence.restarts import Restart
    from toolkit.runs.evidence.stacks import Exchange, Stacks
    from toolkit.runs.records.scheduler_times import Scheduled
    from toolkit.runs.views.goodput import Goodput
    from toolkit.runs.views.report import Report

_NAME_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # without characters that are easily confused

PlanT = TypeVar("PlanT", bound=LaunchPlan)


class Run(abc.ABC):
    """A submitted run; a handle that another process can reopen from `uri`."""

    settings: Mapping[str, str | bool] = MappingProxyType({})
    """The settings of a sweep point, by the keys of the sweep."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    @property
    def uri(self) -> str:
        """`slurm://CLUSTER/JOB_ID`, `k8s://NAMESPACE/NAME` or `local://NAME`."""
        return self.record.uri

    @property
    def name(self) -> str:
        """The name of this run."""
        return self.record.name

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None if this machine cannot see it."""
        return self.record.run_dir

    def live_dir(self) -> Path | None:
        """Return a folder with the newest records of a running run; None if they are unavailable.

        It is the run directory, or on Kubernetes the ends of some of its files.
        """
        return self.run_dir

    def lost_output(self) -> str:
        """Describe the output that `logs` can no longer show; empty if none is known to be lost."""
        return ""

    @property
    def points(self) -> "Sequence[Run]":
        """The points of a sweep, each a separate run; empty if the run is not a sweep."""
        return ()

    @property
    def parts(self) -> "Sequence[Self]":
        """The runs with separate states: the points of a sweep, or the run itself."""
        return cast("Sequence[Self]", self.points) or (self,)

    def point(self, key: str) -> "Run":
        """Return a point by its number or its name.

        Raises:
            RunNotFound: the point does not exist.
        """
        if not self.points:
            raise RunNotFound(f"no point {key!r}: {self.uri} is not a sweep")
        names = [point.name.rpartition("/")[2] for point in self.points]
        if key in names:
            return self.points[names.index(key)]
        if (number := whole_number(key)) is not None and number < len(names):
            return self.points[number]
        raise RunNotFound(
            f"{self.uri} has no point {key!r}; it has 0 to {len(names) - 1}, as in "
            f"{self.uri}_0 or {self.name}/{names[0]}"
        )

    def sum_of(self, point_statuses: Sequence[RunStatus]) -> RunStatus:
        """Return a sweep's status from those of its points; for another run, its only status."""
        return sum_of(point_statuses) if self.points else point_statuses[0]

    def statuses(self) -> list[RunStatus]:
        """Return the statuses of all points, with one query if possible."""
        return [point.status() for point in self.points]

    @abc.abstractmethod
    def status(self) -> RunStatus:
        """Return the status of the run."""

    @property
    def batch_key(self) -> Hashable:
        """Batch key: runs with equal keys are queried in one request."""
        return type(self)

    def statuses_of(self, runs: "Sequence[Run]") -> list[RunStatus]:
        """Return the statuses of runs with this batch key, UNKNOWN if the query fails."""
        statuses = []
        for run in runs:
            try:
                statuses.append(run.status())
            except LauncherError as error:
                statuses.append(RunStatus(state=RunState.UNKNOWN, reason=str(error)))
        return statuses

    def watching(
        self, runs: "Sequence[Run]", *, explained: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Watch runs of this batch while a caller waits, if watching is cheaper than polling.

        `explained`: whether the caller shows what each run waits for.
        """
        return contextlib.nullcontext()

    def _pause(self, pause_s: float) -> None:
        """Pause between two queries; the pause is shorter if a change is noticed."""
        time.sleep(pause_s)

    def logs(
        self,
        *,
        follow: bool = False,
        ranks: Collection[int] = (),
        attempt: int | None = None,
        grep: str | None = None,
        on_status: Callable[[RunStatus], object] = lambda _: None,
    ) -> Iterator[str]:
        """Yield the output lines of the run, from all nodes and ranks; secrets are masked.

        Args:
            follow: Whether to continue until the run has ended, including its requeues.
            ranks: The ranks to show; empty for all lines.
            attempt: The attempt to show; None for all.
            grep: A regular expression to search for in each line; only matching lines are shown.
            on_status: Called with the status after each poll of a follower.

        Raises:
            InputError: the attempt does not exist, or `grep` is not a regular expression.
            LauncherError: the log cannot be read from here, or cannot be filtered by rank.
        """
        try:
            pattern = re.compile(grep) if grep is not None else None
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(f"no regular expression: {error}", place=f"--grep {grep}") from None
        view = LogView(follow=follow, ranks=frozenset(ranks), attempt=attempt)
        lines = self._redacted(self._lines(view, on_status))
        return lines if pattern is None else (line for line in lines if pattern.search(line))

    @abc.abstractmethod
    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield the lines of the view's attempt and ranks, without torchrun's stop traces."""

    def _redacted(self, lines: Iterator[str]) -> Iterator[str]:
        return redacted(lines, self.run_dir)

    def failure(self, *, attempt: int | None = None) -> "Failure | None":
        """Return an attempt's first failure; None if no rank failed, or the cause is unknown.

        It is read from the run directory; no scheduler is queried. The default is the newest
        attempt.
        """
        from toolkit.runs.evidence.failure import first_failure

        if self.run_dir is None:
            return None
        failure = first_failure(self.run_dir, attempt)
        return failure and failure.redacted(mask_of(self.run_dir))

    def restarts(self) -> "Sequence[Restart]":
        """Return the interruptions of the run, oldest first, even if it has succeeded.

        The result is empty if this machine does not see the run directory, and for a sweep: its
        points have restarts.
        """
        from toolkit.runs.evidence.restarts import restarts_in

        if self.run_dir is None or self.points:
            return ()
        return restarts_in(self.run_dir, mask_of(self.run_dir))

    def count_restarts(self) -> int:
        """Return the number of restarts, at less cost; with very many nodes, a lower bound."""
        from toolkit.runs.evidence.restarts import count_restarts

        return count_restarts(self.run_dir) if self.run_dir and not self.points else 0

    def stacks(self) -> "Stacks":
        """Return the position of each rank: its stacks, and the last collectives it has begun.

        Raises:
            LauncherError: the run has no watchdog, none has answered, or this is a sweep.
        """
        from toolkit.runs.evidence.stacks import ask_watchdogs

        if self.points:
            raise LauncherError(f"{self.uri} is a sweep; ask for a point, such as {self.uri}_0")
        exchange, status = self._exchange(), self.status()
        if status.state is not RunState.RUNNING:
            reason = f" ({status.reason})" if status.reason else ""
            raise LauncherError(
                f"{self.uri} is {status.state.upper()}{reason}; only a running run has stacks"
            )
        return ask_watchdogs(exchange)

    def _exchange(self) -> "Exchange":
        """Return the channel to the watchdogs on the nodes."""
        from toolkit.runs.evidence.stacks import FolderExchange

        if self.run_dir is None:
            raise LauncherError(f"{self.uri}: its run directory cannot be seen from here")
        return FolderExchange(self.run_dir)

    @abc.abstractmethod
    def cancel(self) -> None:
        """Request that the run stops with a checkpoint; does nothing if it has ended."""

    @property
    def state(self) -> RunState:
        """The current state of the run; the reason is in `status()`."""
        return self.status().state

    def metrics(self) -> Any:
        """Return the run's metrics, one row per step; for a sweep, those of all points.

        The result is a pandas DataFrame if pandas is installed, else a list of mappings. The
        columns are those of `metrics.jsonl` (docs/reference/run-directory.md); for a sweep, `point`
        and the settings of each point come first.

        Raises:
            LauncherError: this machine cannot see the run directory.
        """
        rows = self._measured() if not self.points else []
        for point in self.points:
            name = {"point": point.name.rpartition("/")[2]}
            rows += [{**name, **point.settings, **row} for row in point._measured()]
        return run_directory.table(rows)

    def _measured(self) -> list[dict[str, Any]]:
        """Return the metrics of a run other than a sweep."""
        with self.recorded("metrics.jsonl") as folder:
            return run_directory.read_metrics(folder)

    @contextlib.contextmanager
    def recorded(self, *names: str) -> Iterator[Path]:
        """Provide a folder with these files of the run directory, if they exist."""
        if self.run_dir is None:
            raise LauncherError(f"{self.uri}: its run directory cannot be seen from here")
        if not self.run_dir.is_dir() and (status := self.status()).lost:
            raise RunLost(f"{self.uri}: {status.reason}")
        yield self.run_dir

    def goodput(self) -> "Goodput":
        """Return how the run's time was spent, from its submission until now or its end.

        A sweep has no goodput; each of its points has.

        Raises:
            LauncherError: this machine cannot see the run directory, or this is a sweep.
            RunLost: the run directory is gone.
        """
        from toolkit.runs.views.goodput import Price, goodput_of

        if self.points:
            raise LauncherError(f"{self.uri} is a sweep; ask for a point, such as {self.uri}_0")
        until = None if self.status().state.final else time.time()
        with self.recorded("events.jsonl", "metrics.jsonl", "outcome.json") as folder:
            found = goodput_of(
                folder, submitted=self.record.created, until=until, times=self.scheduled()
            )
        return replace(found, price=Price.of(self.record.profile))

    def scheduled(self) -> "Sequence[Scheduled]":
        """Return when the scheduler queued the attempts and gave them nodes, where known."""
        from toolkit.runs.records.scheduler_times import scheduled_in

        return scheduled_in(self.run_dir) if self.run_dir else []

    def report(self) -> "Report":
        """Return a page about the run: curves, timeline, goodput, failures, provenance.

        A notebook shows the page; `report().save("run.html")` saves it. The report of a sweep
        compares its points; `toolkit.report()` compares runs.
        """
        from toolkit.runs.views.report import report

        return report([self])

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> RunStatus:
        """Return the status once the run has ended.

        Args:
            timeout_s: How long to wait.
            progress: Whether to show progress; by default only in notebooks and terminals.

        Raises:
            TimeoutError: the run has not ended within `timeout_s` seconds.
            RunLost: the run's status is permanently lost.
        """
        from toolkit.runs.views.notebook import ProgressDisplay

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if progress is None:
            progress = ProgressDisplay.is_watched()
        shown = ProgressDisplay(self) if progress else None
        try:
            with self.watching([self], explained=shown is not None):
                for pause_s in pauses():
                    points = self.statuses()
                    status = self.sum_of(points or [self.status()])
                    if shown:
                        shown.show(status, points)
                    if status.state.final:
                        self.tell_end(status, points)
                        return status
                    if status.lost:
                        raise RunLost(f"{self.uri}: {status.reason}")
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(
                            f"{self.uri} is still {status.state} after {timeout_s} s"
                        )
                    self._pause(pause_s)
        finally:
            if shown:
                shown.close()
        raise AssertionError("there is always another pause")

    def tell_end(self, status: RunStatus, points: "Sequence[RunStatus]" = ()) -> None:
        """Send the notification that the run has ended, unless its script has sent it.

        Args:
            status: The final status of the run.
            points: The final statuses of a sweep's points; by default they are queried.
        """
        if not self.record.profile.get("notify"):
            return
        from toolkit.runs.views.notify import tell_end

        for part, end in zip(self.parts, points or self.statuses() or [status], strict=True):
            tell_end(part.record, end)

    def _repr_html_(self) -> str:
        """Show the run in a notebook: its state, progress, and loss curve."""
        from toolkit.runs.views.notebook import html_of

        return html_of(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


def require_unfinished(run: Run, status: RunStatus, *, live: bool = False) -> None:
    """Refuse to continue a run that is still active, or that has nothing left to do.

    Args:
        run: The run.
        status: Its status.
        live: Whether its scheduler still has a job of this run, whatever the status.

    Raises:
        LauncherError: the run has succeeded, or has not ended.
    """
    if live or not (status.state.final or status.lost):
        raise LauncherError(
            f"{run.uri} is {status.state.upper()} and has not ended; `toolkit wait` for it, "
            "or `toolkit cancel` it first"
        )
    if status.state is RunState.SUCCEEDED:
        raise LauncherError(f"{run.uri} has succeeded; there is nothing to do again")


class Launcher(abc.ABC, Generic[PlanT]):
    """Submits plans to a site, and opens their runs."""

    @abc.abstractmethod
    def submit(self, plan: PlanT) -> Run:
        """Start a new run; never changes an older run that the caller knows.

        Raises:
            LauncherError: the site refused, or cannot be reached.
        """

    @abc.abstractmethod
    def open(self, record: RunRecord) -> Run:
        """Return the handle of a run that any process has submitted."""

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Continue an ended run from its checkpoints; in a sweep, the points that did not succeed.

        Raises:
            LauncherError: the run has succeeded or not ended, or the site does not support it.
        """
        raise LauncherError(
            f"{run.uri} cannot be resubmitted; only runs on Slurm and Kubernetes can"
        )


def pauses(first_s: float = 0.2, longest_s: float = 5.0) -> Iterator[float]:
    """Yield pauses between two queries in seconds, each 1.5 times as long as the one before.

    The longest pause respects the query rate that clusters allow.
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)


def new_run_name(job_name: str) -> str:
    """Return a name for a new run: `NAME-MMDD-HHMMSS-XXXX`, local time, four random characters."""
    stamp = datetime.now().strftime("%m%d-%H%M%S")
    return f"{job_name}-{stamp}-" + "".join(secrets.choice(_NAME_ALPHABET) for _ in range(4))


def unfinished_of(sweep: Run, point_statuses: Sequence[RunStatus]) -> list[int]:
    """Return the points that have ended without success.

    Raises:
        LauncherError: all points have succeeded, or one has not ended.
    """
    if live := [status for status in point_statuses if not (status.state.final or status.lost)]:
        raise LauncherError(
            f"{sweep.uri}: {len(live)} of {len(point_statuses)} points have not ended (the first "
            f"is {live[0].state.upper()}: {live[0].reason or 'no reason'}); `toolkit wait` for "
            f"them, or name one point that has ended, like {sweep.uri}_0"
        )
    again = [i for i, status in enumerate(point_statuses) if status.state is not RunState.SUCCEEDED]
    if not again:
        raise LauncherError(f"{sweep.uri}: all points have succeeded; there is nothing to do")
    return again


# ---- Runs that are shown but never acted on
#
# A run directory that is not in the user's list of runs may name any job, process, host or cluster.
# Its contents are shown, but never cause a query, signal or connection.


class ShownRun(Run):
    """A run with an unusable record: only its submission and the reason are known."""

    def __init__(self, record: RunRecord, why: str) -> None:
        super().__init__(record)
        self._why = why

    def status(self) -> RunStatus:
        """Return the status UNKNOWN with the reason."""
        return RunStatus(state=RunState.UNKNOWN, reason=self._why, lost=True)

    def refuse(self, what: str) -> NoReturn:
        """Raise a LauncherError for an action on the run, with the reason."""
        raise LauncherError(f"{self.name} is not asked to {what}: {self._why}")

    def cancel(self) -> None:
        """Raise a LauncherError: such a run is never acted on."""
        self.refuse("stop")

    def _exchange(self) -> "Exchange":
        self.refuse("show its stacks")

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        raise LauncherError(f"{self.name} has no log here: {self._why}")


class ForeignRun(ShownRun):
    """A run directory that is not in the user's list of runs, as its files describe it."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__(
            record,
            f"{record.run_dir} is not in your list of runs and may be anyone's; --trust believes "
            "what it says of its jobs, hosts and clusters",
        )

    def status(self) -> RunStatus:
        """Return the status from the files alone; no scheduler is queried."""
        assert self.run_dir is not None
        status = run_directory.ended_status(self.run_dir)
        outcome = run_directory.outcome(self.run_dir) or {}
        if not status.state.final or outcome.get("status") == "running":
            return RunStatus(state=RunState.UNKNOWN, reason=self._why, lost=True)
        reason = "; ".join(filter(None, [status.reason, self._why]))
        return RunStatus(state=status.state, reason=reason)

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        run_dir = self.run_dir
        assert run_dir is not None
        spans = spans_of(run_dir, view, run_dir / "logs" / "job.log")
        return read_run(run_dir, view, lambda: spans, ended=lambda: True)
