"""A submitted call, as submitit shows its jobs."""

import collections
import contextlib
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from submitit.core import core
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError

from toolkit.api import open_run
from toolkit.errors import LauncherError
from toolkit.functions.payload import SubmittedCall
from toolkit.kubernetes import KubernetesRun, volume
from toolkit.runs.records import run_directory
from toolkit.runs.records.log_reader import Span, end_of
from toolkit.runs.run import Run, ShownRun, pauses
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.submission import jobs_stamp
from toolkit.text import untrusted

R = TypeVar("R", covariant=True)

_QUERY_PAUSES_S = (1.0, 15.0)
"""Shortest and longest pause between two scheduler queries about the same jobs."""
_LOOK_PAUSES_S = (0.02, 0.5)
"""Shortest and longest pause between two checks of the run directory."""
_FILES_WITHIN_S = 15.0
"""Time limit for a file to appear here after its job has ended on another machine."""
_LOG_LINES = 20

_STREAM_BYTES = 64 << 20
"""How much of a rank's output is shown, from its end."""

_OUTCOMES = {"done": RunState.SUCCEEDED, "fatal": RunState.FAILED}
_STATES = {RunState.SUCCEEDED: "COMPLETED"}
"""Slurm's state names, which users of submitit compare with; all others are the same."""


class StatusPoll:
    """The scheduler's status of one submission's jobs: polled rarely, with one query for all."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._statuses: list[RunStatus] = []
        self._next_s, self._stamp = float("-inf"), jobs_stamp(run.run_dir)
        self._pauses = pauses(*_QUERY_PAUSES_S)

    def status(self, index: int, *, force: bool = False) -> RunStatus:
        """Return the status of a job; with `force`, from a new query."""
        stamp = jobs_stamp(self._run.run_dir)
        if force or time.monotonic() >= self._next_s or stamp != self._stamp:
            self._stamp = stamp
            try:
                run = self._run
                self._statuses = run.statuses() if run.points else [run.status()]
            except LauncherError as error:
                unknown = RunStatus(state=RunState.UNKNOWN, reason=str(error))
                self._statuses = [unknown] * max(1, len(self._run.points))
            self._next_s = time.monotonic() + next(self._pauses)
        return self._statuses[index]


class FunctionPaths(JobPaths):
    """The paths of a call's files, by submitit's names."""

    def __init__(self, call: SubmittedCall, job_id: str, rank: int | None, script: str) -> None:
        super().__init__(call.run_dir, job_id=job_id, task_id=rank)
        self._call = call
        self._script = script

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self._call.run_dir

    @property
    def submission_file(self) -> Path:
        """The script; for an array, it is one folder above its runs."""
        own, above = self.folder / self._script, self.folder.parent / self._script
        return own if own.exists() else above

    @property
    def submitted_pickle(self) -> Path:
        """The function and its arguments."""
        return self._call.submitted

    @property
    def result_pickle(self) -> Path:
        """The rank's return value in the newest attempt."""
        return self._call.result(self.task_id)

    @property
    def stdout(self) -> Path:
        """The rank's standard output of the newest attempt."""
        return self._stream("stdout")

    @property
    def stderr(self) -> Path:
        """The rank's standard error of the newest attempt."""
        return self._stream("stderr")

    def _stream(self, name: str) -> Path:
        attempt = self._call.folder / f"attempt-{self._call.attempt}"
        return attempt / f"logs-{self.task_id}" / f"{name}.log"


class FunctionJob(core.Job[R]):
    """A call on all ranks of a group, or one rank's part of it.

    As with submitit, `results()` returns the results of all ranks. `result()` returns the result of
    rank 0, where submitit refuses jobs of several tasks; `task(k).result()` returns that of rank k.
    """

    def __init__(
        self, run: Run, *, poll: StatusPoll | None = None, index: int = 0, rank: int | None = None
    ) -> None:
        assert run.run_dir is not None
        self.run = run
        self._call = SubmittedCall(run.run_dir)
        self._poll = poll or StatusPoll(run)
        self._index = index
        self._rank = rank
        self._cancel_at_deletion = False
        scheme, _, self._job_id = run.record.address
        script = f"{run.record.job}.sbatch" if scheme == "slurm" else "run.sh"
        self._paths = FunctionPaths(self._call, self._job_id, rank, script)
        ranks = range(self._call.ranks) if rank is None else ()
        self._tasks = tuple(ranks) or (rank or 0,)
        self._sub_jobs = [type(self)(run, poll=self._poll, index=index, rank=k) for k in ranks]

    @property
    def uri(self) -> str:
        """The URI by which `toolkit.attach` opens the job in any process."""
        return self.run.uri

    @property
    def task_id(self) -> int | None:
        """The rank; None for all of them together."""
        return self._rank

    def submission(self) -> DelayedSubmission:
        """Return the call, unpickled here."""
        function, args, kwargs = self._call.parts()
        return DelayedSubmission(function, *args, **kwargs)

    def cancel(self, check: bool = True) -> None:
        """Request a stop within `stop.grace`; on Slurm, a second call kills the job."""
        try:
            self.run.cancel()
        except LauncherError:
            if check:
                raise

    def result(self) -> R:
        """Wait, and return the result of rank 0, or of this job's own rank.

        Raises:
            FailedJobError: the function has raised an exception.
            UncompletedJobError: the job has ended otherwise.
        """
        return self.results()[0]

    def results(self) -> list[R]:
        """Wait, and return the results of all ranks, or of this job's own; errors as `result`."""
        if (error := self.exception()) is not None:
            raise error
        ranks = range(self._call.ranks) if self._rank is None else (self._rank,)
        return [self._load(rank) for rank in ranks]

    def exception(self) -> UncompletedJobError | None:
        """Wait, and return the failure of the rank that failed first, or None."""
        self.wait()
        try:
            self._fetch()
        except LauncherError as error:
            return UncompletedJobError(
                f"Job {self.job_id} is {self.state}, and its results cannot be copied here: {error}"
            )
        # The files that belong to this end may still be on their way.
        self._wait_for(
            lambda: bool(
                self._call.outcome()
                or self._call.failures()
                or self._status().state is not RunState.SUCCEEDED
            )
        )
        if self._call.outcome() == "done":
            return None
        failures = self._call.failures()
        if self._rank is not None:
            if self._call.result(self._rank).exists():
                return None
            failures = [f for f in failures if f.rank == self._rank and not f.echo] or failures
        logs = self._call.run_dir / "logs"
        if failures and not failures[0].echo:
            first = failures[0]
            return FailedJobError(
                f"Job {self.job_id} failed: rank {first.rank} on {first.host} was the first, with "
                f"this trace:\n{'-' * 22}\n{first.trace}{'-' * 22}\n"
                f"Its whole output: job.task({first.rank}).stdout(), .stderr(), or in {logs}"
            )
        status = self._status(force=True)
        reason = f": {status.reason}" if status.reason else ""
        text = [f"Job {self.job_id} has no result; it is {self.state}{reason}"]
        text += [f"rank {f.rank} on {f.host} has lost the others:\n{f.trace}" for f in failures[:1]]
        with contextlib.suppress(LauncherError, OSError):
            last = collections.deque(self.run.logs(), maxlen=_LOG_LINES)
            text += [f"The last lines of its log, in {logs}:", *last]
        return UncompletedJobError("\n".join(text))

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for files that another machine has written, up to the time limit."""
        until_s = time.monotonic() + _FILES_WITHIN_S
        for pause_s in pauses(*_LOOK_PAUSES_S):
            if condition() or time.monotonic() > until_s:
                return
            time.sleep(pause_s)

    def _fetch(self) -> None:
        """Copy the ranks' files to this machine, if it does not see their run directory.

        Raises:
            LauncherError: they cannot be copied.
        """

    def _load(self, rank: int) -> Any:
        path, base = self._call.result(rank), self._call.run_dir
        self._wait_for(path.exists)
        try:
            self._call.require_own(path)
            with untrusted.open_untrusted(path, below=base) as file:
                return pickle.load(file)
        except (OSError, LauncherError) as error:
            message = f"Job {self.job_id}: the result of rank {rank} cannot be read: {error}"
            raise UncompletedJobError(message) from error

    def wait(self) -> None:
        """Return when the job has ended."""
        (shortest_s, longest_s), began_s = _LOOK_PAUSES_S, time.monotonic()
        while not self.done():  # the pause adds at most one hundredth to the wait
            time.sleep(min(max(shortest_s, (time.monotonic() - began_s) / 100), longest_s))

    def done(self, force_check: bool = False) -> bool:
        """Whether the job has ended, by its outcome in the run directory or by the scheduler.

        The scheduler is polled at least every 15 seconds, so a job that died without an outcome is
        detected, with or without accounting.
        """
        if self._call.outcome():
            return True
        status = self._status(force=force_check)
        return status.state.final or status.lost

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, PREEMPTED or UNKNOWN."""
        state = _OUTCOMES.get(self._call.outcome()) or self._status().state
        return _STATES.get(state, state.upper())

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the state and its reason."""
        status = self._status(force=mode == "force")
        return {"JobID": self.job_id, "State": self.state, "Reason": status.reason}

    def _status(self, *, force: bool = False) -> RunStatus:
        return self._poll.status(self._index, force=force)

    def _get_logs_string(self, name: str) -> str | None:
        """Return a rank's `stdout` or `stderr` of all attempts; None if it has not started."""
        ends = []
        for path in self._call.streams(self._rank or 0, name):
            try:
                ends.append(end_of(Span(path=path), _STREAM_BYTES).decode("utf-8", "replace"))
            except OSError as error:
                ends.append(f"{path} is not shown: {error.strerror}\n")
        return "".join(ends) if ends else None

    def __reduce__(self) -> tuple[Callable[..., "FunctionJob[Any]"], tuple[Any, ...]]:
        return _reopen, (self.uri, self._rank)

    def __del__(self) -> None:
        if self.__dict__.get("_cancel_at_deletion") and not self.done():
            self.cancel(check=False)


class PodJob(FunctionJob[R]):
    """A call in pods. This process does not see their disks: files are copied from their claim."""

    def _fetch(self) -> None:
        call, whole = self._call, all(map(Path.exists, map(self._call.result, self._tasks)))
        if call.outcome() and (whole or call.failures()):
            return
        if self._status().state is not RunState.CANCELLED:
            assert isinstance(self.run, KubernetesRun)
            volume.fetch(self.run, self._missing)

    def _missing(self) -> Iterator[tuple[str, Path]]:
        """Yield the files to copy, each with its path in the run directory; the outcome first."""
        call = self._call
        yield "outcome.json", call.run_dir / "outcome.json"
        attempt = untrusted.whole((run_directory.outcome(call.run_dir) or {}).get("attempt"))
        (call.run_dir / "logs" / f"attempt-{attempt or 0}").mkdir(parents=True, exist_ok=True)
        paths = [*map(call.result, self._tasks)]
        if call.outcome() != "done":
            paths = [path(rank) for path in (call.result, call.error) for rank in range(call.ranks)]
        for path in paths:
            if not path.exists():
                yield str(path.relative_to(call.run_dir)), path

    def _get_logs_string(self, name: str) -> str | None:
        """Return the output of a rank; a pod's log has both streams in one."""
        lines = list(self.run.logs(ranks=[self._rank or 0]))
        return "".join(f"{line}\n" for line in lines) if lines else None


def attach(run: str | Run) -> FunctionJob[Any]:
    """Return the job of a call that any process has submitted.

    Args:
        run: The run of one call, or its URI, name or run directory.

    Raises:
        RunNotFound: the run does not exist.
        LauncherError: the run is not the call of a function, or it is an array of calls.
    """
    opened = open_run(run) if isinstance(run, str) else run
    if isinstance(opened, ShownRun):
        opened.refuse("give its results")
    if opened.points and SubmittedCall.is_in(opened.points[0].run_dir):
        raise LauncherError(
            f"{opened.uri} is an array of {len(opened.points)} calls; name one, like "
            f"{opened.points[0].uri}, or [toolkit.attach(p) for p in toolkit.open_run(…).points]"
        )
    if not SubmittedCall.is_in(opened.run_dir):
        raise LauncherError(
            f"{opened.uri} is not the call of a function; toolkit.open_run opens it"
        )
    return (PodJob if isinstance(opened, KubernetesRun) else FunctionJob)(opened)


def _reopen(uri: str, rank: int | None) -> FunctionJob[Any]:
    job = attach(uri)
    return job if rank is None else type(job)(job.run, poll=job._poll, rank=rank)
