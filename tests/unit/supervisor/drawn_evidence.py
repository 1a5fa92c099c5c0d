"""Evidence that is given, instead of found."""

import dataclasses
from collections.abc import Sequence

from toolkit.supervisor.evidence.first_error import Failure, alike
from toolkit.supervisor.evidence.outcome import Outcome
from toolkit.supervisor.policy import Evidence, Verdict


@dataclasses.dataclass(kw_only=True)
class Given(Evidence):
    """What a test says."""

    status: int = 1
    outcome: Outcome | None = None
    stopping: str = ""
    disk: str = ""
    began: bool = True
    taken_over: Verdict | None = None
    in_job: Failure | None = None
    workers: Sequence[int] = ()
    idle: bool = False
    stopper: Verdict | None = None
    error: Failure | None = None
    earlier: Failure | None = None
    memory: str | None = None
    killed_on: str | None = None
    obstacle: Verdict | None = None

    def ranks_began(self) -> bool:
        return self.began

    def superseded(self) -> Verdict | None:
        return self.taken_over

    def repeated(self) -> Failure | None:
        return self.in_job

    def exited_with(self, status: int) -> bool:
        return status in self.workers

    def no_progress(self) -> bool:
        return self.idle

    def stopped(self) -> Verdict | None:
        return self.stopper

    def raised(self) -> Failure | None:
        return self.error

    def failed_before(self) -> Failure | None:
        same = self.error is not None and alike(self.earlier, self.error, in_a_row=True)
        return self.error if same else None

    def out_of_memory(self) -> str | None:
        return self.memory

    def torchrun_was_killed(self) -> str | None:
        return self.killed_on

    def could_not_start(self) -> Verdict | None:
        return self.obstacle
