"""Runs and sweeps on this machine: status, logs and cancellation."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from toolkit.errors import LauncherError
from toolkit.runs.records import log_reader, run_directory
from toolkit.runs.records.log_reader import LogView, Span
from toolkit.runs.records.points import read_points, record_of_point
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.supervisor import run_lock
from toolkit.supervisor.points import LAUNCHER_LOG
from toolkit.text import untrusted

SUPERVISOR = "toolkit.supervisor"
"""The module that supervises runs, which identifies its processes."""

_EXEC_S = 5.0
"""Seconds to wait for a command line: it is empty for an instant after exec (Linux, fs/exec.c)."""


class LocalRun(Run):
    """A run on this machine."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        assert self.record.run_dir is not None
        return self.record.run_dir

    def status(self) -> RunStatus:
        """Return the status: running if the lock is held, else from the run directory."""
        if self._supervisor() is not None:
            return RunStatus(state=RunState.RUNNING)
        if not self.run_dir.is_dir():
            reason = f"{self.run_dir} is gone"
            return RunStatus(state=RunState.UNKNOWN, reason=reason, lost=True)
        status = run_directory.ended_status(self.run_dir)
        explained = status.word or run_directory.outcome(self.run_dir) is not None
        if status.state is not RunState.FAILED or explained:
            return status
        lines: list[str] = []
        with contextlib.suppress(OSError):
            log = self.run_dir / LAUNCHER_LOG
            lines = untrusted.read_text(log, below=self.run_dir).split("\n")
        refusal = next((line for line in reversed(lines) if line), "")
        return RunStatus(state=status.state, reason=refusal) if refusal else status

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        return log_reader.read_run(
            self.run_dir,
            view,
            lambda: self._spans(view),
            ended=lambda: (
                self._supervisor() is None or log_reader.is_followed(self.run_dir, view.attempt)
            ),
        )

    def _spans(self, view: LogView) -> list[Span]:
        """Return the file parts with the lines of a view."""
        launcher_log = self.run_dir / LAUNCHER_LOG
        # The supervisor starts only the first attempt; users may continue the run manually.
        first = [Span(path=launcher_log, below=self.run_dir)] if view.attempt == 0 else []
        return [*first, *log_reader.spans_of(self.run_dir, view, launcher_log)]

    def cancel(self) -> None:
        """Signal the supervisor to stop the run with a checkpoint."""
        if pid := self._supervisor():
            if not self._is_supervisor(pid):
                raise LauncherError(
                    f"{self.uri} was not stopped: {self.run_dir / run_lock.NAME} names process "
                    f"{pid}, which is not your supervisor of this run"
                )
            run_directory.request_cancel(self.run_dir)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _is_supervisor(self, pid: int) -> bool:
        """Whether a process belongs to this user and supervises this run.

        The files of a run directory may be forged: a process id of -1 would mean all processes.
        """
        if not 1 < pid < 1 << 31:
            return False
        process = Path(f"/proc/{pid}")
        try:
            if not process.parent.joinpath("self").exists():  # a system without /proc
                return os.getpgid(pid) == pid
            if process.stat().st_uid != os.getuid():
                return False
            deadline = time.monotonic() + _EXEC_S
            while not (command := (process / "cmdline").read_bytes().rstrip(b"\0")):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except FileNotFoundError:
            return True  # the process has just ended
        except OSError:
            return False
        argv = command.split(b"\0")
        return SUPERVISOR.encode() in argv and os.fsencode(self.run_dir) in argv

    def _supervisor(self) -> int | None:
        """Return the supervisor's process id while it is alive; 0 before the id is known.

        A lock ends with its holder, so that a process id that the system has reused is not mistaken
        for the supervisor's.
        """
        with (
            contextlib.suppress(OSError),  # missing, or not a lock file
            untrusted.open_untrusted(f"{self.run_dir}/{run_lock.NAME}") as lock,
        ):
            if run_lock.is_held(lock):
                pid = lock.read(len(run_lock.NO_PID))
                return int(pid) if pid.isdigit() else 0
        return None


class LocalSweep(LocalRun):
    """All points of a sweep together; one supervisor starts them as capacity allows."""

    @cached_property
    def points(self) -> "tuple[LocalPoint, ...]":
        """The points, each a separate run."""
        points = read_points(self.run_dir)
        return tuple(LocalPoint(self, index, *point) for index, point in enumerate(points))

    def status(self) -> RunStatus:
        """Return the status, derived from the points' statuses."""
        return self.sum_of(self.statuses())

    def statuses(self) -> list[RunStatus]:
        """Return the status of each point."""
        goes_on = self._supervisor() is not None
        return [point.status_in(goes_on=goes_on) for point in self.points]

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        spans = {point.uri: point._spans for point in self.points}
        if view.follow:
            return log_reader.follow_points(self, view, spans, on_status, ask_every_s=0.5)
        return log_reader.read_points(self.points, view, spans)

    def cancel(self) -> None:
        """Stop the running points, each with a checkpoint; the others never start."""
        for point, status in zip(self.points, self.statuses(), strict=True):
            if status.state is RunState.RUNNING:
                run_directory.request_cancel(point.run_dir)
        super().cancel()


class LocalPoint(LocalRun):
    """A point of a sweep on this machine."""

    def __init__(
        self, sweep: LocalSweep, index: int, folder: str, settings: Mapping[str, str | bool]
    ) -> None:
        self.sweep, self.index, self.settings = sweep, index, settings
        super().__init__(record_of_point(sweep.record, index, folder))

    def status(self) -> RunStatus:
        """Return the status: running if the point's lock is held, else from its run directory."""
        return self.status_in(goes_on=self.sweep._supervisor() is not None)

    def status_in(self, *, goes_on: bool) -> RunStatus:
        """Return the status, given whether the supervisor of the sweep still starts points."""
        if self._supervisor() is not None or run_directory.has_attempts(self.run_dir):
            return super().status()
        if any(map(run_directory.cancel_requested, (self.run_dir, self.sweep.run_dir))):
            return RunStatus(state=RunState.CANCELLED, reason="never started")
        if goes_on:
            return RunStatus(state=RunState.PENDING, reason="other points run")
        if self.run_dir.is_dir():
            return super().status()
        reason = "the sweep has ended before this point was started"
        return RunStatus(state=RunState.FAILED, reason=reason)

    def cancel(self) -> None:
        """Stop this point with a checkpoint, or keep it from being started."""
        with contextlib.suppress(OSError):  # e.g. a full disk, where nothing else starts either
            self.run_dir.mkdir(exist_ok=True)
        run_directory.request_cancel(self.run_dir)
        super().cancel()
