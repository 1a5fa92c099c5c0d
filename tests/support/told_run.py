"""A run of no place, with a state that a test sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.runs.records.registry import RunRecord
from toolkit.runs.run import Run
from toolkit.runs.state import RunState, RunStatus


class ToldRun(Run):
    """A run with a state that the test sets."""

    told = RunStatus(state=RunState.RUNNING)
    members: Sequence[Run] = ()

    @property
    def points(self) -> Sequence[Run]:
        return self.members

    def sum_of(self, found: Sequence[RunStatus]) -> RunStatus:
        return found[0]

    def status(self) -> RunStatus:
        return self.told

    def _lines(self, *_: Any) -> Any:
        return iter(())

    def cancel(self) -> None:
        """Nothing to stop."""


def run_at(folder: Path | None, *, name: str = "digits", created: float = 0.0) -> ToldRun:
    record = RunRecord(
        uri="local://x", name=name, job="digits", profile={}, created=created, run_dir=folder
    )
    return ToldRun(record)
