"""Marks from a step's nodes to the batch script: files `KIND-NODE` in the attempt's folder.

docs/reference/run-directory.md lists the kinds. Many nodes share the folder: one look lists it
once, and each file is read once.
"""

import contextlib
import os
from typing import Dict, List, Set

from .evidence.files import read

KINDS = ("alive", "began", "ended", "failed", "stopped", "succeeded", "oom", "cannot")


class Marks:
    """The marks of an attempt at the last look."""

    def __init__(self, logs: str) -> None:
        self.logs = logs
        self._found: Dict[str, Set[str]] = {kind: set() for kind in KINDS}
        self._texts: Dict[str, str] = {}

    def look(self) -> None:
        """List the folder; if that fails, keep the previous marks."""
        found: Dict[str, Set[str]] = {kind: set() for kind in KINDS}
        try:
            with os.scandir(self.logs) as entries:
                for entry in entries:
                    kind, dash, node = entry.name.partition("-")
                    if dash and kind in found:
                        found[kind].add(node)
        except OSError:
            return
        self._found = found

    def of(self, kind: str) -> List[str]:
        """Return the nodes with a mark of a kind: their numbers, or `joined-by-JOB`."""
        return sorted(self._found[kind])

    def text(self, kind: str, node: str) -> str:
        """Return the text of a mark."""
        name = f"{kind}-{node}"
        if not self._texts.get(name):  # a mark that is being written may still be empty
            self._texts[name] = read(os.path.join(self.logs, name), 4096).strip()
        return self._texts[name]

    def texts(self, kind: str) -> List[str]:
        """Return the texts of all marks of one kind, sorted, without empty ones."""
        return sorted(filter(None, (self.text(kind, node) for node in self.of(kind))))

    def ended(self) -> List[str]:
        """Return the exit statuses of the torchruns on the job's own nodes."""
        own = (node for node in self.of("ended") if node.isdigit())
        return [self.text("ended", node) for node in own]

    def step(self) -> str:
        """Return the number of the step; empty before a task has begun.

        It is not always 0: a prolog may also use srun.
        """
        return next((text for text in self.texts("began") if text.isdigit()), "")

    def forget(self) -> None:
        """Remove all marks, before the step starts again."""
        self.look()
        for kind, nodes in self._found.items():
            for node in nodes:
                name = f"{kind}-{node}"
                if kind not in ("oom", "cannot"):
                    self._texts.pop(name, None)
                    _remove(os.path.join(self.logs, name))
        self.look()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)
