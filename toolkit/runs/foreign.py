"""Runs that are shown and never acted upon: a damaged record, or another user's run directory.

A run directory that is not in the user's list of runs may name any job, process, host or cluster.
Its contents are shown, but cause no query, signal or connection.
"""

from collections.abc import Callable, Iterator
from typing import NoReturn

from toolkit.errors import LauncherError
from toolkit.runs import run_directory
from toolkit.runs.log_reader import LogView, all_spans, attempt_spans, follow_files, refuse_attempt
from toolkit.runs.registry import RunRecord
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus
from toolkit.runs.torchrun_report import without_stop_traces

__all__ = ["ForeignRun", "ShownRun"]


class ShownRun(Run):
    """A run whose record is unusable: only its submission and the reason are known."""

    def __init__(self, record: RunRecord, why: str) -> None:
        super().__init__(record)
        self._why = why

    def status(self) -> RunStatus:
        """Say why nothing is known."""
        return RunStatus(state=RunState.UNKNOWN, reason=self._why, lost=True)

    def refuse(self, what: str) -> NoReturn:
        """Refuse an action on the run, with the reason.

        Raises:
            LauncherError: always.
        """
        raise LauncherError(f"{self.name} is not asked to {what}: {self._why}")

    def cancel(self) -> None:
        """Refuse.

        Raises:
            LauncherError: always.
        """
        self.refuse("stop")

    def _lines(self, view: LogView, on_status: Callable[[RunStatus], object]) -> Iterator[str]:
        raise LauncherError(f"{self.name} has no log here: {self._why}")


class ForeignRun(ShownRun):
    """A run directory that is not in the user's list of runs, by what its files say."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__(
            record,
            f"{record.run_dir} is not in your list of runs and may be anybody's; --trust believes "
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
        """Yield the lines that are written so far."""
        run_dir = self.run_dir
        assert run_dir is not None
        refuse_attempt(run_dir, view)
        if view.attempt is None:
            spans = all_spans(run_dir, run_dir / "logs" / "job.log")
        else:
            spans = attempt_spans(run_dir, view.attempt)
        lines = follow_files(lambda: spans, ended=lambda: True)
        return view.of_ranks(without_stop_traces(lines))
