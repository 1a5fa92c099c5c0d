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
from functools import partial
from pathlib import Path

from toolkit.runs.log_reader import attempt_folders

SCRIPT_LOCK = 9
"""The file descriptor by which the script holds the run's lock; its torchruns close it."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_descendants() -> None:
    """Kill every descendant; killing a parent hands its children to us, so until none is left."""
    while True:
        for task in Path("/proc/self/task").glob("*/children"):
            for pid in map(int, task.read_text(encoding="utf-8").split()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _starts_again(run_dir: Path) -> bool:
    """Whether the script decided that another attempt follows, and no cancel was requested."""
    attempts = attempt_folders(run_dir)
    if not attempts or (run_dir / "cancel_requested").exists():
        return False
    with contextlib.suppress(OSError):
        return (attempts[-1] / "start_again").exists()
    return False


def identity(run_dir: Path) -> tuple[int, int] | None:
    """Return what makes a folder this one, and not another one of its name; None without one."""
    with contextlib.suppress(OSError):
        info = run_dir.stat()
        return info.st_dev, info.st_ino
    return None


def supervise(
    script: str,
    run_dir: Path,
    *,
    stop_timeout_s: float,
    time_limit_s: float,
    locked: bool = False,
) -> int:
    """Run `script RUN_DIR` to its end, again as long as it decides so; return its exit status.

    An attempt is stopped after `time_limit_s`, and killed where its stop takes `stop_timeout_s`. It
    is killed at once if its run directory is removed, since a checkpoint would have no place.
    """
    folder = identity(run_dir)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stops: list[float] = []  # when the script was to stop
    ending = False  # by a signal, not by the time limit

    def stop(*_: object) -> None:
        nonlocal ending
        ending = True
        stops.append(time.monotonic())

    # Before there is anything to stop, so that no request is lost.
    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    # With the lock: should this process be killed, the run has not ended before the script.
    start = partial(
        subprocess.Popen, preexec_fn=_die_with_parent, pass_fds=[SCRIPT_LOCK] if locked else []
    )
    argv = ["bash", script, str(run_dir)]
    child = start(argv)
    ends_at = time.monotonic() + time_limit_s
    signalled = False
    while (status := child.poll()) is None or (not ending and _starts_again(run_dir)):
        now = time.monotonic()
        if identity(run_dir) != folder:
            child.kill()
            break
        if status is not None:
            _kill_descendants()
            signalled, ends_at = False, now + time_limit_s
            stops.clear()
            child = start([*argv, "restart"])
            continue
        if not stops and now > ends_at:
            print(f"time limit of {time_limit_s:.0f} s: stopping", flush=True)
            stops.append(now)
            with contextlib.suppress(OSError, IndexError):
                file = attempt_folders(run_dir)[-1] / "stopping"
                file.write_text("walltime\n", encoding="utf-8")
        if stops and not signalled:
            child.terminate()
            signalled = True
        if stops and now > stops[0] + stop_timeout_s:
            child.kill()
        time.sleep(_POLL_S)
    _kill_descendants()
    return 1 if status is None else status


def main() -> int:
    """Read the command line and supervise."""
    parser = argparse.ArgumentParser(prog="supervisor")
    parser.add_argument("script")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stop-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds")
    parser.add_argument("--tied-to", type=int, help="stop when this parent ends")
    parser.add_argument("--lock", type=int, help="the descriptor that holds the run's lock")
    options = parser.parse_args()
    os.umask(os.umask(0) | 0o022)  # what others can write is neither continued nor believed
    if options.tied_to:
        _die_with_parent()
        if os.getppid() != options.tied_to:  # the parent ended before its signal was requested
            return 1
    if options.lock is not None and options.lock != SCRIPT_LOCK:
        os.dup2(options.lock, SCRIPT_LOCK)
        os.close(options.lock)
    folder = identity(options.run_dir)
    status = supervise(
        options.script,
        options.run_dir,
        stop_timeout_s=options.stop_timeout,
        time_limit_s=options.time_limit,
        locked=options.lock is not None,
    )
    if identity(options.run_dir) != folder:
        return status  # the run directory was removed
    attempts = attempt_folders(options.run_dir) or [options.run_dir / "logs" / "attempt-0"]
    if not (attempts[-1] / "exit_status").exists():  # the script was killed, or refused to start
        attempts[-1].mkdir(parents=True, exist_ok=True)
        (attempts[-1] / "exit_status").write_text(f"{status}\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
