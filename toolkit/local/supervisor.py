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
from toolkit.text import untrusted

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
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        found += map(int, task.read_text(encoding="utf-8").split())
    return found


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


def _can_go_on(run_dir: str) -> bool:
    """Whether another attempt can start after the newest one, and no cancel was requested."""
    if (Path(run_dir) / "cancel_requested").exists():
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        said = untrusted.mapping(untrusted.read_json(Path(run_dir) / "outcome.json"))
        newest = _newest(run_dir).name == f"attempt-{said.get('attempt')}"
        return newest and said.get("status") == "preempted"
    return False


def supervise(
    script: str,
    run_dir: str,
    *,
    stop_timeout_s: float,
    time_limit_s: float = math.inf,
    requeue: int = 0,
) -> int:
    """Run `script` to its end and return its exit status.

    Args:
        script: What to run.
        run_dir: Its first argument.
        stop_timeout_s: How long it may take to stop.
        time_limit_s: Handler of the stop signals.
        requeue: How often it starts again after that, if it can go on.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    asked: list[float] = []  # when we were asked to stop

    def stop(*_: object) -> None:
        asked.append(time.monotonic())

    # Before there is anything to stop, so that no request is lost.
    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    child = subprocess.Popen(["bash", script, run_dir], preexec_fn=_die_with_parent)
    ends_at = time.monotonic() + time_limit_s
    told = out_of_time = False
    while (status := child.poll()) is None or (out_of_time and requeue and _can_go_on(run_dir)):
        now = time.monotonic()
        if status is not None:
            _sweep()
            requeue, told, out_of_time, ends_at = requeue - 1, False, False, now + time_limit_s
            asked.clear()
            argv = ["bash", script, run_dir, "continue"]
            child = subprocess.Popen(argv, preexec_fn=_die_with_parent)
            continue
        if not asked and now > ends_at:
            print(f"time limit of {time_limit_s:.0f} s: stopping", flush=True)
            asked.append(now)
            out_of_time = True
            with contextlib.suppress(OSError, IndexError):
                (_newest(run_dir) / "stopping").write_text("walltime\n", encoding="utf-8")
        if asked and not told:
            child.terminate()
            told = True
        if asked and now > asked[0] + stop_timeout_s:
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
    parser.add_argument("--requeue", type=int, default=0, help="new starts after the time limit")
    parser.add_argument("--tied-to", type=int, help="stop when this parent ends")
    options = parser.parse_args()
    if options.tied_to:
        _die_with_parent()
        if os.getppid() != options.tied_to:  # it ended before we could ask to be told
            return 1
    status = supervise(
        options.script,
        options.run_dir,
        stop_timeout_s=options.stop_timeout,
        time_limit_s=options.time_limit,
        requeue=options.requeue,
    )
    left = Path(options.run_dir) / "logs" / "attempt-0"
    if not (left / "exit_status").exists():  # the script was killed, or refused to start
        left.mkdir(parents=True, exist_ok=True)
        (left / "exit_status").write_text(f"{status}\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
