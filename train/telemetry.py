"""Records the progress of a training script of any framework; copy this file beside the script.

Rank 0 appends to `metrics.jsonl` and `events.jsonl` in the run directory of the launcher, if there
is one: status, goodput, reports, hangs and trackers then work as for `train`. It needs Python only.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Telemetry:
    """Make it after the imports, before the process group; call `ready()` before the first step."""

    def __init__(self) -> None:
        environ, self._mark, self._step = os.environ, time.time(), 0
        self._count, self._took, self._written, self._bytes = 0, 0.0, 0.0, 0
        folder = environ.get("TRAIN_RUN_DIR") if environ.get("RANK", "0") == "0" else None
        self._folder = Path(folder) if folder else None
        restart = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._start = {"attempt": int(environ.get("TRAIN_ATTEMPT", 0)), "restart": restart}
        # The start time of a restart within the job is not known.
        began = None if restart else environ.get("TRAIN_ATTEMPT_BEGAN")
        self._began = min(float(began or self._mark), self._mark)
        self._phases = {"start": self._mark - self._began}
        for name in ("events", "metrics"):
            self._end_torn_line(name)
        self._write("events", event="start", world_size=int(environ.get("WORLD_SIZE", 1)))

    def ready(self) -> None:
        """Record that the first step begins."""
        phases = {**self._phases, "setup": time.time() - self._mark}
        self._write("events", event="ready", began=self._began, phases=phases)
        self._mark = time.time()

    def step(self, step: int, **figures: float) -> None:
        """Record the end of a step, counted from 1, with its metrics, such as the loss."""
        now, self._step = time.time(), step
        self._count, self._took, self._mark = self._count + 1, self._took + now - self._mark, now
        # Above 200 MB, write one record for all steps of a second.
        if self._bytes < 200 << 20 or now - self._written >= 1:
            several = {"count": self._count} if self._count > 1 else {}
            numbers = {name: float(figure) for name, figure in figures.items()}  # also a tensor
            self._write("metrics", **numbers, seconds=self._took / self._count, **several)
            self._count, self._took, self._written = 0, 0.0, now

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Record how long an `evaluation` or a `checkpoint` stalls training."""
        ends = {"evaluation": ("epoch", "seconds"), "checkpoint": (what, "stall_seconds")}
        end, took = ends[what]
        began = time.time()
        if what == "evaluation":  # no step is expected until its end
            self._write("events", event=what)
        yield
        self._write("events", event=end, **{took: time.time() - began})
        self._mark = time.time()

    def _end_torn_line(self, name: str) -> None:
        """End the last line of a file, which a kill may have cut off."""
        path = self._folder and self._folder / f"{name}.jsonl"
        if path and path.exists():
            with path.open("ab+") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                if file.read(1) not in (b"", b"\n"):
                    file.write(b"\n")

    def _write(self, name: str, **record: object) -> None:
        if self._folder:
            place = {"version": 1, "time": time.time(), **self._start, "step": self._step}
            for key, value in record.items():
                if isinstance(value, float) and not math.isfinite(value):
                    record[key] = None  # JSON has no NaN and no infinity
            with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({**place, **record}, allow_nan=False) + "\n")
                self._bytes = file.tell() if name == "metrics" else self._bytes
