"""Stop requests: the signals with which a scheduler, torchrun or a person stops a run."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from ..errors import EXIT_PREEMPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


class StopRequest:
    """Records a stop request; the training loops of all ranks agree on the step to stop at.

    Before `wait_for_the_loop()` the ranks cannot agree: the process may wait in C++, inside
    `init_process_group`, for a peer that the same signal has ended. A Python signal handler never
    runs there. Instead, the C-level handler wakes a thread through a pipe, and the thread ends the
    process.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        """The first signal, as a number to pass on; None when this rank got none."""
        self._at_once: Callable[[str], None] | None = None
        self._loop_leaves = threading.Event()
        self._patience_s = 0.0

    @property
    def requested(self) -> bool:
        """Whether any stop signal has arrived on this rank."""
        return self.signal_number is not None

    @property
    def signal_name(self) -> str | None:
        """The first signal's name, such as `SIGTERM`; None when this rank got none."""
        return None if self.signal_number is None else signal.Signals(self.signal_number).name

    def install(self, at_once: Callable[[str], None]) -> None:
        """Take over the stop signals; `at_once(name)` is called before an early exit."""
        self._at_once = at_once
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="stop-watch", daemon=True).start()
        for number in SIGNALS:
            # nohup has the hangup of a terminal ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        # `--spawn` starts its ranks with blocked signals: none must end one that cannot answer yet.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def leave_by(self, at_once: Callable[[str], None]) -> None:
        """Replace the callback for an early exit, now that more is known."""
        self._at_once = at_once

    def wait_for_the_loop(self, *, at_most_s: float | None = None) -> None:
        """From now on, let a signal only set `requested`: the ranks agree on the step to stop at.

        With `at_most_s`, this process still exits early unless the loop calls this method without
        a limit within that many seconds of the signal.
        """
        if at_most_s is None:
            self._loop_leaves.set()
        else:
            self._patience_s = at_most_s

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Ignore a second signal: the checkpoint for the first is being written.
        if self.signal_number is None:
            self.signal_number = number

    def _watch(self, reader: int) -> None:
        while received := os.read(reader, 1):
            if received[0] not in SIGNALS:
                continue
            self._note(received[0], None)
            if not self._loop_leaves.wait(self._patience_s) and self._at_once is not None:
                try:
                    self._at_once(signal.Signals(received[0]).name)
                finally:
                    # Not sys.exit(): the main thread may never return from C++.
                    os._exit(EXIT_PREEMPTED)
