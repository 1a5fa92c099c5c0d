"""Keeps the child processes of a rank alive until the rank has ended, during a stop of the run.

torchrun forwards a signal to a rank's process group, and slurmstepd, without proctrack/cgroup,
sends it to every process of a step. So a stop would also end DataLoader workers; torch would then
raise an error in the rank, and the rank would die before its handler has written a checkpoint. The
process that collects a tracker's metrics would end before sending the last ones.

In every Python child process, however started, the stop signals are blocked and a thread waits for
them. The thread holds a signal from an ancestor of the rank until the rank has ended. Any other
signal, such as that of `Process.terminate()` in the rank, takes effect at once.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from os import kill  # as it is without unblock_within_calls()

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1})
"""Signals that torchrun forwards to ranks, by default or by its option --signals-to-handle."""

WAKE = signal.SIGRTMIN + 21
"""Makes the main thread handle a signal sent to it, and interrupts its blocking call."""

CALLS = (
    (_posixsubprocess, "fork_exec"),
    (os, "execv"),
    (os, "execve"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "kill"),
    (signal, "raise_signal"),
)

_starting = threading.local()
"""`program` is set while this thread starts a program, which inherits the blocked signals."""

POLL_S, POLL_KEPT_S = 5.0, 0.1
"""Interval between two checks whether the rank has ended, without and with a held signal."""


def protect(rank: int, ancestors: Collection[int]) -> None:
    """In a rank, make each child process hold signals; in a new child process, start to do so."""

    def keep_signals() -> None:
        if getattr(_starting, "program", False):  # within subprocess, with a preexec_fn
            return
        signal.signal(WAKE, take_in_main_thread)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        unblock_within_calls()
        keep_from_tracker()
        # Not `threading`: this thread must stay out of the script's list of threads.
        _thread.start_new_thread(wait_for_signals, (rank, ancestors))

    note_programs()
    os.register_at_fork(after_in_child=keep_signals)
    if os.getpid() != rank:
        keep_signals()


def wait_for_signals(rank: int, ancestors: Collection[int]) -> None:
    """Handle a signal of the rank's ancestors once the rank has ended, and others at once."""
    kept: list[int] = []
    while True:
        info = signal.sigtimedwait(SIGNALS, POLL_KEPT_S if kept else POLL_S)
        # 0: a sender outside this PID namespace, such as slurmstepd if ranks are in a container.
        if info is not None and (info.si_pid == 0 or info.si_pid in ancestors):
            kept.append(info.si_signo)
        elif info is not None:
            take(info.si_signo)
        if (kept or is_loader_worker()) and not is_alive(rank):
            if is_loader_worker():  # it would otherwise hang in its dataset
                os._exit(0)
            for number in kept:
                take(number)
            kept.clear()


def is_alive(pid: int) -> bool:
    """Whether a process exists and belongs to this user."""
    try:
        kill(pid, 0)
    except OSError:
        return False
    return True


def take(number: int) -> None:
    """Give a signal the effect that it would have without this module."""
    if number == signal.SIGTERM and is_loader_worker():
        os._exit(0)  # as in torch, which treats the rank's SIGTERM as a worker's normal end
    if callable(signal.getsignal(number)):  # the handler runs in the main thread
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, number)
            signal.pthread_kill(main, WAKE)
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    signal.pthread_kill(threading.get_ident(), number)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def is_loader_worker() -> bool:
    """Whether this process is a worker of a DataLoader of torch."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def take_in_main_thread(*_: object) -> None:
    """Handle the signal that take() has sent to this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS & signal.sigpending())
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def note_programs() -> None:
    """Let the hook of a fork know when `subprocess` starts a program.

    With a `preexec_fn`, Python runs the hooks of a fork before the program.
    """
    start: Callable[..., int] = _posixsubprocess.fork_exec
    if hasattr(start, "notes"):
        return

    def starting(*args: object) -> int:
        _starting.program = True
        try:
            return start(*args)
        finally:
            _starting.program = False

    starting.notes = True  # type: ignore[attr-defined]
    _posixsubprocess.fork_exec = starting
    if hasattr(sys.modules.get("subprocess"), "_fork_exec"):
        sys.modules["subprocess"]._fork_exec = starting  # type: ignore[attr-defined]


def unblock_within_calls() -> None:
    """Unblock signals in some calls: programs would inherit the mask, raised ones would wait."""
    for module, name in CALLS:
        call = getattr(module, name, None)
        if call is not None and not hasattr(call, "unblocks"):
            setattr(module, name, unblocked(call))
    if hasattr(sys.modules.get("subprocess"), "_fork_exec"):
        sys.modules["subprocess"]._fork_exec = _posixsubprocess.fork_exec  # type: ignore[attr-defined]


def keep_from_tracker() -> None:
    """Keep signals blocked where multiprocessing starts its tracker: it unblocks two of them."""
    mask = signal.pthread_sigmask
    if hasattr(mask, "keeps"):
        return

    def masking(how: int, signals: Iterable[int]) -> set[signal.Signals]:
        caller = sys._getframe(1).f_globals.get("__name__")
        if how == signal.SIG_UNBLOCK and caller == "multiprocessing.resource_tracker":
            return mask(signal.SIG_BLOCK, ())  # type: ignore[return-value]
        return mask(how, signals)  # type: ignore[return-value]

    masking.keeps = True  # type: ignore[attr-defined]
    signal.pthread_sigmask = masking  # type: ignore[assignment]


def unblocked(call: Callable[..., object]) -> Callable[..., object]:
    """Wrap a call so that the calling thread blocks none of the signals during it."""

    def calling(*args: object, **named: object) -> object:
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return call(*args, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    calling.unblocks = True  # type: ignore[attr-defined]
    return calling
