"""A run whose submission was interrupted before Slurm's job id was recorded."""

import time
from collections.abc import Sequence

from toolkit.errors import LauncherError
from toolkit.runs import registry, run_directory
from toolkit.runs.state import RunState, RunStatus
from toolkit.slurm.jobs import SlurmJob
from toolkit.slurm.login.host import Login
from toolkit.slurm.run import SlurmRun
from toolkit.slurm.snapshot import Queue, Snapshot
from toolkit.slurm.squeue import Command

__all__ = ["SETTLED_S", "BegunRun"]

SETTLED_S = 120.0
"""After this time nothing is under way any more: what Slurm has not got, it will not get."""


class BegunRun(SlurmRun):
    """A run that Slurm may not have."""

    def __init__(
        self,
        record: registry.RunRecord,
        command: Command,
        queue: Queue,
        login: Login,
        *,
        why: str,
    ) -> None:
        super().__init__(record, command, queue, login)
        self._why = why

    @property
    def jobs(self) -> list[SlurmJob]:
        """No job of it is known."""
        return []

    def told(self, seen: Snapshot) -> Sequence[RunStatus]:
        """Return the status by the age of the submission alone."""
        return (self.unreachable(self._why),)

    def unreachable(self, reason: str) -> RunStatus:
        """Return the status without an answer of Slurm."""
        if self.run_dir is not None and run_directory.has_attempts(self.run_dir):
            return run_directory.ended_status(
                self.run_dir
            )  # it has run, and Slurm has forgotten it
        if reason or time.time() < self.record.created + SETTLED_S:
            cut = "its submission was cut short, and Slurm has no job of it yet"
            return RunStatus(state=RunState.UNKNOWN, reason=reason or cut)
        return RunStatus(
            state=RunState.FAILED,
            reason="its submission was cut short, and Slurm never got it; "
            f"`toolkit resubmit {self.name}` submits it",
        )

    def cancel(self) -> None:
        """Refuse: no job of it is known.

        Raises:
            LauncherError: always.
        """
        raise LauncherError(f"{self.uri} cannot be cancelled: {self.unreachable(self._why).reason}")
