"""The folder of an attempt, and the results of earlier attempts.

Files and words: docs/reference/run-directory.md.
"""

import contextlib
import os
import re
from typing import List, Optional

from .evidence.files import read
from .policy import Made


class Refused(Exception):
    """The run directory cannot be used in the requested mode."""


class Attempt:
    """One start of the run, in a separate folder."""

    def __init__(self, run_dir: str, number: int, since: int) -> None:
        self.run_dir, self.number = run_dir, number
        self.since = since
        """The attempt from which the limits of retries count."""
        self.logs = folder_of(run_dir, number)

    def path(self, name: str) -> str:
        """Return the path of a file in this attempt's folder."""
        return os.path.join(self.logs, name)

    def write(self, name: str, text: str) -> None:
        """Write a line to a file in this attempt's folder."""
        with open(self.path(name), "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text + "\n")

    def note(self, name: str, text: str) -> None:
        """Write a line to a file of this attempt, if possible: the disk may be full."""
        with contextlib.suppress(OSError):
            self.write(name, text)

    def made(self, word: str, step: Optional[int]) -> List[Made]:
        """Return the results of all attempts from `since` on; word and step are this attempt's."""
        numbers = range(max(self.since, 0), self.number)
        return [*(made_in(self.run_dir, number) for number in numbers), Made(word, step)]

    def best_before(self) -> int:
        """Return the last step of the attempt before `since`."""
        return made_in(self.run_dir, self.since - 1).step or 0


def with_number(word: str, number: int) -> str:
    """Return a word of the torchrun command with the attempt number filled in.

    >>> with_number("--out=${TRAIN_ATTEMPT}/$${TRAIN_ATTEMPT}", 3)
    '--out=3/$${TRAIN_ATTEMPT}'
    """
    return re.sub(r"(?<!\$)\$\{TRAIN_ATTEMPT\}", str(number), word)


def folder_of(run_dir: str, number: int) -> str:
    """Return the folder of an attempt."""
    return os.path.join(run_dir, "logs", f"attempt-{number}")


def next_number(run_dir: str) -> int:
    """Return the number of the next attempt."""
    number = 0
    while os.path.lexists(folder_of(run_dir, number)):
        number += 1
    return number


def made_in(run_dir: str, number: int) -> Made:
    """Return the result of an attempt from its files `reason` and `step`."""
    folder = folder_of(run_dir, number)
    step = read(os.path.join(folder, "step"), 100).strip()
    word = read(os.path.join(folder, "reason"), 100).partition(":")[0]
    return Made(word.strip(), int(step) if step.isdigit() else None)


def open_attempt(run_dir: str, mode: str) -> Attempt:
    """Make the folder of the next attempt.

    Args:
        run_dir: The run directory.
        mode: "" for a new run; `continue` for an earlier run, with its failures no longer
        counted; `restart` for the next attempt of the same submission.

    Raises:
        Refused: the directory holds a run, and `mode` does not say what to do with it.
    """
    number = next_number(run_dir)
    if number and mode not in ("continue", "restart"):
        raise Refused(
            f"{run_dir} already holds a run; to go on with it: bash FILE {run_dir} continue"
        )
    since = number
    if mode == "continue":
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(run_dir, "cancel_requested"))
    if mode == "restart":
        before = read(os.path.join(folder_of(run_dir, number - 1), "since"), 100).strip()
        since = int(before) if before.isdigit() else number
    os.makedirs(os.path.join(run_dir, "logs"), exist_ok=True)
    attempt = Attempt(run_dir, number, since)
    os.mkdir(attempt.logs)
    attempt.write("since", str(since))
    return attempt
