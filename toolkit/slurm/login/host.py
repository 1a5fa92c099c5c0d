"""Where sbatch is run and run directories lie: this machine, or a login node reached from it."""

import abc
import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from toolkit.errors import LauncherError
from toolkit.profile import SlurmProfile
from toolkit.runs import run_directory
from toolkit.runs.registry import RunRecord
from toolkit.slurm.squeue import Command

__all__ = ["Folder", "Here", "Login"]


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A run directory, as this machine sees it and as the nodes do."""

    here: Path
    """Its path on this machine: the run directory itself, or its mirror."""

    there: str
    """Its path on the nodes."""

    start: str
    """The folder in which its jobs start: relative paths in a job are below it."""


class Login(abc.ABC):
    """A machine with Slurm's commands."""

    command: Command
    """Runs one of them there."""

    cwd: str
    """The folder in which sbatch is run; empty where that is of no use to a job."""

    remote = False
    """Whether run directories are there, and only their mirrors here."""

    @abc.abstractmethod
    def make(self, name: str) -> Folder:
        """Make a new run directory.

        Raises:
            LauncherError: it cannot be made, or what the profile names is missing.
        """

    def bring(self, folder: Folder) -> None:
        """Copy the files of a new run directory to the file system of the nodes.

        Raises:
            LauncherError: something could not be brought.
        """

    @abc.abstractmethod
    def discard(self, folder: Folder, *, begun: bool) -> None:
        """Remove a run directory that we made; gently where a job may have begun in it."""

    @abc.abstractmethod
    def sbatch(
        self,
        argv: Sequence[str],
        *,
        folder: Folder,
        key: str,
        again: bool,
        secrets: Mapping[str, str],
    ) -> "CompletedProcess[str]":
        """Submit a job.

        Args:
            argv: sbatch and its arguments.
            folder: The run directory.
            key: The name of this submission, so that a second call of it makes no second job.
            again: Whether to submit though an earlier call may have done so.
            secrets: Variables that the job takes from here.
        """

    def answers(self, folder: Folder, keys: Sequence[str]) -> dict[str, str]:
        """Return the answers that were written down for submissions, by their keys."""
        return {}

    def keep(self, folder: Folder, *, jobs: Sequence[str], launch: str) -> None:
        """Write the record of the submission into the remote run directory, once."""

    def as_there(self, record: RunRecord) -> RunRecord:
        """Return a record with which the toolkit opens the run over there."""
        return record

    def watch(self, run: object) -> None:
        """Register that a process has this run open."""

    def fetch(self, since: float) -> None:
        """Make sure that the local copies of the open runs are not older than `since`.

        Raises:
            LauncherError: it cannot be fetched.
        """

    def seen(self, record: RunRecord) -> Path | None:
        """Return the run directory as this machine sees it now."""
        return record.run_dir

    @abc.abstractmethod
    def request_cancel(self, record: RunRecord) -> None:
        """Leave the mark of a cancelled run."""

    @abc.abstractmethod
    def withdraw_cancel(self, record: RunRecord) -> None:
        """Take the mark back."""


class Here(Login):
    """This machine is a login node: it runs sbatch, and sees what the nodes see."""

    def __init__(self, profile: SlurmProfile, command: Command) -> None:
        self._profile = profile
        self.command = command

    @property
    def cwd(self) -> str:  # type: ignore[override]  # it may change
        """The current folder."""
        return str(Path.cwd())

    def make(self, name: str) -> Folder:
        """Make a new run directory."""
        venv = Path(self._profile.venv or "/")
        if not venv.is_absolute() and not (venv / "bin/activate").is_file():
            raise LauncherError(
                f"venv {str(venv)!r} of profile {self._profile.name!r} is not below {Path.cwd()}; "
                "submit from the project's folder, or write an absolute path into the profile"
            )
        run_dir = run_directory.make(Path(self._profile.runs_dir), name)
        return Folder(here=run_dir, there=str(run_dir), start=self.cwd)

    def discard(self, folder: Folder, *, begun: bool) -> None:
        """Remove a run directory."""
        shutil.rmtree(folder.here, ignore_errors=begun)

    def sbatch(
        self,
        argv: Sequence[str],
        *,
        folder: Folder,
        key: str,
        again: bool,
        secrets: Mapping[str, str],
    ) -> "CompletedProcess[str]":
        """Submit a job; it takes its secrets from this process's environment."""
        return self.command(argv)

    def request_cancel(self, record: RunRecord) -> None:
        """Leave the mark of a cancelled run."""
        if record.run_dir is not None:
            with contextlib.suppress(OSError):
                record.run_dir.mkdir(exist_ok=True)  # a point that has not started has none
            run_directory.request_cancel(record.run_dir)

    def withdraw_cancel(self, record: RunRecord) -> None:
        """Take the mark back."""
        if record.run_dir is not None:
            run_directory.withdraw_cancel(record.run_dir)
