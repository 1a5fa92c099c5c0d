"""Output of rich at a terminal: tables of runs with bars and colours, and progress lines.

Texts of runs and schedulers become `Text` objects, in which rich interprets no markup. Control
characters are escaped.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolkit.cli.summary import NO_ROWS, Row, point_text, summary_fields
from toolkit.runs.evidence.progress import Progress
from toolkit.runs.state import RunState
from toolkit.text import control

_STYLES = {
    RunState.CANCELLED: "dim",
    RunState.FAILED: "bold red",
    RunState.PENDING: "yellow",
    RunState.PREEMPTED: "yellow",
    RunState.RUNNING: "cyan",
    RunState.SUCCEEDED: "green",
    RunState.UNKNOWN: "magenta",
}

_SIZE_S = 0.2
"""How often to look whether the terminal has another size, in seconds."""

_BAR = 24
"""The width of a bar that has text beside it."""

_LEAST = 40
"""The least width of the last column of a table; where less is left, it goes below."""


class LiveScreen:
    """Shows runs on the terminal's other screen, as `top` does; the last view stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: RenderableType | None = None
        # On the other screen, lines that a resized terminal has wrapped leave nothing behind.
        self._live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._size = console.size
        self._handlers: dict[int, Any] = {}
        self._is_drawing = self._must_suspend = False

    def __enter__(self) -> Self:
        for number, handler in ((signal.SIGTERM, _exit), (signal.SIGTSTP, self._suspend)):
            self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._live.stop()
        if self._view is not None:
            self._console.print(self._view)

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Show the content of `toolkit status`."""
        self._show(Group(*_summary(summary)))

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Show a table of runs."""
        cells = [(row.name, row.state, row.progress, row.note) for row in rows]
        self._show(_Table(cells) if cells else Text(NO_ROWS))

    def pause(self, pause_s: float) -> None:
        """Let time pass; a terminal that gets another size is drawn anew."""
        # Not before: a run that has ended already needs no other screen.
        with self._drawing():
            self._live.start(refresh=True)
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _SIZE_S))
            if self._size != self._console.size:
                self._draw()

    def _show(self, view: RenderableType) -> None:
        self._view = view
        self._live.update(view)
        if self._live.is_started:
            self._draw()

    def _draw(self) -> None:
        self._size = self._console.size
        with self._drawing():
            self._live.refresh()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw, and only then handle a SIGTSTP: until then, the console holds back its output."""
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
        if self._must_suspend:
            self._must_suspend = False
            self._suspend()

    def _suspend(self, *_: object) -> None:
        """Leave the terminal to the shell until it continues this process."""
        if self._is_drawing:
            self._must_suspend = True
            return
        self._live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        with self._drawing():
            self._live.start(refresh=True)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


class LiveLine:
    """A progress line on stderr with spinner, bar and text, which disappears at the end."""

    def __init__(self, what: str) -> None:
        style = _STYLES[RunState.RUNNING]
        self._progress = Bars(
            SpinnerColumn(style=style),
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR, complete_style=style, finished_style=style, pulse_style=style),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True, highlight=False, markup=False, emoji=False),
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(what, total=None, text="")

    def draw(self, done: float, total: float | None, text: str) -> None:
        """Draw it with how much is done."""
        self._progress.update(self._task, completed=done, total=total, text=text)
        if not self._progress.live.is_started:
            self._progress.start()
            # A process that is killed could not show the cursor again.
            self._progress.console.show_cursor()

    def clear(self) -> None:
        """Take it from the terminal."""
        self._progress.stop()


class _Table:
    """A table of runs or sweep points: name, state, progress or reason."""

    def __init__(
        self, cells: Sequence[tuple[str, RunState, Progress | None, str]], title: str = "RUN"
    ) -> None:
        self._cells, self._title = cells, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(len(progress.position) if progress else 0 for *_, progress, _ in self._cells)
        rows = [
            (_text(name), _state(state), _Progress(progress, note, width))
            for name, state, progress, note in self._cells
        ]
        if options.max_width < max(name.cell_len for name, *_ in rows) + 13 + _LEAST:
            for name, state, cell in rows:
                yield Text.assemble(name, "  ", state)
                yield Padding(cell, (0, 0, 0, 2))
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(self._title, no_wrap=True)
        table.add_column("STATE", no_wrap=True)
        table.add_column("PROGRESS", ratio=1)
        for row in rows:
            table.add_row(*row)
        yield table


class _Progress:
    """How far a run is, as a bar where the number of its steps is known; then the reason."""

    def __init__(self, progress: Progress | None, note: str = "", width: int = 0) -> None:
        self._progress, self._note, self._width = progress, note, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._progress is not None:
            yield from self._drawn(self._progress, options.max_width)
        if self._note:
            yield _text(self._note)

    def _drawn(self, progress: Progress, most: int) -> Iterator[RenderableType]:
        if not progress.steps_planned:
            yield _text(str(progress))
            return
        position = Text(progress.position.rjust(self._width))
        details = Text(progress.details)
        beside = most >= _BAR + position.cell_len + details.cell_len + 4
        width = _BAR if beside else max(4, min(2 * _BAR, most - position.cell_len - 2))
        bar = ProgressBar(
            total=progress.steps_planned,
            completed=progress.step,
            width=width,
            complete_style=_STYLES[RunState.RUNNING],
        )
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(bar, position, *([details] if beside else []))
        yield line
        if details and not beside:
            yield details


def _summary(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    grid, failure = Table.grid(padding=(0, 1, 0, 0)), ""
    grid.add_column(no_wrap=True, style="dim", min_width=10)
    grid.add_column(overflow="fold")
    for key, text in summary_fields(summary):
        value: RenderableType = _text(text)
        if key == "failure":
            failure = text
            continue
        if key == "state":
            value = _state(RunState(text.lower()))
        elif key == "progress":
            known = {field.name: summary[key][field.name] for field in fields(Progress)}
            value = _Progress(Progress(**known))
        grid.add_row(Text(f"{key}:"), value)
    yield grid
    if failure:
        yield _text(failure, style="red")
    if points := summary.get("points"):
        cells = [
            (point["name"], RunState(point["state"].lower()), None, point_text(point))
            for point in points
        ]
        yield Text()
        yield _Table(cells, "POINT")


def _state(state: RunState) -> Text:
    return Text(state.upper(), style=_STYLES[state])


def _text(text: str, style: str = "") -> Text:
    return Text(control.printable(text), style=style, overflow="fold")
