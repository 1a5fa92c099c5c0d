"""Whether a failure is repeated: from an earlier start of the ranks or an earlier attempt."""

import glob
import os
import time
from typing import Callable, Dict, Iterable, List, Optional

from .files import read
from .first_error import ANOTHER_ONE, Attempt, Failure, alike, from_line, repeated_failure

ECHO_S = 60
"""How long to wait for the cause of an echo: its files may arrive late."""


class Repetitions:
    """Finds two starts by one torchrun that failed alike; does not reread unchanged files."""

    def __init__(self, starts: Callable[[], Attempt], torchruns: Callable[[], List[str]]) -> None:
        self._starts, self._torchruns = starts, torchruns
        self._looked_at: Dict[str, List[str]] = {}
        self._echo: Optional[Failure] = None
        self._echo_s = 0.0

    @property
    def awaits_cause(self) -> bool:
        """Whether an echo was found, but not yet its cause."""
        return self._echo is not None

    def in_job(self, *, all_ended: bool) -> Optional[Failure]:
        """Return the failure that the ranks of one torchrun share in two starts; None without one.

        `all_ended`: the ranks of the last start have also ended, so their stderr is complete.
        """
        for folder in sorted(folder.rstrip("/") for folder in self._torchruns()):
            if not os.path.isdir(folder + "/attempt_1"):
                continue
            files = sorted(
                glob.glob(glob.escape(folder) + "/attempt_*")
                + glob.glob(glob.escape(folder) + "/attempt_*/*/error.json")
            )
            if self._looked_at.get(folder) == files and not all_ended:
                continue  # the same files have the same errors
            self._looked_at[folder] = files
            failure = repeated_failure(self._starts(), folder, all_ended=all_ended)
            if failure is None:
                continue
            if not failure.message.endswith(ANOTHER_ONE):
                return failure
            self._echo = failure  # the cause is on another node; its files may arrive late
            self._echo_s = self._echo_s or time.monotonic()
        late = self._echo_s and time.monotonic() >= self._echo_s + ECHO_S
        return self._echo if all_ended or late else None


def earlier_alike(now: Failure, files: Iterable[str]) -> str:
    """Return the file `first_error` of an earlier start that failed alike; empty without one.

    `files`: those of earlier starts, the newest first.
    """
    for path in files:
        if alike(from_line(read(path, 4096)), now, in_a_row=True):
            return path
        # If no step is known, starts in between may have made progress.
        if now.kind != "fault" and not now.step[:1].isdigit():
            break
    return ""
