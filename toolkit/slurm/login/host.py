"""The host of sbatch and of the run directories: this machine, or a remote login node."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from toolkit.errors import LauncherError
from toolkit.profile import SlurmProfile
from toolkit.runs.evidence.stacks import Exchange
from toolkit.runs.records import run_directory
from toolkit.runs.records.registry import RunRecord
from toolkit.runs.run import Run
from toolkit.slurm.commands import Command
from toolkit.slurm.snapshot import SnapshotCache

DOUBTFUL = 75
"""Exit status of `LoginNode.sbatch`: an earlier call has run sbatch with an unknown outcome."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run directory, as seen by this machine and by the nodes."""

    here: Path
    """Its path on this machine: the run directory itself, or its mirror."""

    there: str
    """Its path on the nodes."""

    start: str
    """The working directory of its jobs: relative paths in a job are below it."""


class LoginNode:
    """This machine as a login node: it runs sbatch, and shares its files with the nodes.

    `SshLoginNode` is a login node that this machine reaches by ssh.
    """

    remote = False
    """Whether the run directories are remote, with only mirrors on this machine."""

    def __init__(
        self, profile: SlurmProfile, command: Command, *, file: Path | None = None
    ) -> None:
        """Prepare to run Slurm's commands; `file` shares their answers with other processes."""
        self._profile = profile
        self.command = command
        self.snapshots = SnapshotCache(command, file=file, fetch=self.fetch)

    @property
    def cwd(self) -> str:
        """The working directory of sbatch; empty if it is useless to a job."""
        return str(Path.cwd())

    def make(self, name: str) -> RunFolder:
        """Create a new run directory.

        Raises:
            LauncherError: it cannot be created, or something the profile names is missing.
        """
        venv = Path(self._profile.venv or "/")
        if not venv.is_absolute() and not (venv / "bin/activate").is_file():
            raise LauncherError(
                f"venv {str(venv)!r} of profile {self._profile.name!r} is not below {Path.cwd()}; "
                "submit from the project's folder, or write an absolute path into the profile"
            )
        run_dir = run_directory.make(Path(self._profile.runs_dir), name)
        return RunFolder(here=run_dir, there=str(run_dir), start=self.cwd)

    def bring(self, folder: RunFolder) -> None:
        """Copy the files of a new run directory to the file system of the nodes.

        Raises:
            LauncherError: something could not be copied.
        """

    def discard(self, folder: RunFolder, *, used: bool) -> None:
        """Remove a new run directory; errors are ignored if a job may write to it."""
        shutil.rmtree(folder.here, ignore_errors=used)

    def sbatch(
        self,
        argv: Sequence[str],
        *,
        folder: RunFolder,
        key: str,
        again: bool,
        secrets: Mapping[str, str],
    ) -> "CompletedProcess[str]":
        """Submit a job.

        Args:
            argv: sbatch and its arguments.
            folder: The run directory.
            key: A unique name of this submission: a second call creates no second job.
            again: Whether to submit although an earlier call may have submitted the job.
            secrets: Variables that the job takes from here; a local sbatch inherits them.
        """
        return self.command(argv)

    def answers(self, folder: RunFolder, keys: Sequence[str]) -> dict[str, str]:
        """Return the recorded answers of sbatch, by the keys of the submissions."""
        return {}

    def keep(self, folder: RunFolder, *, jobs: Sequence[str], record: RunRecord | None) -> None:
        """Write the lines of the jobs, and the record of a new run, to a remote run directory.

        Raises:
            LauncherError: it cannot be written; the jobs are submitted nevertheless.
        """

    def watch(self, run: Run) -> None:
        """Register that a process has this run open."""

    def fetch(self, since: float) -> None:
        """Refresh the mirrors of the open runs that are older than `since`.

        Raises:
            LauncherError: they cannot be fetched.
        """

    def seen(self, record: RunRecord) -> Path | None:
        """Return the run directory as this machine sees it now."""
        return record.run_dir

    def exchange(self, record: RunRecord) -> Exchange | None:
        """Return access to the watchdogs of a remote run; None if the run directory is local."""
        return None

    def request_cancel(self, record: RunRecord) -> None:
        """Mark the run as cancelled."""
        if record.run_dir is not None:
            with contextlib.suppress(OSError):  # a point that has not started has no run directory
                record.run_dir.mkdir(parents=True, exist_ok=True)
            run_directory.request_cancel(record.run_dir)

    def withdraw_cancel(self, record: RunRecord) -> None:
        """Remove the cancellation mark."""
        if record.run_dir is not None:
            run_directory.withdraw_cancel(record.run_dir)
