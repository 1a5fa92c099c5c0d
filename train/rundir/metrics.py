"""`metrics.jsonl`: a line per step, cheap enough for steps of a millisecond."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from train.rundir.json_text import dump_numbers
from train.rundir.jsonl import Journal

# Lines that follow each other faster than this are written together: one by one they would cost a
# short step a tenth of its time. A kill loses this much at most; no step that takes longer waits.
TOGETHER_S = 0.1


class MetricsLog:
    """Notes records, and writes them at once or a moment later."""

    def __init__(self, path: Path, head: Mapping[str, object]) -> None:
        """Name the file, and what every line begins with."""
        self._journal, self._head = Journal(path), head
        # Two threads share it, and neither replaces it: so no line gets lost between them.
        self._waiting: deque[tuple[float, Mapping[str, object]]] = deque()
        self._written = float("-inf")
        self._one_at_a_time = threading.Lock()
        self._held_back = threading.Event()
        self._keeper: threading.Thread | None = None

    def note(self, record: Mapping[str, object]) -> None:
        """Write a record, or keep it for the next one to come.

        Raises:
            OSError: it could not be written.
        """
        now = time.time()
        self._waiting.append((now, record))
        # A clock that was set back does not hold lines back.
        if not 0 <= now - self._written < TOGETHER_S:
            self.flush()
        elif len(self._waiting) == 1:
            self._see_to_it()

    def flush(self, *, create: bool = True) -> None:
        """Write what waits; `create`: make the file if it is missing.

        Raises:
            OSError: it could not be written.
        """
        with self._one_at_a_time:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not waiting:
                return
            self._written = time.time()
            self._journal.append(
                *(dump_numbers({**self._head, "time": when, **record}) for when, record in waiting),
                create=create,
            )

    def _see_to_it(self) -> None:
        """Have a thread write the line should no other follow, as before a step that hangs."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="metrics", daemon=True)
            self._keeper.start()
        self._held_back.set()

    def _keep(self) -> None:
        while self._held_back.wait():
            self._held_back.clear()
            time.sleep(TOGETHER_S)
            # The training's own next line reports the fault. Who removes the directory meanwhile
            # shall not find it in use again.
            with suppress(OSError):
                self.flush(create=False)
