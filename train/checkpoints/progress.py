"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.rundir.files import Outcome
from train.runtime.rank import RankInfo


@dataclass(kw_only=True)
class TrainingProgress:
    """What changes from step to step, tensors apart."""

    steps: int
    """Optimizer steps the run has in all."""
    step: int = 0
    """Optimizer steps made."""
    samples_seen: int = 0
    """Training samples drawn; the whole state of the data order."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last loss and the last evaluation."""

    def outcome(
        self, rank_info: RankInfo, status: str, reason: str, *, rank: int | None = None
    ) -> Outcome:
        """Describe the run as it stands."""
        return Outcome(
            status=status,
            attempt=rank_info.attempt,
            restart=rank_info.restart,
            step=self.step,
            steps=self.steps,
            samples_seen=self.samples_seen,
            rank=rank,
            reason=reason,
            metrics=dict(self.metrics),
        )
