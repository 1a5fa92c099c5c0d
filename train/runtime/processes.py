"""The processes of a run: the signals that stop them, and `--spawn`, which starts the ranks itself.

The ranks that `--spawn N` starts are new interpreters (start method `spawn`): a fork of a process
that has threads, or has touched a GPU, is broken. Python pickles what a child is given, so a child
gets the command line only. A model or a DataLoader would be copied to every rank, with its sampler
made before there were ranks and its generator in the same state everywhere; each rank makes its own
instead.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType

from train.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from train.runtime.rank import MEETING

# Every signal by which a scheduler, torchrun or a person may ask a run to stop.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
# Poll interval for a stop request, in seconds.
LOOK_S = 0.05
# How long the other ranks have after a failure: most fail by themselves, with a message.
NOTICE_S = 10.0
# As long as torchrun waits for ranks that it has signalled.
GRACE_S = 30.0


class StopRequest:
    """Records a stop request; the training loop agrees with the other ranks on when.

    Until `wait_for_the_loop()` the ranks cannot agree: the process may sit inside
    `init_process_group`, waiting in C++ for a peer that the same signal has ended, where a Python
    signal handler never runs. A thread that the C-level handler wakes through a pipe ends it
    instead.
    """

    def __init__(self) -> None:
        """Start without a request; `install()` makes signals arrive here."""
        self._signal: int | None = None
        self._at_once: Callable[[str], None] | None = None

    @property
    def requested(self) -> bool:
        """Whether any stop signal has arrived on this rank."""
        return self._signal is not None

    @property
    def signal_name(self) -> str | None:
        """The first signal's name, such as `SIGTERM`; None when this rank got none."""
        return None if self._signal is None else signal.Signals(self._signal).name

    @property
    def signal_number(self) -> int | None:
        """The first signal, as a number to pass on; None when this rank got none."""
        return self._signal

    def install(self, at_once: Callable[[str], None]) -> None:
        """Take over the stop signals; `at_once(name)` is called before an early exit."""
        self._at_once = at_once
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="stop-watch", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._note)
        # `--spawn` starts its ranks with blocked signals: none must end one that cannot answer yet.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def wait_for_the_loop(self) -> None:
        """From now on a signal only sets `requested`: the ranks agree on the step to stop at."""
        self._at_once = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A second signal changes nothing: the first one's checkpoint is being written.
        if self._signal is None:
            self._signal = number

    def _watch(self, reader: int) -> None:
        while received := os.read(reader, 1):
            if received[0] not in SIGNALS:
                continue
            if self._signal is None:
                self._signal = received[0]
            at_once = self._at_once
            if at_once is not None:
                try:
                    at_once(signal.Signals(received[0]).name)
                finally:
                    # Not sys.exit: the main thread may never come back from C++.
                    os._exit(EXIT_PREEMPTED)


def spawn(count: int, argv: Sequence[str], stop: StopRequest) -> int:
    """Run `count` ranks of `python -m train ARGV` on this machine, and return the exit status.

    The status is that of the rank that failed first; the others are ended then. A stop signal is
    passed on. If this process is killed, each rank gets a stop request.
    """
    # Only here, as it imports torch.
    from torch.multiprocessing.spawn import start_processes

    # Several ranks on one machine: each with all its cores would only be in the others' way.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        # From now on signals can be forwarded. The children inherit blocked signals, and take them
        # when they install their `StopRequest`.
        stop.wait_for_the_loop()
        # Else the first child would start the tracker, and Python unblocks SIGINT and SIGTERM then.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            children = start_processes(  # type: ignore[no-untyped-call]
                _be_a_rank,
                args=(count, f"file://{folder}/meeting", tuple(argv)),
                nprocs=count,
                join=False,
                start_method="spawn",
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return _watch(children.processes, stop)
        finally:
            for process in children.processes:
                process.kill()
                process.join()


def _be_a_rank(rank: int, count: int, meeting: str, argv: tuple[str, ...]) -> None:
    # What a launcher would set: nothing else depends on how the program was started.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        MEETING: meeting,
    }
    sys.argv[1:] = argv
    runpy.run_module("train", run_name="__main__")


def _watch(processes: Sequence[BaseProcess], stop: StopRequest) -> int:
    """Wait until all have ended, or the first has failed and the others have had their time."""
    forwarded, status, failed_at = False, EXIT_DONE, float("inf")
    # The signals for ranks that stay too long after a failure.
    due = [(NOTICE_S, signal.SIGTERM), (NOTICE_S + GRACE_S, signal.SIGKILL)]
    while alive := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in alive], timeout=LOOK_S)
        if not forwarded and stop.signal_number is not None:
            _send(alive, stop.signal_number)
            forwarded = True
        if status == EXIT_DONE and (status := _failure(processes)) != EXIT_DONE:
            failed_at = time.monotonic()
        if due and time.monotonic() - failed_at > due[0][0]:
            _send(alive, due.pop(0)[1])
    return status or _failure(processes)


def _failure(processes: Sequence[BaseProcess]) -> int:
    """Return the status of a process that has failed, if one has."""
    codes = [process.exitcode for process in processes if process.exitcode]
    # Below 0: killed by a signal.
    statuses = [code if code > 0 else EXIT_FAILED for code in codes]
    # Of several at once, prefer a rank that was not merely stopped.
    return min(statuses, key=lambda status: status == EXIT_PREEMPTED, default=EXIT_DONE)


def _send(processes: Sequence[BaseProcess], number: int) -> None:
    for process in processes:
        # Another process gets the number only after we have seen the end, by `exitcode`.
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)
