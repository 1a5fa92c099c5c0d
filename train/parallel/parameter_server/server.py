"""What the server does for its trainers: hand out work, take gradients, and lose none.

An update is one optimizer step. The weights' version is the number of updates in them. A trainer
*holds* a ticket from when it draws it until its gradient has been applied. The age of a gradient
(its staleness) is the number of updates applied between the weights that it was computed from and
the moment at which it is applied itself. `Pacing` keeps the order of updates, in whole numbers: no
tensors, no threads, no clock.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ...errors import PeerError, TrainError


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The right to compute one gradient."""

    trainer: int
    """The trainer that holds it, from 0."""
    update: int
    """Which global batch it is for, from 0: each is drawn exactly once."""
    version: int
    """Updates in the weights that it is computed from."""


class Pacing:
    """Decides which trainer may draw a ticket; updates up to `limit` may begin.

    Each trainer works on whole batches of its own, without waiting or with a bounded wait.
    """

    pieces: int = 1
    """How many gradients make up an update."""

    def __init__(self, staleness: int | None = None) -> None:
        """Let gradients be up to `staleness` updates old; None: however old."""
        self.staleness = staleness
        self.version = self.limit = 0
        self.held: dict[int, Ticket] = {}

    def open(self, *, version: int, limit: int) -> None:
        """Let updates begin until there are `limit` of them."""
        assert not self.held, "what was drawn before has been applied"
        self.version, self.limit = version, limit

    @property
    def started(self) -> int:
        """Count the updates that have been applied, and those that are held."""
        return self.version + len(self.held)

    def may_draw(self, trainer: int) -> bool:
        """Whether a trainer's update could make no other one's gradient too old.

        In the worst case a ticket's gradient is applied after those of all other tickets that have
        been drawn by then. Its age is then the number of all other updates that were started, minus
        its version. So that must stay within the bound for the oldest ticket, whenever one is
        drawn. Applying changes neither number, so the bound holds in between, and in any order.
        """
        if trainer in self.held or self.started >= self.limit:
            return False
        if self.staleness is None:
            return True
        oldest = min((ticket.version for ticket in self.held.values()), default=self.version)
        return self.started - oldest <= self.staleness

    def draw(self, trainer: int) -> Ticket:
        """Give a trainer the next batch, and the weights as they are now."""
        return self._hold(trainer, self.started)

    def _hold(self, trainer: int, update: int) -> Ticket:
        self.held[trainer] = Ticket(trainer=trainer, update=update, version=self.version)
        return self.held[trainer]

    @property
    def over(self) -> bool:
        """Whether all updates that may begin have been applied."""
        return self.version >= self.limit

    def hurry(self) -> None:
        """Let no other update begin than those that have."""
        self.limit = min(self.limit, self.started)

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
        super().__init__()
        self.pieces = trainers

    @property
    def started(self) -> int:
        """Count the one that trainers are at."""
        return self.version + bool(self.held)

    def may_draw(self, trainer: int) -> bool:
        """Whether a trainer has not drawn since the last update."""
        return trainer not in self.held and self.version < self.limit

    def draw(self, trainer: int) -> Ticket:
        """Give a trainer its slice of the next batch."""
        return self._hold(trainer, self.version)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A gradient to be computed."""

    ticket: Ticket
    """For which batch."""
    weights: Sequence[Tensor]
    """From these: parameters and moving buffers, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What a trainer has made of its work."""

    ticket: Ticket
    """The work's."""
    loss: float
    """Summed loss."""
    count: int
    """Items that it sums over."""
    gradients: Sequence[Tensor | None]
    """Of the summed loss, by parameter, on the CPU."""
    moved: Sequence[Tensor]
    """By how much each moving buffer has moved, on the CPU."""
    samples: Tensor
    """Numbers of the samples that it was computed from."""
    stop: bool
    """Whether the trainer got a stop request."""
    written: Sequence[str] = ()
    """Parameters that its passes have written, of the copy that it was sent."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """How a stretch of updates has ended, after which all ranks meet."""

    number: int
    """Which one, from 1."""
    step: int
    """Updates made in all."""
    error: TrainError | None = None
    """Why the run must end, if it must."""


class Server:
    """Weights for trainers, and their gradients for the loop.

    Trainers call `draw()` and `push()`, each from a thread of its own, and the first thread that
    sees a trainer disappear calls `lose()`; the training loop on rank 0 calls the rest. One lock
    guards it all. Applying an update reads the weights, changes and writes them: two at once, and
    one of them would be lost; a reader in between would see half a step. So only the loop's thread
    does it, holding the lock, and weights are copied under the same lock.
    """

    def __init__(
        self, pacing: Pacing, copy_weights: Callable[[], Sequence[Tensor]], *, timeout_s: float
    ) -> None:
        """Copy weights as they are now to the CPU; wait for a gradient for at most `timeout_s`."""
        self._pacing, self._copy_weights, self._timeout_s = pacing, copy_weights, timeout_s
        self._changed = threading.Condition()
        self._arrived: list[Gradient] = []
        # Of this version; made at the first request.
        self._weights: Sequence[Tensor] | None = None
        self._last = Stretch(number=0, step=0)
        self._lost: str | None = None

    def draw(self, trainer: int, stretch: int) -> Work | Stretch:
        """Return work as soon as there is some, or the end of the stretch."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._last.number >= stretch or self._pacing.may_draw(trainer)
            )
            if self._last.number >= stretch:
                return self._last
            if self._weights is None:
                self._weights = self._copy_weights()
            return Work(ticket=self._pacing.draw(trainer), weights=self._weights)

    def push(self, gradient: Gradient) -> None:
        """Take a gradient; the trainer's next `draw()` waits until it has been applied."""
        with self._changed:
            self._arrived.append(gradient)
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """End the wait for a trainer that is gone."""
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()

    def open(self, *, version: int, limit: int) -> None:
        """Begin a stretch of updates."""
        with self._changed:
            self._weights = None
            self._pacing.open(version=version, limit=limit)
            self._changed.notify_all()

    def collect(self, *, stop: bool) -> Sequence[Gradient] | None:
        """Wait for the gradients of the next update, in a fixed order; None: the stretch is over.

        After a `stop`, no update begins any more.

        Raises:
            PeerError: a trainer is gone, or none has sent anything for too long.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            if stop:
                self._pacing.hurry()
            if self._pacing.over:
                return None
            while len(self._arrived) < self._pacing.pieces and self._lost is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    self._lost = f"no gradient has come for {self._timeout_s:g} s"
            if self._lost is not None:
                raise PeerError(self._lost)
            gradients = self._arrived[: self._pacing.pieces]
            del self._arrived[: self._pacing.pieces]
        # By trainer, not by time: rounding must not depend on the order of arrival.
        return sorted(gradients, key=lambda gradient: gradient.ticket.trainer)

    @contextmanager
    def applying(self, gradients: Sequence[Gradient]) -> Iterator[int]:
        """Exclude all readers while an update is made; gives the age of its oldest gradient."""
        tickets = [gradient.ticket for gradient in gradients]
        with self._changed:
            yield self._pacing.age(tickets)
            self._pacing.apply(tickets)
            self._weights = None
            self._changed.notify_all()

    def close(self, stretch: Stretch) -> None:
        """Report the end of the stretch to every trainer, now or at its next call."""
        with self._changed:
            self._last = stretch
            self._changed.notify_all()
