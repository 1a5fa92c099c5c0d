"""The interface of all launchers: Launcher and Run."""

import abc
import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from toolkit.errors import LauncherError, RunLost, RunNotFound
from toolkit.planning import LaunchPlan
from toolkit.runs import secret_hashes
from toolkit.runs.log_reader import LogView
from toolkit.runs.registry import RunRecord
from toolkit.runs.state import RunState, RunStatus
from toolkit.text import untrusted

if TYPE_CHECKING:
    from toolkit.runs.failure import Failure

__all__ = [
    "Launcher",
    "Run",
    "new_run_name",
    "pauses",
    "require_secrets",
]

_SECRET_BYTES = 1 << 16
_NAME_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # without what people mix up

PlanT = TypeVar("PlanT", bound=LaunchPlan)


class Run(abc.ABC):
    """A run that was submitted; a handle that another process can open again from `uri`."""

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
        """The run directory, where this machine can see it."""
        return self.record.run_dir

    @property
    def settings(self) -> Mapping[str, str | bool]:
        """What a point of a sweep sets, by the keys of the sweep."""
        return {}

    @property
    def points(self) -> "Sequence[Run]":
        """The points of a sweep, each a run of its own; none where it is no sweep."""
        return ()

    def point(self, key: str) -> "Run":
        """Return a point by its number or its name.

        Raises:
            RunNotFound: there is none.
        """
        raise RunNotFound(f"no point {key!r}: {self.uri} is no sweep")

    def sum_of(self, point_statuses: Sequence[RunStatus]) -> RunStatus:
        """Return the status of a sweep from those of its points."""
        raise LauncherError(f"{self.uri} is no sweep")

    def statuses(self) -> list[RunStatus]:
        """Return the statuses of all points, by one query if possible."""
        return [point.status() for point in self.points]

    @abc.abstractmethod
    def status(self) -> RunStatus:
        """Return the status of the run."""

    @property
    def place(self) -> Hashable:
        """Batch key: runs with equal keys are queried in one request."""
        return type(self)

    def statuses_of(self, runs: "Sequence[Run]") -> list[RunStatus]:
        """Return the statuses of runs with this batch key, UNKNOWN if the query fails."""

        def told(run: Run) -> RunStatus:
            try:
                return run.status()
            except LauncherError as error:
                return RunStatus(state=RunState.UNKNOWN, reason=str(error))

        return [told(run) for run in runs]

    def watching(
        self, runs: "Sequence[Run]", *, explained: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Watch runs of this batch while a caller waits, if that is cheaper than polling.

        Args:
            runs: The runs.
            explained: Whether the caller shows meanwhile what each of them waits for.
        """
        return contextlib.nullcontext()

    def _pause(self, pause_s: float) -> None:
        """Let time pass between two questions; less, where a change is noticed."""
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
        """Yield the lines that the run has printed, of all nodes and ranks; secrets are left out.

        Args:
            follow: Whether to go on until the run has ended, over requeues, too.
            ranks: The ranks whose lines are wanted; all lines where it is empty.
            attempt: The attempt whose lines are wanted; those of all where it is None.
            grep: A regular expression that a line must hold somewhere.
            on_status: Called with the status after each poll of a follower.

        Raises:
            InputError: the attempt does not exist, or `grep` is not a regular expression.
            LauncherError: the log cannot be read from here, or not by rank.
        """
        view = LogView.of(follow=follow, ranks=ranks, attempt=attempt, grep=grep)
        return view.grepped(self._redacted(self._lines(view, on_status)))

    @abc.abstractmethod
    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        """Yield the lines of the view's attempt and ranks, without torchrun's stop traces."""

    def _redacted(self, lines: Iterator[str]) -> Iterator[str]:
        from toolkit.runs import run_directory

        return run_directory.redacted(lines, self.run_dir)

    def failure(self, *, attempt: int | None = None) -> "Failure | None":
        """Return what failed first in an attempt; None if no rank failed, or the cause is unknown.

        It is read from the run directory; no scheduler is queried.

        Args:
            attempt: Which one; the newest where it is None.
        """
        from toolkit.runs import run_directory
        from toolkit.runs.failure import first_failure

        if self.run_dir is None:
            return None
        failure = first_failure(self.run_dir, attempt)
        return failure and failure.redacted(run_directory.mask_of(self.run_dir))

    @abc.abstractmethod
    def cancel(self) -> None:
        """Request that the run stops with a checkpoint; does nothing where it has ended already."""

    @property
    def state(self) -> RunState:
        """Where the run stands now; the reason is in `status()`."""
        return self.status().state

    def metrics(self) -> Any:
        """Return what the run has measured, one row per step; of a sweep, of all its points.

        A pandas DataFrame where pandas is installed, else a list of mappings. The columns are those
        of `metrics.jsonl` (docs/reference/run-directory.md); a sweep's begin with `point` and what
        each point sets.

        Raises:
            LauncherError: the run directory cannot be seen from here.
        """
        from toolkit.runs.metrics import table

        if not self.points:
            return table(self._measured())
        return table(
            [
                {"point": point.name.rpartition("/")[2], **point.settings, **row}
                for point in self.points
                for row in point._measured()
            ]
        )

    def _measured(self) -> list[dict[str, Any]]:
        """Return what a run that is no sweep has measured."""
        from toolkit.runs.metrics import read_metrics

        if self.run_dir is None:
            raise LauncherError(f"{self.uri}: its run directory cannot be seen from here")
        return read_metrics(self.run_dir)

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> RunStatus:
        """Return the status once the run has ended.

        Args:
            timeout_s: How long to wait.
            progress: Whether to show how far it is; left out: in notebooks and terminals only.

        Raises:
            TimeoutError: it has not ended, `timeout_s` seconds later.
            RunLost: its status is lost for good.
        """
        from toolkit.runs.notebook import Progress

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        shown = (
            Progress(self) if (Progress.is_watched() if progress is None else progress) else None
        )
        try:
            with self.watching([self], explained=shown is not None):
                for pause_s in pauses():
                    points = self.statuses() if self.points else []
                    status = self.sum_of(points) if self.points else self.status()
                    if shown:
                        shown.show(status, points)
                    if status.state.final:
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

    def _repr_html_(self) -> str:
        """Show the run in a notebook: its state, how far it is, and the curve of its loss."""
        from toolkit.runs.notebook import html_of

        return html_of(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


class Launcher(abc.ABC, Generic[PlanT]):
    """A place where plans become runs."""

    @abc.abstractmethod
    def submit(self, plan: PlanT) -> Run:
        """Start a new run; never touches an older one.

        Raises:
            LauncherError: the place refused, or cannot be reached.
        """

    @abc.abstractmethod
    def open(self, record: RunRecord) -> Run:
        """Return the handle of a run that any process has submitted before."""

    def resubmit(self, run: Run, *, chain: int = 1) -> Run:
        """Let a run that has ended go on from its checkpoints; of a sweep, what did not succeed.

        Raises:
            LauncherError: it has succeeded or not ended, or the place cannot do this.
        """
        raise LauncherError(f"{run.uri} cannot go on by itself; runs on Slurm and Kubernetes can")


def pauses(first_s: float = 0.2, longest_s: float = 5.0) -> Iterator[float]:
    """Yield pauses between two queries in seconds, each half as long again as the one before.

    The longest one keeps to the rate of queries that clusters allow.
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)


def new_run_name(job_name: str) -> str:
    """Return a name for a new run: `NAME-MMDD-HHMMSS-XXXX`, local time, four random characters."""
    stamp = datetime.now().strftime("%m%d-%H%M%S")
    return f"{job_name}-{stamp}-" + "".join(secrets.choice(_NAME_ALPHABET) for _ in range(4))


def require_secrets(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Make sure that the secrets are there which the job takes from here.

    A file that is not here may be on the node; the script checks again. Hashes of the values are
    kept, so that logs hide the values later, when the variables are no longer set.

    Raises:
        LauncherError: a variable is not set, or others may read a file.
    """
    if missing := [name for name in plan.exported_secrets if not environ.get(name)]:
        raise LauncherError(f"secrets are not set here: {', '.join(missing)}; export them first")
    values = {name: environ[name] for name in plan.exported_secrets}
    for name, written in plan.secret_files.items():
        at_home = written.startswith("~/")
        path = Path(environ.get("HOME", "/"), written[2:]) if at_home else Path(written)
        if path.is_file() and path.stat().st_mode & 0o077:
            raise LauncherError(f"secret {name}: others may read {path}; chmod 600 it")
        with contextlib.suppress(OSError):
            values[name] = untrusted.read_text(path.resolve(), limit=_SECRET_BYTES).rstrip("\n")
    secret_hashes.remember(values, environ)
