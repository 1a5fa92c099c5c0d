"""The points of a sweep on this machine: each is a run under `keep`, as many at once as fit.

Points that run at the same time have separate GPUs.
"""

import contextlib
import glob
import itertools
import os
import signal
import subprocess
import sys
import time
from typing import IO, Dict, List, NamedTuple, Optional, Sequence

from . import run_lock
from .attempt import folder_of, next_number
from .evidence.files import read
from .keeper import die_with_parent
from .process import POLL_S, Signals, parent_lives, status_of

CANCEL = "cancel_requested"
_END_S = 5.0
"""How long a supervisor may take to exit after its last point has ended."""

LAUNCHER_LOG = "logs/launcher.log"
"""The script's own output, such as a refusal to start."""


class Options(NamedTuple):
    """Options from the command line."""

    run_dir: str
    mode: str
    """`continue` for the points that have not succeeded; empty for a new sweep."""
    command: Sequence[str]
    """The script; a point's folder and the mode are appended."""
    points: Sequence[str]
    """The names of the points, which are also their folder names."""
    most: Optional[int]
    """Maximum number of concurrent points; None: as many as fit."""
    cores: int
    gpus: int
    """GPUs per point."""
    stop_timeout_s: float
    time_limit_s: float
    """Time limit of each point."""
    tied_to: Optional[int]
    """The pid of the parent, if the sweep ends with it."""
    lock: Optional[int]
    """The file descriptor with the sweep's lock; None if nobody holds the lock yet."""


def main(options: Options) -> int:
    """Run all points; return the exit status of the first that failed."""
    os.umask(os.umask(0) | 0o022)
    options = options._replace(run_dir=os.path.abspath(options.run_dir))
    signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    if options.tied_to is not None:
        die_with_parent()
        if not parent_lives(options.tied_to):
            return 1
    with contextlib.ExitStack() as held:
        if options.lock is None:  # a script that was started by hand
            os.makedirs(options.run_dir, exist_ok=True)
            lock = _hold(options.run_dir)
            if lock is None:
                print(f"{options.run_dir}: its points run already", file=sys.stderr)
                return 1
            run_lock.note_pid(held.enter_context(lock), os.getpid())
        return _Sweep(options, signals).run()


def gpus_here() -> List[str]:
    """Return the available NVIDIA GPUs, without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        # CUDA ignores all from the first negative number on; -1 alone hides every GPU.
        usable = itertools.takewhile(lambda gpu: not gpu.startswith("-"), chosen.split(","))
        return list(filter(None, usable))
    found = [path[len("/dev/nvidia") :] for path in glob.glob("/dev/nvidia[0-9]*")]
    # CUDA counts from 0, also in a container with /dev/nvidia5 alone.
    return [str(index) for index in range(sum(map(str.isdecimal, found)))]


def count_gpus() -> int:
    """Return the number of available GPUs."""
    return len(gpus_here())


def at_once(options: Options, gpus: int) -> int:
    """Return the number of concurrent points: at least one."""
    fit = [len(options.points)]
    if options.cores:
        has = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        fit.append((has or 1) // options.cores)
    if options.gpus:
        fit.append(gpus // options.gpus)
    if options.most is not None:
        fit.append(options.most)
    return max(1, min(fit))


def _hold(run_dir: str) -> Optional[IO[bytes]]:
    """Hold the lock of a sweep; None if another process holds it and does not exit soon."""
    until = time.monotonic() + _END_S
    while True:
        try:
            return run_lock.hold(run_dir, again=True)
        except BlockingIOError:
            if time.monotonic() > until:
                return None
        time.sleep(POLL_S)


class _Sweep:
    def __init__(self, options: Options, signals: Signals) -> None:
        self.options, self.signals = options, signals
        self.gpus = gpus_here()
        self.running: Dict[int, subprocess.Popen[bytes]] = {}
        """The keeper process of each running point, by its share of the machine."""

    def run(self) -> int:
        """Start the points one by one as resources permit; a signal stops them all."""
        options, status, ending = self.options, 0, False
        waiting = [name for name in options.points if not self._has_ended(name)]
        shares = range(at_once(options, len(self.gpus)))
        while self.running or (waiting and not ending):
            for share, process in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[share]
                    status = status or status_of(process.returncode)
            if any(self.signals.take()) and not ending:
                ending = True
                for process in self.running.values():
                    process.terminate()
            for share in shares:
                if waiting and not ending and share not in self.running:
                    name = waiting.pop(0)
                    try:
                        self._start(name, share)
                    except OSError as error:  # about this point's folder; other points may start
                        print(f"{name} cannot be started: {error}", file=sys.stderr)
                        status = status or 1
            self.signals.wait(POLL_S)
        return status or int(ending)

    def _has_ended(self, name: str) -> bool:
        """Whether a point has nothing left to do; the mode `continue` revokes a cancellation."""
        folder = os.path.join(self.options.run_dir, name)
        if self.options.mode != "continue":
            return os.path.exists(os.path.join(folder, CANCEL))
        for place in (self.options.run_dir, folder):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(place, CANCEL))
        last = folder_of(folder, max(next_number(folder) - 1, 0))
        return read(os.path.join(last, "exit_status"), 100).strip() == "0"

    def _start(self, name: str, share: int) -> None:
        options, folder = self.options, os.path.join(self.options.run_dir, name)
        if os.path.exists(os.path.join(folder, CANCEL)):
            return  # cancelled while it waited
        os.makedirs(os.path.join(folder, "logs"), exist_ok=True)
        environ = dict(os.environ)
        if options.gpus:
            own = self.gpus[share * options.gpus : (share + 1) * options.gpus]
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        with run_lock.hold(folder, again=True) as lock, open(
            os.path.join(folder, LAUNCHER_LOG), "ab"
        ) as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-Ium", "toolkit.supervisor", "keep", folder),
                    *(f"--stop-timeout={options.stop_timeout_s}", f"--lock={lock.fileno()}"),
                    *(f"--time-limit={options.time_limit_s}", f"--tied-to={os.getpid()}", "--"),
                    *(*options.command, folder, *filter(None, [options.mode])),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock.fileno()],
                start_new_session=True,
                env=environ,
            )
            run_lock.note_pid(lock, process.pid)
        self.running[share] = process
