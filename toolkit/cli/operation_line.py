"""The line on stderr about a long operation of a command, so that no terminal stays silent."""

from __future__ import annotations  # naming a type must not import it

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.cli.output import note
from toolkit.runs import long_operation
from toolkit.text import control

if TYPE_CHECKING:
    from toolkit.cli.live import LiveLine


class Operations:
    """The operations of a command: a line at a terminal, elsewhere a note when one begins."""

    def __init__(self) -> None:
        dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
        self._draws = sys.stderr.isatty() and not dumb
        self._line: LiveLine | None = None
        self._noted: set[str] = set()

    @contextlib.contextmanager
    def view(self, what: str) -> Iterator[long_operation.Report]:
        """Show an operation while it runs."""
        what = control.printable(what)
        if not self._draws:
            if what not in self._noted:
                note((what,))
            self._noted.add(what)
            yield lambda done, total, text: None
            return
        from toolkit.cli.live import LiveLine

        line = self._line = LiveLine(what)

        def draw(done: float, total: float | None, text: str) -> None:
            with _undisturbed():
                line.draw(done, total, control.printable(text))

        try:
            draw(0, None, "")
            yield draw
        finally:
            self.clear()
            self._line = None

    def clear(self) -> None:
        """Make room for other lines on stderr; the next report draws the line again."""
        if self._line is not None:
            with _undisturbed():
                self._line.clear()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C wait until a line is drawn or taken away: half of the line would stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def shown() -> Iterator[Operations]:
    """Show the long operations of this block."""
    made = Operations()
    with long_operation.shown_by(made.view):
        yield made
