"""The exception tree.

::

    ToolkitError                exit status 1
    ├── InputError              exit status 2: something the user wrote, every problem listed
    │   ├── SpecError           a job file
    │   ├── ProfileError        a profile
    │   ├── PlanError           a job file and a profile that do not fit together
    │   └── RenderError         a value that a script or manifest cannot hold
    └── LauncherError           exit status 1: the scheduler refused, or cannot be reached
        ├── SchedulerMissing    no scheduler at hand
        └── RunNotFound         exit status 2: no such run
            └── RunLost         exit status 1: it was there, and nobody can tell more

What the user can mend is one of these and is shown without a traceback; anything else is our bug.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "InputError",
    "LauncherError",
    "PlanError",
    "Problem",
    "ProfileError",
    "RenderError",
    "RunLost",
    "RunNotFound",
    "SchedulerMissing",
    "SpecError",
    "ToolkitError",
]


class ToolkitError(Exception):
    """The root of all errors that a user can mend."""

    exit_status: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, where it stands, and the way out."""

    message: str
    """The mistake, with the value and the way out."""

    place: str | None = None
    """Where: `FILE:LINE`, or the option of the command line."""

    rule: str | None = None
    """The id of the rule that found it; None where a file simply cannot be used."""

    key: tuple[str | int, ...] = ()
    """The key of the job file that it is about, from the top; empty for none of them."""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class InputError(ToolkitError):
    """Something the user wrote cannot be used; carries every problem found."""

    exit_status = 2

    def __init__(self, problems: str | Iterable[Problem]) -> None:
        listed = [Problem(message=problems)] if isinstance(problems, str) else problems
        self.problems = tuple(listed)
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
    """The scheduler refused, failed, or gave an answer that cannot be understood."""

    answer: str = ""
    """The scheduler's own message, if it gave one."""


class SchedulerMissing(LauncherError):
    """No scheduler at hand: its commands or its API server cannot be reached."""


class RunNotFound(LauncherError):
    """No run is known by this URI or name."""

    exit_status = 2


class RunLost(RunNotFound):
    """A run is known, but the requested data are gone: its end, or its log."""

    exit_status = 1
