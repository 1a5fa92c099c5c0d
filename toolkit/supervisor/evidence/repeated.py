"""Whether a failure has come before: in an earlier start of the ranks, or in an earlier attempt."""

import glob
import os
import time
from typing import Callable, Dict, Iterable, List, Optional

from .files import read
from .first_error import ANOTHER_ONE, Attempt, Failure, alike, from_line, repeated_failure

ECHO_S = 60
"""How long one waits for the error of which another one is the echo: its files may come late."""


class Repetitions:
    """Two starts by one torchrun that have failed alike; unchanged files are not read again."""

    def __init__(self, starts: Callable[[], Attempt], torchruns: Callable[[], List[str]]) -> None:
        self._starts, self._torchruns = starts, torchruns
        self._looked_at: Dict[str, List[str]] = {}
        self._echo: Optional[Failure] = None
        self._echo_s = 0.0

    @property
    def awaits_cause(self) -> bool:
        """Whether an echo was found, and not yet the error that it is the echo of."""
        return self._echo is not None

    def in_job(self, *, all_ended: bool) -> Optional[Failure]:
        """Return how the ranks of one torchrun failed alike in two starts, if they have.

        `all_ended`: the ranks of the last start have ended, too, so that their stderr is whole.
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
            self._echo = failure  # another node, whose files may come late, has the cause
            self._echo_s = self._echo_s or time.monotonic()
        late = self._echo_s and time.monotonic() >= self._echo_s + ECHO_S
        return self._echo if all_ended or late else None


def earlier_alike(now: Failure, files: Iterable[str]) -> str:
    """Return the file `first_error` of an earlier start that has failed alike, or nothing.

    `files`: those of earlier starts, the last one first.
    """
    for path in files:
        if alike(from_line(read(path, 4096)), now, in_a_row=True):
            return path
        # Where no step is known, the starts in between may have made progress.
        if now.kind != "fault" and not now.step[:1].isdigit():
            break
    return ""
