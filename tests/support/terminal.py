"""A program at a terminal of its own: what it draws there, and how it ends."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|.)")

OTHER_SCREEN, OWN_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A terminal with a program in it; `drawn` is all that the program has written there."""

    def __init__(
        self, argv: Sequence[str | Path], *, columns: int = 100, rows: int = 24, **environ: str
    ) -> None:
        self._handle, inside = pty.openpty()
        self._inside = inside  # kept, so that the program's end is no error here
        self.resize(columns, rows)
        unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        self.process = subprocess.Popen(
            argv,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**kept, "TERM": "xterm-256color", **environ},
        )
        self.drawn = ""

    def resize(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._inside, termios.TIOCSWINSZ, size)

    def read(self) -> str:
        """Read on, and return all that was drawn until now."""
        os.set_blocking(self._handle, False)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._handle, 1 << 16):
                self.drawn += chunk.decode(errors="replace")
        return self.drawn

    def screen(self) -> str:
        """Return the text of what was drawn last, from the upper left corner on."""
        return SEQUENCE.sub("", self.read().rpartition("\x1b[H")[2]).replace("\r", "")

    def status(self) -> int:
        """Wait for the program, and return its exit status."""
        while self.process.poll() is None:
            self.read()  # it may wait for space
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        self.read()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._handle)
        os.close(self._inside)


@contextlib.contextmanager
def at_terminal(
    argv: Sequence[str | Path], *, columns: int = 100, rows: int = 24, **environ: str
) -> Iterator[Terminal]:
    terminal = Terminal(argv, columns=columns, rows=rows, **environ)
    try:
        yield terminal
    finally:
        terminal.close()
