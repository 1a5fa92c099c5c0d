"""What the server does for its trainers: hand out work, take gradients, and lose none.

Trainers call `draw()` and `push()`, each from a thread of its own; the training loop on rank 0
calls the rest. One lock guards it all. Applying an update reads the weights, changes and writes
them: two at once, and one of them would be lost; a reader in between would see half a step. So
only the loop's thread does it, holding the lock, and weights are copied under the same lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from train.errors import PeerError
from train.parallel.parameter_server.pacing import Pacing, Ticket


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


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """How a stretch of updates has ended, after which all ranks meet."""

    number: int
    """Which one, from 1."""
    step: int
    """Updates made in all."""
    error: str | None = None
    """Why the run must end, if it must."""


class Server:
    """Weights for trainers, and their gradients for the loop."""

    def __init__(
        self, pacing: Pacing, copy_weights: Callable[[], Sequence[Tensor]], *, timeout_s: float
    ) -> None:
        """Take over the pacing.

        Args:
            pacing: decides which trainer may start.
            copy_weights: copies them as they are now to the CPU.
            timeout_s: how long to wait for a gradient.
        """
        self._pacing, self._copy_weights, self._timeout_s = pacing, copy_weights, timeout_s
        self._changed = threading.Condition()
        self._arrived: list[Gradient] = []
        # Of this version; made at the first request.
        self._weights: Sequence[Tensor] | None = None
        self._last = Stretch(number=0, step=0)
        self._lost: str | None = None

    # Called by trainers.

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

    # Called by the first thread that sees a trainer disappear.

    def lose(self, reason: str) -> None:
        """End the wait for a trainer that is gone."""
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()

    # Called by the loop.

    def open(self, *, version: int, limit: int) -> None:
        """Begin a stretch of updates."""
        with self._changed:
            self._weights = None
            self._pacing.open(version=version, limit=limit)
            self._changed.notify_all()

    def collect(self, *, stop: bool) -> Sequence[Gradient] | None:
        """Wait for the gradients of the next update, in a fixed order; None: the stretch is over.

        Args:
            stop: whether no update shall begin any more.

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
            taken = self._arrived[: self._pacing.pieces]
            del self._arrived[: self._pacing.pieces]
        # By trainer, not by time: rounding must not depend on the order of arrival.
        return sorted(taken, key=lambda gradient: gradient.ticket.trainer)

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
