"""`--spawn N`: the ranks as children of this process, without torchrun.

They are new interpreters (start method `spawn`): a fork of a process that has threads, or has used
a GPU, is broken. Python pickles the arguments of a child, so a child gets only the command line. A
model or a DataLoader would be copied to every rank, with a sampler made before the ranks existed
and its generator in the same state everywhere. Instead, each rank makes its own.
"""

import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from ..errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from .rank import MEETING
from .signals import SIGNALS, StopRequest

LOOK_S = 0.05
"""Poll interval for a stop request, in seconds."""
NOTICE_S = 10.0
"""Time for the other ranks to end after a failure: most fail by themselves, with a message."""
GRACE_S = 30.0
"""How long to wait for ranks to end after a signal, the same as torchrun."""


def spawn(count: int, argv: Sequence[str], stop: StopRequest) -> int:
    """Run `count` ranks of `python -m train ARGV` on this machine, and return the exit status.

    The status is that of the first rank to fail; the other ranks are then ended. A stop signal is
    forwarded. If this process is killed, each rank gets a stop request.
    """
    # Import this late, as it imports torch.
    from torch.multiprocessing.spawn import start_processes

    # Ranks on one machine share its cores; each with a thread per core would slow all of them down.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        # From now on signals can be forwarded. The children inherit blocked signals, and take them
        # when they install their `StopRequest`.
        stop.wait_for_the_loop()
        # Otherwise the first child starts the tracker, and Python then unblocks SIGINT and SIGTERM.
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
    # Set the variables of a launcher: nothing else depends on how the program was started.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        MEETING: meeting,
    }
    sys.argv[1:] = argv
    runpy.run_module(__name__.partition(".")[0], run_name="__main__")


def _watch(processes: Sequence[BaseProcess], stop: StopRequest) -> int:
    """Wait until all ranks have ended, or one has failed and the grace period is over."""
    forwarded, status, failed_at = False, EXIT_DONE, float("inf")
    told: set[int] = set()
    # The signals for ranks that stay too long after a failure.
    due = [(NOTICE_S, signal.SIGTERM), (NOTICE_S + GRACE_S, signal.SIGKILL)]
    while alive := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in alive], timeout=LOOK_S)
        _tell_of_kills(processes, told)
        if not forwarded and stop.signal_number is not None:
            _send(alive, stop.signal_number)
            forwarded = True
        if status == EXIT_DONE and (status := _failure(processes)) != EXIT_DONE:
            failed_at = time.monotonic()
        if due and time.monotonic() - failed_at > due[0][0]:
            number = due.pop(0)[1]
            told.update(rank for rank, process in enumerate(processes) if process in alive)
            _send(alive, number)
    _tell_of_kills(processes, told)
    return status or _failure(processes)


def _tell_of_kills(processes: Sequence[BaseProcess], told: set[int]) -> None:
    """Print the ranks that a foreign signal has ended: such a rank has printed nothing."""
    for rank, process in enumerate(processes):
        if rank not in told and process.exitcode is not None and process.exitcode < 0:
            told.add(rank)
            number = -process.exitcode
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            memory = ", perhaps by the kernel (out of memory)" * (number == signal.SIGKILL)
            print(f"train: rank {rank} was ended by signal {name}{memory}", file=sys.stderr)


def _failure(processes: Sequence[BaseProcess]) -> int:
    codes = [process.exitcode for process in processes if process.exitcode]
    # Below 0: killed by a signal.
    statuses = [code if code > 0 else EXIT_FAILED for code in codes]
    # If several have ended at once, prefer a rank that was not merely stopped.
    return min(statuses, key=lambda status: status == EXIT_PREEMPTED, default=EXIT_DONE)


def _send(processes: Sequence[BaseProcess], number: int) -> None:
    for process in processes:
        # Another process gets the number only after we have seen the end, by `exitcode`.
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)
