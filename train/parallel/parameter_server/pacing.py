"""The order of updates, in whole numbers: no tensors, no threads, no clock.

An update is one optimizer step. The weights' version is the number of updates in them. A trainer
*holds* a ticket from when it draws it until its gradient has been applied. The age of a gradient
(its staleness) is the number of updates applied between the weights that it was computed from and
the moment at which it is applied itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from train.cli.config import Config


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The right to compute one gradient."""

    trainer: int
    """The trainer that holds it, from 0."""
    update: int
    """Which global batch it is for, from 0: each is drawn exactly once."""
    version: int
    """Updates in the weights that it is computed from."""


class Pacing(ABC):
    """Decides which trainer may draw a ticket; updates up to `limit` may begin."""

    pieces: int = 1
    """How many gradients make up an update."""

    def __init__(self) -> None:
        """Begin before the first update; nothing may be drawn yet."""
        self.version = self.limit = 0
        self.held: dict[int, Ticket] = {}

    def open(self, *, version: int, limit: int) -> None:
        """Let updates begin until there are `limit` of them."""
        assert not self.held, "what was drawn before has been applied"
        self.version, self.limit = version, limit

    @property
    @abstractmethod
    def begun(self) -> int:
        """Number of updates that were started."""

    @abstractmethod
    def may_draw(self, trainer: int) -> bool:
        """Say whether a trainer may begin now, or must wait."""

    @abstractmethod
    def draw(self, trainer: int) -> Ticket:
        """Begin, or take part in, an update."""

    @property
    def over(self) -> bool:
        """Whether all updates that may begin have been applied."""
        return self.version >= self.limit

    def hurry(self) -> None:
        """Let no other update begin than those that have."""
        self.limit = min(self.limit, self.begun)

    def age(self, tickets: Sequence[Ticket]) -> int:
        """Count the updates since the weights that an update's gradients were computed from."""
        return self.version - min(ticket.version for ticket in tickets)

    def apply(self, tickets: Sequence[Ticket]) -> None:
        """Note that an update has been made of these."""
        for ticket in tickets:
            del self.held[ticket.trainer]
        self.version += 1


class InStep(Pacing):
    """All trainers work on their slice of the same batch, and wait for each other."""

    def __init__(self, trainers: int) -> None:
        """Make each update of one gradient per trainer."""
        super().__init__()
        self.pieces = trainers

    @property
    def begun(self) -> int:
        """Count the one that trainers are at."""
        return self.version + bool(self.held)

    def may_draw(self, trainer: int) -> bool:
        """Let each trainer draw once per update."""
        return trainer not in self.held and self.version < self.limit

    def draw(self, trainer: int) -> Ticket:
        """Take a slice of the next batch."""
        ticket = Ticket(trainer=trainer, update=self.version, version=self.version)
        self.held[trainer] = ticket
        return ticket


class Apart(Pacing):
    """Each trainer works on whole batches of its own, without waiting or with a bounded wait."""

    def __init__(self, staleness: int | None = None) -> None:
        """Let gradients be up to `staleness` updates old; None: however old."""
        super().__init__()
        self.staleness = staleness

    @property
    def begun(self) -> int:
        """Count those that have been applied, and those that are held."""
        return self.version + len(self.held)

    def may_draw(self, trainer: int) -> bool:
        """Hold a trainer back if its update could make another one's gradient too old.

        In the worst case a ticket's gradient is applied after those of all other tickets that have
        been drawn by then. Its age is then the number of all other updates that were started, minus
        its version. So that must stay within the bound for the oldest ticket, whenever one is
        drawn. Applying changes neither number, so the bound holds in between, and in any order.
        """
        if trainer in self.held or self.begun >= self.limit:
            return False
        if self.staleness is None:
            return True
        oldest = min((ticket.version for ticket in self.held.values()), default=self.version)
        return self.begun - oldest <= self.staleness

    def draw(self, trainer: int) -> Ticket:
        """Take the next batch."""
        ticket = Ticket(trainer=trainer, update=self.begun, version=self.version)
        self.held[trainer] = ticket
        return ticket


def pacing_of(config: Config, trainers: int) -> Pacing:
    """Choose by `--ps-mode`."""
    if config.ps_mode == "sync":
        return InStep(trainers)
    return Apart(config.staleness if config.ps_mode == "bounded" else None)
