"""Child processes that are stopped with patience, and a wait that signals end early."""

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import Iterator, List, Mapping, Optional, Sequence

POLL_S = 0.2
MOST_TERMS = 3
"""So often SIGTERM is sent, a pause between each two, before SIGKILL."""


class Signals:
    """Notes the signals that this process gets, and ends waits at once."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self.seen: List[int] = []
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write)
        for number in numbers:
            signal.signal(number, lambda number, _: self.seen.append(number))

    def wait(self, limit_s: float) -> None:
        """Wait for a signal, at most so many seconds."""
        with contextlib.suppress(InterruptedError):
            select.select([self._read], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def take(self) -> Iterator[int]:
        """Yield the signals that have come, each once."""
        while self.seen:
            yield self.seen.pop(0)


def status_of(returncode: int) -> int:
    """Return an exit status as a shell tells it: 128 and its number for a signal."""
    return 128 - returncode if returncode < 0 else returncode


class Children:
    """The processes that this one has started; the first failure stops the others.

    torchrun loses a signal that comes while it writes to its log, leaves its ranks alone at a
    second one that comes early, and after some errors waits for its own threads. So SIGTERM is sent
    again only after a pause, and SIGKILL at last.
    """

    def __init__(self, pause_s: float) -> None:
        self.running: List[subprocess.Popen[bytes]] = []
        self.status = 0
        """The exit status of the first that failed."""
        self._pause_s, self._signals, self._again_s = pause_s, 0, 0.0

    def start(self, argv: Sequence[str], log: Optional[str], environ: Mapping[str, str]) -> None:
        """Start a process that writes its output to the end of a file, or where this one does.

        Raises:
            OSError: the program is not there, or cannot be executed.
        """
        with contextlib.ExitStack() as opened:
            output = opened.enter_context(open(log, "ab")) if log else None
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environ)
            )
        self.running.append(process)

    def look(self) -> bool:
        """Take note of the processes that have ended; return whether any still runs."""
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
        """Reap the processes that a container's first process inherits, and no others."""
        own = {process.pid for process in self.running}
        with contextlib.suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in own:
                    return
                os.waitpid(ended.si_pid, 0)

    def stop(self) -> None:
        """Ask all processes to stop, if that has not been done yet."""
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
    """Whether the process that has started this one still lives."""
    return parent is None or os.getppid() == parent
