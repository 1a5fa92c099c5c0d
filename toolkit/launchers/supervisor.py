"""The process that keeps a local run: it passes on the request to stop, and leaves nothing behind.

Run as `python -m toolkit.launchers.supervisor SCRIPT RUN_DIR`. On Linux every orphan of the run
becomes this process's child (`PR_SET_CHILD_SUBREAPER`), so that none can escape the last sweep.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _children() -> list[int]:
    """Return the process ids of all our children, adopted orphans among them."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def _sweep() -> None:
    """Kill every descendant; killing a parent hands its children to us, so until none is left."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def supervise(script: str, run_dir: str, *, stop_timeout_s: float) -> int:
    """Run `script` to its end and return its exit status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(["bash", script, run_dir], preexec_fn=_die_with_parent)
    asked: list[float] = []

    def stop(*_: object) -> None:
        asked.append(time.monotonic())
        child.terminate()

    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    status = _wait(child, lambda: bool(asked) and time.monotonic() > asked[0] + stop_timeout_s)
    _sweep()
    return status


def _wait(child: "subprocess.Popen[bytes]", overdue: Callable[[], bool]) -> int:
    while True:
        try:
            return child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if overdue():
                child.kill()


def main() -> int:
    """Read the command line and supervise."""
    parser = argparse.ArgumentParser(prog="supervisor")
    parser.add_argument("script")
    parser.add_argument("run_dir")
    parser.add_argument("--stop-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--keep-fd", type=int, help="the lock that says we live")
    parser.add_argument("--tied", action="store_true", help="stop when the parent ends")
    options = parser.parse_args()
    if options.tied:
        _die_with_parent()
    status = supervise(options.script, options.run_dir, stop_timeout_s=options.stop_timeout)
    left = Path(options.run_dir) / "logs" / "attempt-0"
    if not (left / "exit_status").exists():  # the script was killed, or refused to start
        left.mkdir(parents=True, exist_ok=True)
        (left / "exit_status").write_text(f"{status}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
