"""Supervision of an attempt, for all schedulers: reasons, failures, notifications."""

import contextlib
import glob
import os
import re
from types import MappingProxyType
from typing import List, Mapping, NamedTuple, Optional, Sequence

from .attempt import Attempt, folder_of
from .evidence.cause import Cause, Logs, cause_of
from .evidence.files import open_regular, read
from .evidence.first_error import Attempt as Starts
from .evidence.first_error import Failure, from_line, last_failure, newest_checkpoint
from .evidence.outcome import Outcome
from .evidence.repeated import Repetitions, earlier_alike
from .evidence.torchrun_report import read_reports
from .notify import Event, Notifier, Receivers
from .policy import Evidence, Limits, Verdict, reason_line, sentence


class Policy(NamedTuple):
    """A job's settings for failures, and its requirements for a start."""

    job: str
    """The job's name."""
    restarts: int
    """Maximum number of restarts of the ranks by torchrun."""
    limits: Limits
    grace_s: int
    """Time limit of a stop, in seconds."""
    stall: str = "never"
    """Seconds without a step after which ranks count as hanging, or `learned`."""
    protect_children: bool = False
    """Whether child processes of a rank outlive a stop until the rank has ended."""
    warm: bool = False
    """Whether ranks are forked from a process that has imported torch."""
    receivers: Receivers = Receivers()
    needs: Sequence[str] = ()
    """Files and folders that must exist."""
    secrets: Sequence[str] = ()
    """Variables that must be set."""
    secret_files: Mapping[str, str] = MappingProxyType({})
    """Files with the values of variables, by variable name."""


class Supervised(Evidence):
    """An attempt and its evidence, on any scheduler."""

    def __init__(self, policy: Policy, attempt: Attempt) -> None:
        self.policy, self.attempt = policy, attempt
        self.notifier = Notifier(policy.receivers, policy.job, attempt.run_dir)
        self.compares = bool(policy.restarts or policy.limits.requeue)
        self.repetitions = Repetitions(self.starts, self.torchruns)
        self.error: Optional[Failure] = None
        """The first error, if it was determined."""
        self.twice: Optional[Failure] = None
        """A failure that occurred twice, in this attempt or in an earlier one."""
        self.earlier = ""
        """The folder of the earlier attempt that failed alike, if any."""
        self._stalls_told = 0
        self._cause: Optional[List[Optional[Cause]]] = None

    # ---- Messages to users

    def write_reason(self, verdict: Verdict, decision: str) -> str:
        """Write why the attempt ends, and what follows; return the sentence for users."""
        self.attempt.note("reason", reason_line(verdict, decision))
        return sentence(reason_line(verdict, decision))

    def tell(self, event: str, word: str, text: str, tries: int) -> None:
        """Send a notification of the attempt's end."""
        claim = self.attempt.path("notified")
        self.notifier.tell(claim, Event(event, word, text, self.attempt.number, tries))

    def tell_stalls(self) -> None:
        """Send a notification for each stall file of the watchdog."""
        if "stall" not in self.policy.receivers.events:
            return
        path = self.attempt.path("watchdog/stall-")
        while os.path.exists(f"{path}{self._stalls_told + 1}"):
            self._stalls_told += 1
            text = read(f"{path}{self._stalls_told}", 4096).strip()
            event = Event("stall", "", f"stalls: {text}", self.attempt.number, tries=1)
            self.notifier.tell(self.attempt.path(f"notified-{self._stalls_told}"), event)

    # ---- Failures

    def reports(self) -> Sequence[str]:
        """Return the lines of the torchrun reports."""
        raise NotImplementedError

    def hosts(self) -> List[str]:
        """Return the names of the nodes, to mask in failures."""
        raise NotImplementedError

    def starts(self) -> Starts:
        """Return the locations of the ranks' evidence."""
        reported = read_reports(self.reports())
        return Starts(self.attempt.run_dir, self.attempt.number, self.hosts(), reported)

    def torchruns(self) -> List[str]:
        """Return the folders of torchruns with the files of their ranks."""
        return glob.glob(glob.escape(self.attempt.logs) + "/node-*/*/")

    def repeated(self) -> Optional[Failure]:
        """Return the repeated failure for which torchrun was stopped, if any."""
        self.twice = from_line(read(self.attempt.path("repeated"), 4096))
        return self.twice

    def raised(self) -> Optional[Failure]:
        """Return the first error of the last start."""
        self.error = last_failure(self.starts(), self.attempt.logs)
        return self.error

    def logs(self) -> Logs:
        """Return the attempt's evidence outside the rank folders."""
        raise NotImplementedError

    def cause(self) -> Optional[Cause]:
        """Return the first failure, by the best evidence other than outcome.json."""
        if self._cause is None:
            self._cause = [cause_of(self.starts(), self.attempt.logs, self.logs())]
        return self._cause[0]

    def cost(self) -> str:
        """Return the number of steps since the newest checkpoint; empty if unknown."""
        return lost_since(self.outcome, self.attempt.run_dir)

    def failed_before(self) -> Optional[Failure]:
        """Return the failure of this start if an earlier start, of any attempt, failed alike."""
        if not self.compares:
            return None
        now = self.raised()
        if now is not None:
            self.attempt.note("first_error", now.line())
        self.twice = self.repetitions.in_job(all_ended=True)
        if self.twice is None and now is not None:
            numbers = range(self.attempt.number - 1, self.attempt.since - 1, -1)
            folders = (folder_of(self.attempt.run_dir, number) for number in numbers)
            files = (os.path.join(folder, "first_error") for folder in folders)
            self.earlier = os.path.dirname(earlier_alike(now, files))
            self.twice = now if self.earlier else None
        return self.twice


def lost_since(outcome: Optional[Outcome], run_dir: str) -> str:
    """Return the number of steps since the newest checkpoint, in words; empty if unknown."""
    step = outcome.step if outcome else ""
    if not step.isdigit():
        return ""
    running = outcome is not None and outcome.status == "running"
    # Other numbers may count epochs, or saves.
    saved = re.search("step[-_=]?([0-9]{1,15})$", newest_checkpoint(run_dir))
    at = f", at step {step}" + (" or later" if running else "")
    if saved and int(step) >= int(saved.group(1)):
        return f"{at}, {int(step) - int(saved.group(1))} steps after the newest checkpoint"
    return at if running else ""


def lacks(policy: Policy) -> str:
    """Return the job's missing requirements; set the variables with values in files."""
    for name in policy.needs:
        if not os.path.exists(name):
            return f"the folder of a mount is missing: {name}"
    for name in policy.secrets:
        if not os.environ.get(name):
            return f"{name}: is a secret of this job; export it first"
    for name, path in policy.secret_files.items():
        try:
            os.environ[name] = secret_in(path)
        except ValueError as error:
            return f"secret {name}: {error}"
    return ""


def preload_secrets(policy: Policy) -> None:
    """Set the variables with values in files, as far as possible.

    A notification may need a variable before `lacks` reports missing ones.
    """
    for name, path in policy.secret_files.items():
        with contextlib.suppress(ValueError):
            os.environ.setdefault(name, secret_in(path))


def secret_in(path: str) -> str:
    """Return the value in a file, without trailing line breaks.

    Raises:
        ValueError: it cannot be read, others may read it, or it is empty.
    """
    try:
        with open_regular(os.path.expanduser(path)) as file:
            mode, value = os.fstat(file.fileno()).st_mode, file.read(1 << 20)
    except OSError:
        raise ValueError(f"cannot read {path}") from None
    if mode & 0o077:
        raise ValueError(f"others may read {path}; chmod 600 it")
    value = value.rstrip(b"\n")
    if not value:
        raise ValueError(f"{path} is empty")
    return value.decode("utf-8", "surrogateescape")
