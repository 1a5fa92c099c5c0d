"""The server's work for its trainers: hand out tickets, collect gradients, and lose none.

An update is one optimizer step. The version of the weights is the number of updates in them. A
trainer *holds* a ticket from the draw until its gradient has been applied. The age of a gradient
(its staleness) is the number of updates applied after the version of its weights and before the
gradient itself. `Pacing` decides the order of updates with whole numbers: no tensors, no threads,
no clock.
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
    """The global batch to work on, from 0: none is skipped or repeated."""
    version: int
    """Version of the weights for the gradient."""


class Pacing:
    """Decides which trainer may draw a ticket; updates up to `limit` may start.

    Each trainer works on separate, whole batches, without waiting or with a bounded wait.
    """

    pieces: int = 1
    """Gradients per update."""

    def __init__(self, staleness: int | None = None) -> None:
        """Limit the age of gradients to `staleness` updates; None: no limit."""
        self.staleness = staleness
        self.version = self.limit = 0
        self.held: dict[int, Ticket] = {}

    def open(self, *, version: int, limit: int) -> None:
        """Let updates start until there are `limit` of them."""
        assert not self.held, "what was drawn before has been applied"
        self.version, self.limit = version, limit

    @property
    def started(self) -> int:
        """Count the updates that are applied or held."""
        return self.version + len(self.held)

    def may_draw(self, trainer: int) -> bool:
        """Whether a trainer may start an update without making another gradient too old.

        In the worst case, a ticket's gradient is applied after those of all other tickets drawn by
        then. Its age is then the number of other started updates minus its version. At each draw,
        this worst-case age of the oldest ticket must stay within the bound. Applying an update
        changes neither number, so the bound also holds between draws, in any order.
        """
        if trainer in self.held or self.started >= self.limit:
            return False
        if self.staleness is None:
            return True
        oldest = min((ticket.version for ticket in self.held.values()), default=self.version)
        return self.started - oldest <= self.staleness

    def draw(self, trainer: int) -> Ticket:
        """Give a trainer the next batch and the current weights."""
        return self._hold(trainer, self.started)

    def _hold(self, trainer: int, update: int) -> Ticket:
        self.held[trainer] = Ticket(trainer=trainer, update=update, version=self.version)
        return self.held[trainer]

    @property
    def over(self) -> bool:
        """Whether all updates up to `limit` have been applied."""
        return self.version >= self.limit

    def hurry(self) -> None:
        """Let no further update start."""
        self.limit = min(self.limit, self.started)

    def age(self, tickets: Sequence[Ticket]) -> int:
        """Count the updates since the oldest weights used for an update's gradients."""
        return self.version - min(ticket.version for ticket in tickets)

    def apply(self, tickets: Sequence[Ticket]) -> None:
        """Record an update made from these tickets."""
        for ticket in tickets:
            del self.held[ticket.trainer]
        self.version += 1


class InStep(Pacing):
    """All trainers work on slices of the same batch, and wait for each other."""

    def __init__(self, trainers: int) -> None:
        super().__init__()
        self.pieces = trainers

    @property
    def started(self) -> int:
        """Count the updates that are applied, and the current one."""
        return self.version + bool(self.held)

    def may_draw(self, trainer: int) -> bool:
        """Whether a trainer has not drawn since the last update."""
        return trainer not in self.held and self.version < self.limit

    def draw(self, trainer: int) -> Ticket:
        """Give a trainer its slice of the next batch."""
        return self._hold(trainer, self.version)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A gradient to compute."""

    ticket: Ticket
    """Names the batch."""
    weights: Sequence[Tensor]
    """Parameters and moving buffers for the computation, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The result of a trainer's work."""

    ticket: Ticket
    """The ticket of the work."""
    loss: float
    """Summed loss."""
    count: int
    """Items in the sum."""
    gradients: Sequence[Tensor | None]
    """Gradients of the summed loss, by parameter, on the CPU."""
    moved: Sequence[Tensor]
    """The change of each moving buffer, on the CPU."""
    samples: Tensor
    """Numbers of the samples in the batch."""
    stop: bool
    """Whether the trainer got a stop request."""
    written: Sequence[str] = ()
    """Parameters that passes have written in the trainer's copy."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The end of a stretch of updates, after which all ranks meet."""

    number: int
    """Number of the stretch, from 1."""
    step: int
    """Total updates so far."""
    error: TrainError | None = None
    """The error that ends the run, if there is one."""


class Server:
    """Gives weights to trainers, and their gradients to the training loop.

    Each trainer has its own thread here, which calls `draw()` and `push()`. The first thread that
    sees a trainer disappear calls `lose()`. The training loop on rank 0 calls the other methods.
    One lock guards all state. Applying an update reads, changes and writes the weights: of two
    concurrent updates one would be lost, and a concurrent reader would see half a step. So only the
    loop's thread applies updates, holding the lock, and weights are copied under the same lock.
    """

    def __init__(
        self, pacing: Pacing, copy_weights: Callable[[], Sequence[Tensor]], *, timeout_s: float
    ) -> None:
        """Set the function that copies weights to the CPU, and the longest wait for a gradient."""
        self._pacing, self._copy_weights, self._timeout_s = pacing, copy_weights, timeout_s
        self._changed = threading.Condition()
        self._arrived: list[Gradient] = []
        # A copy of the current version, made at the first request.
        self._weights: Sequence[Tensor] | None = None
        self._last = Stretch(number=0, step=0)
        self._lost: str | None = None

    def draw(self, trainer: int, stretch: int) -> Work | Stretch:
        """Wait for work, or for the end of the stretch, and return it."""
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
        """End the wait for a lost trainer."""
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()

    def open(self, *, version: int, limit: int) -> None:
        """Start a stretch of updates."""
        with self._changed:
            self._weights = None
            self._pacing.open(version=version, limit=limit)
            self._changed.notify_all()

    def collect(self, *, stop: bool) -> Sequence[Gradient] | None:
        """Wait for the gradients of the next update, in a fixed order; None: the stretch is over.

        With `stop`, no further update starts.

        Raises:
            PeerError: a trainer is gone, or too few gradients came within the timeout.
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
        # Sorted by trainer, not by time: rounding must not depend on the order of arrival.
        return sorted(gradients, key=lambda gradient: gradient.ticket.trainer)

    @contextmanager
    def applying(self, gradients: Sequence[Gradient]) -> Iterator[int]:
        """Block all readers during an update; yields the age of its oldest gradient."""
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
