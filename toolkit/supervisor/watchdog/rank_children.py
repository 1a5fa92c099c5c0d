"""Lets the child processes of a rank live until the rank has ended, while a run is being stopped.

torchrun passes a signal on to a rank's process group, and slurmstepd sends it to every process of
a step. So a stop would also end the workers of a DataLoader; torch then raises an error in the
rank, which dies before its handler has written a checkpoint. The process that collects a tracker's
metrics would end before it has sent the last ones.

In a child process that is Python, however it was started, the signals of a stop are blocked, and a
thread waits for them. It keeps one that an ancestor of the rank has sent until the rank has ended.
Any other one, such as that of `Process.terminate()` in the rank, takes effect at once.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from os import kill  # as it is without unblock_within_calls()

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1})
"""What torchrun passes on to ranks, by default or by its option --signals-to-handle."""

WAKE = signal.SIGRTMIN + 21
"""Makes the main thread take a signal that was sent to it, and interrupts what it waits in."""

CALLS = (
    (_posixsubprocess, "fork_exec"),
    (os, "execv"),
    (os, "execve"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "kill"),
    (signal, "raise_signal"),
)

POLL_S, POLL_KEPT_S = 5.0, 0.1
"""How often it is looked whether the rank has ended, without and with a signal that was kept."""


def protect(rank: int, ancestors: Collection[int]) -> None:
    """In a rank, have each child process keep signals; in a child process that is new, begin."""

    def keep_signals() -> None:
        signal.signal(WAKE, take_in_main_thread)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        unblock_within_calls()
        # Not by `threading`, whose list of threads is the script's.
        _thread.start_new_thread(wait_for_signals, (rank, ancestors))

    os.register_at_fork(after_in_child=keep_signals)
    if os.getpid() != rank:
        keep_signals()


def wait_for_signals(rank: int, ancestors: Collection[int]) -> None:
    """Take each signal when its sender may end this process, or when the rank has ended."""
    kept: list[int] = []
    while True:
        info = signal.sigtimedwait(SIGNALS, POLL_KEPT_S if kept else POLL_S)
        # 0 is a sender outside of this PID namespace: slurmstepd, where ranks are in a container.
        if info is not None and (info.si_pid == 0 or info.si_pid in ancestors):
            kept.append(info.si_signo)
        elif info is not None:
            take(info.si_signo)
        if (kept or is_loader_worker()) and not is_alive(rank):
            if is_loader_worker():  # which would hang in its dataset for ever
                os._exit(0)
            for number in kept:
                take(number)
            kept.clear()


def is_alive(pid: int) -> bool:
    """Whether there is this process, and it is this user's."""
    try:
        kill(pid, 0)
    except OSError:
        return False
    return True


def take(number: int) -> None:
    """Have a signal do what it would do without this module."""
    if number == signal.SIGTERM and is_loader_worker():
        os._exit(0)  # as torch has it, which takes the rank's SIGTERM for a worker's ordinary end
    if callable(signal.getsignal(number)):  # which runs in the main thread
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
    """Take what take() has sent to this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS & signal.sigpending())
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def unblock_within_calls() -> None:
    """Block no signals in some calls: a program would inherit that, and a raised one would wait."""
    for module, name in CALLS:
        call = getattr(module, name, None)
        if call is not None and not hasattr(call, "unblocks"):
            setattr(module, name, unblocked(call))
    if hasattr(sys.modules.get("subprocess"), "_fork_exec"):
        sys.modules["subprocess"]._fork_exec = _posixsubprocess.fork_exec  # type: ignore[attr-defined]


def unblocked(call: Callable[..., object]) -> Callable[..., object]:
    """Return a call in which the calling thread blocks none of the signals."""

    def calling(*args: object, **named: object) -> object:
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return call(*args, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    calling.unblocks = True  # type: ignore[attr-defined]
    return calling
