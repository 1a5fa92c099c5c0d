"""Keeps a run on this machine: restarts its script as the script decides, and cleans up.

On Linux every orphan of the run becomes this process's child (`PR_SET_CHILD_SUBREAPER`), so none
escapes the final cleanup.
"""

import contextlib
import ctypes
import glob
import math
import os
import signal
import subprocess
import sys
import time
from typing import List, NamedTuple, Optional, Sequence, Tuple

from .attempt import folder_of, next_number
from .process import MOST_TERMS, Children, Signals, parent_lives
from .run_lock import SCRIPT_LOCK

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_S = 0.1


class Options(NamedTuple):
    """Options from the command line."""

    run_dir: str
    command: Sequence[str]
    """The script and its arguments; later attempts also get the argument `restart`."""
    stop_timeout_s: float
    """How long the script may take to stop before it is killed."""
    time_limit_s: float
    """Time limit of an attempt, in seconds."""
    tied_to: Optional[int]
    """The pid of the parent, if the run ends with it."""
    lock: Optional[int]
    """The file descriptor that holds the run's lock."""


def main(options: Options) -> int:
    """Supervise the run to its end; return its exit status."""
    os.umask(os.umask(0) | 0o022)  # files that other users can write are not trusted
    # First of all, so that no stop request is lost.
    signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    if options.tied_to is not None:
        die_with_parent()
        if not parent_lives(options.tied_to):  # the parent ended before its signal was requested
            return 1
    if options.lock is not None and options.lock != SCRIPT_LOCK:
        os.dup2(options.lock, SCRIPT_LOCK)
        os.close(options.lock)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return _Keeper(options, signals).run()


class _Keeper:
    def __init__(self, options: Options, signals: Signals) -> None:
        self.options, self.signals = options, signals
        self.folder = _identity(options.run_dir)
        self.ending = False
        """Whether a signal has requested the end."""

    def run(self) -> int:
        """Run the script as often as it requests; return its last exit status."""
        command = list(self.options.command)
        status = self._attempt(command)
        if command[-1] == "continue":
            command.pop()
        while self._is_there() and not self._told_to_end() and self._starts_again():
            status = self._attempt([*command, "restart"])
        # The script was killed, or refused to start.
        if self._is_there() and not os.path.exists(self._file("exit_status")):
            os.makedirs(os.path.dirname(self._file("")), exist_ok=True)
            self._write("exit_status", str(status))
        return status

    def _attempt(self, command: List[str]) -> int:
        """Run the script to its end; return its exit status.

        The script is stopped after the time limit. It is killed at once if its run directory is
        removed, since it could not save a checkpoint.
        """
        options, limit_s = self.options, self.options.time_limit_s
        children, ends_at = (
            Children(options.stop_timeout_s / MOST_TERMS),
            time.monotonic() + limit_s,
        )
        # With the lock: if this process is killed, the run lasts until the script ends.
        locks = () if options.lock is None else (SCRIPT_LOCK,)
        script = subprocess.Popen(
            command, env=dict(os.environ), preexec_fn=die_with_parent, pass_fds=locks
        )
        children.running.append(script)
        while children.look():
            if not self._is_there():
                children.send(signal.SIGKILL)
            if time.monotonic() > ends_at:
                ends_at = math.inf
                print(f"time limit of {limit_s:.0f} s: stopping", flush=True)
                with contextlib.suppress(OSError):
                    self._write("stopping", "walltime")
                children.stop()
            if self._told_to_end():
                children.stop()
            self.signals.wait(_POLL_S)
        _kill_descendants()
        return children.status

    def _told_to_end(self) -> bool:
        self.ending = self.ending or any(self.signals.take())
        return self.ending

    def _is_there(self) -> bool:
        return _identity(self.options.run_dir) == self.folder

    def _starts_again(self) -> bool:
        """Whether the script requested another attempt, and no cancellation was requested."""
        if os.path.exists(os.path.join(self.options.run_dir, "cancel_requested")):
            return False
        return os.path.exists(self._file("start_again"))

    def _file(self, name: str) -> str:
        number = next_number(self.options.run_dir) - 1
        return os.path.join(folder_of(self.options.run_dir, max(number, 0)), name)

    def _write(self, name: str, text: str) -> None:
        with open(self._file(name), "w", encoding="utf-8") as file:
            file.write(text + "\n")


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent of this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill_descendants() -> None:
    """Kill all descendants; repeat, since the children of a killed parent become ours."""
    while True:
        for task in glob.glob("/proc/self/task/*/children"):
            with open(task, encoding="ascii") as file:
                pids = file.read().split()
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _identity(run_dir: str) -> Optional[Tuple[int, int]]:
    """Return the device and inode of a folder; None without one."""
    with contextlib.suppress(OSError):
        info = os.stat(run_dir)
        return info.st_dev, info.st_ino
    return None
