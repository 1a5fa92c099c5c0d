"""A submitted call, as submitit shows its jobs."""

import collections
import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from submitit.core import core
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError

from toolkit.api import open_run
from toolkit.errors import LauncherError
from toolkit.functions.payload import Call, Failure
from toolkit.runs import run_directory
from toolkit.runs.foreign import ShownRun
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.text import untrusted

__all__ = ["FunctionJob", "Inquiry", "attach"]

R = TypeVar("R", covariant=True)

_ASK_EVERY_S = (1.0, 15.0)
"""First and longest pause between two questions to the scheduler about the same jobs."""
_LOOK_EVERY_S = (0.1, 1.0)
"""First and longest pause between two looks into the run directory; a fortieth of the wait."""
_FILES_WITHIN_S = 15.0
"""How long a file may take to appear here after its job has ended on another machine."""
_LOG_LINES = 20

_STREAM_BYTES = 64 << 20
"""How much of what a rank has printed is shown, from its end."""

_SAID = {"done": RunState.SUCCEEDED, "fatal": RunState.FAILED}
_STATES = {RunState.SUCCEEDED: "COMPLETED"}
"""Slurm's words, which users of submitit compare with; all others are the same."""


class Inquiry:
    """The scheduler's status of the jobs of one submission: polled seldom, by one query for all."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: list[RunStatus] = []
        self._asked_s = float("-inf")
        self._pauses = _growing(*_ASK_EVERY_S)
        self._pause_s = 0.0

    def status(self, index: int, *, force: bool = False) -> RunStatus:
        """Return where a job stands; with `force`, by a question of now."""
        if force or time.monotonic() >= self._asked_s + self._pause_s:
            self._found = self._ask()
            self._asked_s, self._pause_s = time.monotonic(), next(self._pauses)
        return self._found[index]

    def _ask(self) -> list[RunStatus]:
        try:
            return self._run.statuses() if self._run.points else [self._run.status()]
        except LauncherError as error:
            unknown = RunStatus(state=RunState.UNKNOWN, reason=str(error))
            return [unknown] * max(1, len(self._run.points))


class FunctionPaths(JobPaths):
    """Where the files of a call are, by submitit's names."""

    def __init__(self, call: Call, job_id: str, rank: int | None, script: str) -> None:
        super().__init__(call.run_dir, job_id=job_id, task_id=rank)
        self._call = call
        self._script = script

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self._call.run_dir

    @property
    def submission_file(self) -> Path:
        """The script; that of an array lies a folder above its runs."""
        own, above = self.folder / self._script, self.folder.parent / self._script
        return own if own.exists() else above

    @property
    def submitted_pickle(self) -> Path:
        """The function and its arguments."""
        return self._call.submitted

    @property
    def result_pickle(self) -> Path:
        """What the rank has returned in the newest attempt."""
        return self._call.result(self.task_id)

    @property
    def stdout(self) -> Path:
        """What the rank has printed in the newest attempt."""
        return self._stream("stdout")

    @property
    def stderr(self) -> Path:
        """The same of its errors."""
        return self._stream("stderr")

    def _stream(self, name: str) -> Path:
        attempt = self._call.folder / f"attempt-{self._call.attempt}"
        return attempt / f"logs-{self.task_id}" / f"{name}.log"


class FunctionJob(core.Job[R]):
    """A call on all ranks of a group, or one rank's part in it.

    As with submitit, `results()` has what each rank has returned. `result()` is rank 0's, where
    submitit refuses jobs of several tasks; `task(k).result()` is that of rank k.
    """

    def __init__(
        self, run: Run, *, inquiry: Inquiry | None = None, index: int = 0, rank: int | None = None
    ) -> None:
        assert run.run_dir is not None
        self.run = run
        self._call = Call(run.run_dir)
        self._inquiry = inquiry or Inquiry(run)
        self._index = index
        self._rank = rank
        self._cancel_at_deletion = False
        script = f"{run.record.job}.sbatch" if run.uri.startswith("slurm:") else "run.sh"
        self._job_id = run.uri.rpartition("/")[2]
        self._paths = FunctionPaths(self._call, self._job_id, rank, script)
        ranks = range(self._call.ranks) if rank is None else ()
        self._tasks = tuple(ranks) or (rank or 0,)
        self._sub_jobs = [
            type(self)(run, inquiry=self._inquiry, index=index, rank=k) for k in ranks
        ]

    @property
    def uri(self) -> str:
        """What `toolkit.attach` opens the job by, in any process."""
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
        """Request a stop within `stop.grace`; a second call ends the whole job immediately."""
        try:
            self.run.cancel()
        except LauncherError:
            if check:
                raise

    def result(self) -> R:
        """Wait, and return what rank 0, or this job's own rank, has returned.

        Raises:
            FailedJobError: the function has raised an exception.
            UncompletedJobError: the job has ended otherwise.
        """
        return self.results()[0]

    def results(self) -> list[R]:
        """Wait, and return what each rank has returned.

        Raises:
            FailedJobError: the function has raised an exception.
            UncompletedJobError: the job has ended otherwise.
        """
        if (error := self.exception()) is not None:
            raise error
        ranks = range(self._call.ranks) if self._rank is None else (self._rank,)
        self._bring(ranks)
        return [self._load(rank) for rank in ranks]

    def exception(self) -> UncompletedJobError | None:
        """Wait, and return the failure of the rank that failed first, or None."""
        self.wait()
        _within(_FILES_WITHIN_S, self._can_tell)
        if self._call.said() == "done":
            return None
        failures = self._call.failures()
        if self._rank is not None:
            if self._has_returned(self._call.result(self._rank)):
                return None
            failures = [f for f in failures if f.rank == self._rank and not f.echo] or failures
        if failures and not failures[0].echo:
            return FailedJobError(self._told(failures[0]))
        return UncompletedJobError(self._ended_otherwise(failures))

    def _can_tell(self) -> bool:
        """Whether what the state of the job promises is to be read here."""
        return bool(
            self._call.said()
            or self._call.failures()
            or self._status().state is not RunState.SUCCEEDED
        )

    def _told(self, failure: Failure) -> str:
        return (
            f"Job {self.job_id} failed: rank {failure.rank} on {failure.host} was the first, with "
            f"this trace:\n{'-' * 22}\n{failure.trace}{'-' * 22}\n"
            f"All that it has printed: job.task({failure.rank}).stdout(), .stderr(), or in "
            f"{self._call.run_dir / 'logs'}"
        )

    def _ended_otherwise(self, failures: list[Failure]) -> str:
        status = self._status(force=True)
        reason = f": {status.reason}" if status.reason else ""
        text = [f"Job {self.job_id} has no result; it is {self.state}{reason}"]
        text += [f"rank {f.rank} on {f.host} has lost the others:\n{f.trace}" for f in failures[:1]]
        with contextlib.suppress(LauncherError, OSError):
            last = collections.deque(self.run.logs(), maxlen=_LOG_LINES)
            text += [f"The last lines of its log, in {self._call.run_dir / 'logs'}:", *last]
        return "\n".join(text)

    def _bring(self, ranks: Sequence[int]) -> None:
        """Bring here the results of ranks that do not come by themselves.

        Raises:
            UncompletedJobError: they cannot be brought.
        """

    def _has_returned(self, path: Path) -> bool:
        """Whether a rank has returned something, which lies there or can be brought there."""
        return path.exists()

    def _is_here(self, path: Path) -> bool:
        """Whether a file that a rank has left is to be read here."""
        return path.exists()

    def _load(self, rank: int) -> Any:
        path = self._call.result(rank)
        _within(_FILES_WITHIN_S, lambda: self._is_here(path))
        try:
            self._require_own(path)
            with untrusted.open_untrusted(path, below=self._call.run_dir) as file:
                return pickle.load(file)
        except (OSError, LauncherError) as error:
            message = f"Job {self.job_id}: the result of rank {rank} cannot be read: {error}"
            raise UncompletedJobError(message) from error

    def _require_own(self, path: Path) -> None:
        """Make sure that no other user can have written a result: unpickling it can do anything.

        Raises:
            LauncherError: another user can.
        """
        base = self._call.run_dir
        inside = [folder for folder in path.parents if folder.is_relative_to(base)]
        for part in (path, *inside):
            run_directory.require_own(part)

    def wait(self) -> None:
        """Return when the job has ended."""
        (first_s, longest_s), began_s = _LOOK_EVERY_S, time.monotonic()
        while not self.done():
            time.sleep(min(max(first_s, (time.monotonic() - began_s) / 40), longest_s))

    def done(self, force_check: bool = False) -> bool:
        """Whether the job has ended: by what its ranks have left, else by the scheduler's word.

        The scheduler is polled every 15 seconds at least, so a job that died without an outcome is
        detected, with or without accounting.
        """
        if self._call.said():
            return True
        status = self._status(force=force_check)
        if ended := status.state.final or status.lost:
            self._fetch()
        return ended

    def _fetch(self) -> None:
        """Bring here what the ranks have left, where this process does not see it."""

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, PREEMPTED or UNKNOWN."""
        state = _SAID.get(self._call.said()) or self._status().state
        return _STATES.get(state, state.upper())

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the state and its reason."""
        status = self._status(force=mode == "force")
        return {"JobID": self.job_id, "State": self.state, "Reason": status.reason}

    def _status(self, *, force: bool = False) -> RunStatus:
        return self._inquiry.status(self._index, force=force)

    def _get_logs_string(self, name: str) -> str | None:
        """Return a rank's `stdout` or `stderr` of all attempts; None if it has not started."""
        files = self._call.streams(self._rank or 0, name)
        return "".join(_end_of(path) for path in files) if files else None

    def __reduce__(self) -> tuple[Callable[..., "FunctionJob[Any]"], tuple[Any, ...]]:
        return _reopen, (self.uri, self._rank)

    def __del__(self) -> None:
        if self.__dict__.get("_cancel_at_deletion") and not self.done():
            self.cancel(check=False)


def _end_of(path: Path) -> str:
    """Return what a rank has printed, of much the end; or why it is not shown."""
    try:
        with untrusted.open_untrusted(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _STREAM_BYTES))
            return file.read(_STREAM_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"{path} is not shown: {error.strerror}\n"


def attach(run: str | Run) -> FunctionJob[Any]:
    """Return the job of a call that any process has submitted.

    Args:
        run: The run, or its URI, name or run directory; of an array, that of one of its jobs.

    Raises:
        RunNotFound: there is none.
        LauncherError: it is no call of a function, or an array of them.
    """
    opened = open_run(run) if isinstance(run, str) else run
    if isinstance(opened, ShownRun):
        opened.refuse("give its results")
    if opened.points and Call.is_in(opened.points[0].run_dir):
        raise LauncherError(
            f"{opened.uri} is an array of {len(opened.points)} calls; name one, like "
            f"{opened.points[0].uri}, or [toolkit.attach(p) for p in toolkit.open_run(…).points]"
        )
    if not Call.is_in(opened.run_dir):
        raise LauncherError(f"{opened.uri} is no call of a function; toolkit.open_run opens it")
    if opened.uri.startswith("k8s:"):
        from toolkit.functions.pod_executor import PodJob  # which is made of this module

        return PodJob(opened)
    return FunctionJob(opened)


def _reopen(uri: str, rank: int | None) -> FunctionJob[Any]:
    job = attach(uri)
    return job if rank is None else type(job)(job.run, inquiry=job._inquiry, rank=rank)


def _growing(first_s: float, longest_s: float) -> Iterator[float]:
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)


def _within(limit_s: float, condition: Callable[[], bool]) -> None:
    """Wait for a condition, but not longer."""
    until_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.2)
