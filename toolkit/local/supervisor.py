"""The process that keeps a local run: it passes on the request to stop, and leaves nothing behind.

Run as `python -m toolkit.local.supervisor SCRIPT RUN_DIR`. On Linux every orphan of the run
becomes this process's child (`PR_SET_CHILD_SUBREAPER`), so that none can escape the last sweep.
"""

import argparse
import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from toolkit.runs.log_reader import attempt_folders

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _children() -> list[int]:
    """Return the process ids of all our children, adopted orphans among them."""
    pids: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        pids += map(int, task.read_text(encoding="utf-8").split())
    return pids


def _sweep() -> None:
    """Kill every descendant; killing a parent hands its children to us, so until none is left."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _newest(run_dir: str) -> Path:
    """Return the folder of the newest attempt."""
    return attempt_folders(Path(run_dir))[-1]


def _starts_again(run_dir: str) -> bool:
    """Whether the script decided that another attempt follows, and no cancel was requested."""
    if (Path(run_dir) / "cancel_requested").exists():
        return False
    with contextlib.suppress(OSError, IndexError):
        return (_newest(run_dir) / "start_again").exists()
    return False


def supervise(
    script: str,
    run_dir: str,
    *,
    stop_timeout_s: float,
    time_limit_s: float = math.inf,
) -> int:
    """Run `script` to its end, again and again as the script decides; return its exit status.

    Args:
        script: What to run.
        run_dir: Its first argument.
        stop_timeout_s: How long it may take to stop.
        time_limit_s: How long each attempt may take before it is stopped.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stops: list[float] = []  # when the script was to stop
    told_to_end = False  # not by the time limit

    def stop(*_: object) -> None:
        nonlocal told_to_end
        told_to_end = True
        stops.append(time.monotonic())

    # Before there is anything to stop, so that no request is lost.
    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    child = subprocess.Popen(["bash", script, run_dir], preexec_fn=_die_with_parent)
    ends_at = time.monotonic() + time_limit_s
    signalled = False
    while (status := child.poll()) is None or (not told_to_end and _starts_again(run_dir)):
        now = time.monotonic()
        if status is not None:
            _sweep()
            signalled, ends_at = False, now + time_limit_s
            stops.clear()
            argv = ["bash", script, run_dir, "restart"]
            child = subprocess.Popen(argv, preexec_fn=_die_with_parent)
            continue
        if not stops and now > ends_at:
            print(f"time limit of {time_limit_s:.0f} s: stopping", flush=True)
            stops.append(now)
            with contextlib.suppress(OSError, IndexError):
                (_newest(run_dir) / "stopping").write_text("walltime\n", encoding="utf-8")
        if stops and not signalled:
            child.terminate()
            signalled = True
        if stops and now > stops[0] + stop_timeout_s:
            child.kill()
        time.sleep(_POLL_S)
    _sweep()
    return status


def main() -> int:
    """Read the command line and supervise."""
    parser = argparse.ArgumentParser(prog="supervisor")
    parser.add_argument("script")
    parser.add_argument("run_dir")
    parser.add_argument("--stop-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds")
    parser.add_argument("--tied-to", type=int, help="stop when this parent ends")
    options = parser.parse_args()
    if options.tied_to:
        _die_with_parent()
        if os.getppid() != options.tied_to:  # it ended before we could ask for its signal
            return 1
    status = supervise(
        options.script,
        options.run_dir,
        stop_timeout_s=options.stop_timeout,
        time_limit_s=options.time_limit,
    )
    first = Path(options.run_dir) / "logs" / "attempt-0"
    attempts = attempt_folders(Path(options.run_dir)) or [first]
    if not (attempts[-1] / "exit_status").exists():  # the script was killed, or refused to start
        attempts[-1].mkdir(parents=True, exist_ok=True)
        (attempts[-1] / "exit_status").write_text(f"{status}\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
