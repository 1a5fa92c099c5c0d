"""The exception tree.

::

    ToolkitError                exit status 1
    ├── InputError              exit status 2: the user's input is wrong; lists every problem
    │   ├── SpecError           a job file
    │   ├── ProfileError        a profile
    │   ├── PlanError           a job file and a profile that do not fit together
    │   └── RenderError         a value that a script or manifest cannot hold
    └── LauncherError           exit status 1: the scheduler refused, or cannot be reached
        ├── NewerFormat         a run has written a version that is not known here
        ├── SchedulerMissing    no scheduler can be reached from here
        └── RunNotFound         exit status 2: no such run
            └── RunLost         exit status 1: the run existed, but its data are gone

The command line shows these errors without a traceback, because the user can fix them. Any other
exception is a bug of the toolkit. `toolkit/cli/exit_status.py` has the commands' other statuses.

A `Problem` is something wrong with the input; a `Failure` (`toolkit.runs.evidence.failure`) is the
failure of a run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

_LONGEST_WORD = 500
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


class ToolkitError(Exception):
    """The root of all errors that a user can fix."""

    exit_status: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of the input, with its location and a fix."""

    message: str
    """The problem, with the value and a fix."""

    place: str | None = None
    """`FILE:LINE`, or the option of the command line."""

    rule: str | None = None
    """The id of the rule that found it; None if the file cannot be used at all."""

    key: tuple[str | int, ...] = ()
    """The path of the key in the job file; empty if the problem belongs to no key."""

    def __post_init__(self) -> None:
        """Shorten very long words, such as a quoted number with thousands of digits."""
        message = _LONG_WORD.sub(lambda word: f"{word[0][:_LONGEST_WORD]}…", self.message)
        object.__setattr__(self, "message", message)

    def __str__(self) -> str:
        return in_one_line(f"{self.place}: {self.message}" if self.place else self.message)


class InputError(ToolkitError):
    """The user's input cannot be used; has every problem, or the only one with its location."""

    exit_status = 2

    def __init__(self, problems: str | Iterable[Problem], *, place: str | None = None) -> None:
        if isinstance(problems, str):
            problems = [Problem(message=problems, place=place)]
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class SpecError(InputError):
    """A job file that cannot be read or does not describe a job."""


class ProfileError(InputError):
    """A profile that cannot be found, read, or used."""


class PlanError(InputError):
    """A job that cannot work with this profile."""


class RenderError(InputError):
    """A value that the script or manifest cannot hold."""


class LauncherError(ToolkitError):
    """The scheduler refused, failed, or gave an unreadable answer."""

    answer: str = ""
    """The scheduler's own message, or an empty text."""


class NewerFormat(LauncherError):
    """A run has written a record with a version that this toolkit does not know."""


class SchedulerMissing(LauncherError):
    """The scheduler's commands or its API server cannot be reached from here."""


class RunNotFound(LauncherError):
    """No run has this URI or name."""

    exit_status = 2


class RunLost(RunNotFound):
    """The run is known, but the requested data are gone: its status, or its log."""

    exit_status = 1


def in_one_line(text: str) -> str:
    """Return text without line breaks: a file's name must not look like a separate message."""
    return text.replace("\n", "\\n")


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the word that was probably meant; None if no word is similar.

    The cutoff is a ratio of `difflib.SequenceMatcher`, from 0 to 1.

    >>> nearest("nnode", ["nnodes", "image"]), nearest("x", ["image"])
    ('nnodes', None)
    """
    import difflib  # for mistakes only

    words = list(words)
    longer = [candidate for candidate in words if word and candidate.startswith(word)]
    similar = longer or difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return similar[0] if similar else None


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Return a hint for a word that is not among the choices.

    >>> did_you_mean("nnode", ["nnodes", "image"]), did_you_mean("x", ["image", "args"])
    ("did you mean 'nnodes'?", 'valid are image, args')
    """
    choices = list(choices)
    if meant := nearest(str(word), choices):
        return f"did you mean {meant!r}?"
    return f"valid are {', '.join(choices)}" if choices else "none is valid here"
