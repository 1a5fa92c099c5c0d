"""Event files for TensorBoard: the metrics of a start, written in a thread beside training.

Only the message format comes from tensorboardX. Its writer follows links, and training would hang
after its thread has failed on a full disk.
"""

import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import untrusted
from .console import Console

FOLDER = "tensorboard"
EVERY_S = 1.0
"""Only the last step of this period is written: ten million steps make a small file."""
CLOSE_WITHIN_S = 10.0
"""The end of a run waits no longer for a file system that hangs."""
_NO_CURVES = ("epoch", "samples_seen")
_TAG = 60
"""The longest tag in characters. The launcher passes on the same tags."""


class _Point(NamedTuple):
    """Values measured at a step."""

    when: float
    step: int
    figures: Mapping[str, float]
    passing: bool
    """Whether a later step may replace it."""


class EventFile:
    """The event file of one start of rank 0; its first error ends the file, never training."""

    def __init__(self, run_dir: Path, *, attempt: int, first_step: int, console: Console) -> None:
        """Name the file; a thread makes it after the first step.

        Args:
            run_dir: The run directory.
            attempt: The scheduler's attempt.
            first_step: The first step of this start: it supersedes this and later steps of earlier
                files.
            console: Prints the error.
        """
        self._folder, self._first_step, self._console = run_dir / FOLDER, first_step, console
        # TensorBoard reads files in the order of their names. Clocks of machines differ.
        stamp, host = f"{attempt:06d}.{time.time():014.3f}", socket.gethostname()
        self._path = self._folder / f"events.out.tfevents.{stamp}.{host}.{os.getpid()}"
        # Two threads share the queue, and neither replaces it, so no point is lost between them.
        self._waiting: deque[_Point] = deque()
        self._noted, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._over = False

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Leave the figures of a step, or of an evaluation after it, to the thread."""
        if self._over:
            return
        of_step = "loss" in figures
        if of_step:
            self._forget_passing()
        # Keep the first step: for some readers it supersedes all later steps of earlier files.
        passing = of_step and step != self._first_step
        self._waiting.append(_Point(time.time(), step, figures, passing))
        # An evaluation may come before the first step, which must not wait for the import.
        if of_step and self._thread is None:
            self._start()
        if not self._noted.is_set():
            self._noted.set()

    def close(self) -> None:
        """Write all waiting points; `note()` must not be called afterwards."""
        self._closing.set()
        self._noted.set()
        if self._waiting and self._thread is None:
            self._start()
        if self._thread is not None:
            self._thread.join(CLOSE_WITHIN_S)
            if self._thread.is_alive():
                self._complain(f"{self._path}: not written after {CLOSE_WITHIN_S:g} s")

    def _forget_passing(self) -> None:
        try:
            last = self._waiting.pop()
        except IndexError:  # none waits, or the thread has just taken it
            return
        if not last.passing:
            self._waiting.append(last)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=FOLDER, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except OSError as error:
            self._complain(f"cannot write {error.filename or self._path}: {error.strerror}")
        except Exception as error:  # of a library, which may raise anything
            if not (isinstance(error, ModuleNotFoundError) and error.name == "tensorboardX"):
                self._complain(f"{type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            self._over = True
            self._waiting.clear()

    def _write_until_closed(self) -> None:
        encoded = _encoder()
        now = time.time()
        data = encoded(0, now, file_version="brain.Event:2")
        data += encoded(self._first_step, now, session_log={"status": "START"})
        new, closing = True, False
        while not closing:
            self._noted.wait()
            closing = self._closing.wait(EVERY_S)
            self._noted.clear()
            with suppress(IndexError):  # none waits
                while True:
                    point = self._waiting.popleft()
                    data += encoded(point.step, point.when, figures=point.figures)
            if data:
                self._append(data, new=new)
                data, new = b"", False

    def _append(self, data: bytes, *, new: bool) -> None:
        # Do not keep the file open: a network file system shows new data to others on close.
        if new:
            with suppress(FileExistsError):
                self._path.parent.mkdir()
        folder = untrusted.open_folder(self._path.parent)
        try:
            flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0)
            handle = untrusted.open_file(self._path, flags, folder=folder)
        finally:
            os.close(folder)
        try:
            while data:  # a part may fit on the disk
                data = data[os.write(handle, data) :]
        finally:
            os.close(handle)

    def _complain(self, why: str) -> None:
        self._console.complain(f"warning: no more curves for TensorBoard: {why}")


def _encoder() -> Callable[..., bytes]:
    """Import tensorboardX, and return a function that makes a record of an event file."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c
    from tensorboardX.summary import scalar

    def encoded(
        step: int, when: float, figures: Mapping[str, float] | None = None, **content: object
    ) -> bytes:
        if figures is not None:
            curves = (
                scalar(name[:_TAG], value)
                for name, value in figures.items()
                if name not in _NO_CURVES and math.isfinite(value)
            )
            content["summary"] = Summary(value=[curve.value[0] for curve in curves])
        event: bytes = Event(wall_time=when, step=step, **content).SerializeToString()
        size = struct.pack("<Q", len(event))
        checks = (struct.pack("<I", masked_crc32c(part)) for part in (size, event))
        return size + next(checks) + event + next(checks)

    return encoded
