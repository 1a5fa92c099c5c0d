"""What `status --watch` and `top` show again and again: a live view by rich, or lines."""

from __future__ import annotations  # naming a type must not import it

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import toolkit
from toolkit.cli import exit_status
from toolkit.cli.output import echo_lines
from toolkit.cli.summary import (
    NO_ROWS,
    GoodputSoFar,
    Row,
    summary_lines,
    summary_of,
    top_lines,
    top_rows,
)
from toolkit.errors import RunLost
from toolkit.runs.evidence.progress import ProgressReader
from toolkit.runs.run import pauses

if TYPE_CHECKING:
    from toolkit.cli.live import LiveScreen


def watch(run: toolkit.Run) -> int:
    """Show a run's summary until it has ended; return the exit status of `toolkit status --watch`.

    At a terminal, the summary takes the place of the one before. Elsewhere only the lines follow
    that have changed.
    """
    goodput = GoodputSoFar()
    with run.watching([run], explained=True), open_screen() as screen:
        for pause_s in pauses(first_s=1.0):
            status = None if run.points else run.status()
            if status is not None and status.lost:
                raise RunLost(f"{run.uri}: {status.reason}")
            summary = summary_of(run, status, goodput)
            screen.show_summary(summary)
            state = toolkit.RunState(summary["state"].lower())
            if state.final:
                return exit_status.of_runs([toolkit.RunStatus(state=state)])
            screen.pause(pause_s)
    raise AssertionError("there is always another pause")


def watch_several(runs: list[toolkit.Run]) -> int:
    """Show a line for each run until all have ended; return `status --watch`'s exit status."""
    readers = dict[str, ProgressReader]()
    with open_screen() as screen:
        for pause_s in pauses(first_s=2.0):
            statuses = toolkit.statuses(runs)
            screen.show_rows(top_rows(zip(runs, statuses, strict=True), readers))
            if all(status.state.final or status.lost for status in statuses):
                return exit_status.of_runs(statuses)
            screen.pause(pause_s)
    raise AssertionError("there is always another pause")


def watch_all(last: int, job: str | None) -> None:
    """Show the runs that have not ended, and those that end meanwhile, until Ctrl-C.

    Without a terminal, they are shown once.
    """
    followed, readers = set[str](), dict[str, ProgressReader]()
    with contextlib.suppress(KeyboardInterrupt), open_screen() as screen:
        for pause_s in pauses(first_s=2.0):
            runs = list(toolkit.list_runs(job=job, last=last))
            statuses = toolkit.statuses(runs)
            shown = [
                (run, status)
                for run, status in zip(runs, statuses, strict=True)
                if run.uri in followed or not (status.state.final or status.lost)
            ]
            followed |= {run.uri for run, _ in shown}
            screen.show_rows(top_rows(shown, readers))
            if not sys.stdout.isatty():
                break
            screen.pause(pause_s)


def open_screen() -> LiveScreen | ChangedLines:
    """Return the live view at a terminal that rich can draw on, else the changed lines."""
    if sys.stdout.isatty():
        from rich.console import Console

        from toolkit.cli.live import LiveScreen

        if (console := Console(highlight=False, markup=False, emoji=False)).is_interactive:
            return LiveScreen(console)
    return ChangedLines()


class ChangedLines:
    """Shows the lines of a view that the view before did not have."""

    def __init__(self) -> None:
        self._before = set[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last lines."""

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Show the lines of `toolkit status`."""
        self._show(list(summary_lines(summary)))

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Show a line for each run."""
        self._show(list(top_lines(rows)) or [NO_ROWS])

    def pause(self, pause_s: float) -> None:
        """Let time pass."""
        time.sleep(pause_s)

    def _show(self, lines: list[str]) -> None:
        echo_lines(line for line in lines if line not in self._before)
        self._before = set(lines)
