"""Child processes with a patient stop, and a wait that signals interrupt."""

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import Iterator, List, Mapping, Optional, Sequence

POLL_S = 0.2
MOST_TERMS = 3
"""How often to send SIGTERM, with pauses in between, before SIGKILL."""


class Signals:
    """Records the signals that this process gets, and ends waits at once."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self.seen: List[int] = []
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write)
        for number in numbers:
            signal.signal(number, lambda number, _: self.seen.append(number))

    def wait(self, limit_s: float) -> None:
        """Wait for a signal, at most this many seconds."""
        with contextlib.suppress(InterruptedError):
            select.select([self._read], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def take(self) -> Iterator[int]:
        """Yield the signals received, each once."""
        while self.seen:
            yield self.seen.pop(0)


def status_of(returncode: int) -> int:
    """Return an exit status in the form of a shell: 128 + N for signal N."""
    return 128 - returncode if returncode < 0 else returncode


class Children:
    """The child processes of this process; the first failure stops the others.

    torchrun loses a signal that arrives while it writes to its log, abandons its ranks if a second
    one arrives early, and after some errors waits for its own threads. So SIGTERM is repeated only
    after a pause, and SIGKILL comes last.
    """

    def __init__(self, pause_s: float) -> None:
        self.running: List[subprocess.Popen[bytes]] = []
        self.status = 0
        """The exit status of the first failed process."""
        self._pause_s, self._signals, self._again_s = pause_s, 0, 0.0

    def start(self, argv: Sequence[str], log: Optional[str], environ: Mapping[str, str]) -> None:
        """Start a process that appends its output to a file, or shares this process's output.

        Raises:
            OSError: the program is missing, or cannot be executed.
        """
        with contextlib.ExitStack() as opened:
            output = opened.enter_context(open(log, "ab")) if log else None
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environ)
            )
        self.running.append(process)

    def look(self) -> bool:
        """Reap ended processes; return whether any still runs."""
        for process in list(self.running):
            returncode = process.poll()
            if returncode is None:
                continue
            self.running.remove(process)
            if returncode:
                self.status = self.status or status_of(returncode)
                self.stop()
        if self._signals and time.monotonic() >= self._again_s:
            self._signal(signal.SIGTERM if self._signals < MOST_TERMS else signal.SIGKILL)
        if os.getpid() == 1:
            self._reap_orphans()
        return bool(self.running)

    def _reap_orphans(self) -> None:
        """Reap the orphans that a container's first process inherits, and no other processes."""
        own = {process.pid for process in self.running}
        with contextlib.suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in own:
                    return
                os.waitpid(ended.si_pid, 0)

    def stop(self) -> None:
        """Ask all processes to stop, if not yet done."""
        if not self._signals:
            self._signal(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send all processes a signal."""
        for process in self.running:
            with contextlib.suppress(OSError):
                process.send_signal(number)

    def _signal(self, number: signal.Signals) -> None:
        self._signals += 1
        self._again_s = time.monotonic() + self._pause_s
        self.send(number)


def parent_lives(parent: Optional[int]) -> bool:
    """Whether the parent process is still alive."""
    return parent is None or os.getppid() == parent
