"""The training loop under a parameter server.

Checkpoints, evaluation, stops and the end are those of `train.loop`: there all ranks meet. Between
two such meetings lies a stretch of updates, known in advance, in which no trainer waits longer than
`--ps-mode` allows.
So each batch is drawn exactly once, and a checkpoint has no gradient on its way.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import torch

from train.data.order import Batch, mixed, seed_device
from train.errors import NonFiniteLoss
from train.loop import Trainer, listed
from train.model.evaluation import batch_size, measure
from train.parallel.base import WholeModel
from train.parallel.layout import Layout
from train.parallel.parameter_server import wire
from train.parallel.parameter_server.pacing import Ticket, pacing_of
from train.parallel.parameter_server.server import Gradient, Server, Stretch, Work
from train.parallel.parameter_server.strategy import Served
from train.runtime.process_group import RankGroup


class Alone(RankGroup):
    """A group of one, in a process that is connected to others."""

    @property
    def connected(self) -> bool:
        """Say that there is nothing to exchange."""
        return False


class ServedTrainer(Trainer):
    """The loop of rank 0, which serves, and that of a trainer."""

    strategy: Served

    def run(self) -> bool:
        """Train to the last step, or until stopped; say whether the run is done."""
        self._stretch = 0
        self._server: Server | None = None
        if self.strategy.serves:
            self._server = Server(
                pacing_of(self.config, self.strategy.trainers),
                self.strategy.copy_weights,
                timeout_s=self.config.timeout_s,
            )
        with wire.connect(self.group, self._server, timeout_s=self.config.timeout_s):
            return super().run()

    def train_step(self) -> bool:
        """Make all updates up to the next meeting; return whether any rank got a stop request.

        Raises:
            NonFiniteLoss: on all ranks, before the weights are touched.
        """
        self._stretch += 1
        ended = self._compute() if self._server is None else self._serve(self._server)
        # All ranks are here, so none is left waiting when all of them leave.
        stop = self.note_stop(self.group.sum([self.stop.requested])[0])
        if ended.error is not None:
            raise NonFiniteLoss(ended.error)
        self.progress.step = ended.step
        self.progress.samples_seen = ended.step * self.config.global_batch
        return stop

    def measure(self) -> dict[str, float]:
        """Measure on the whole test set, on the server."""
        if not self.strategy.serves:
            return {}
        rank_info = dataclasses.replace(self.group.rank_info, rank=0, world_size=1)
        alone = Alone(rank_info=rank_info, device=self.group.device)
        parts = dataclasses.replace(self.strategy.parts, layout=Layout(), group=alone)
        whole = WholeModel(parts, self.strategy.model)
        batch = batch_size(self.config, self.strategy)
        return measure(self.task, whole, alone, self.test, batch=batch)

    def _next_meeting(self) -> int:
        """Give the step after which there is something to do that takes all ranks."""
        step, every = self.progress.step, self.config.checkpoint_every
        end_of_epoch = math.ceil((self.epoch + 1) * len(self.train) / self.config.global_batch)
        steps = [self.progress.steps, end_of_epoch]
        if every:
            steps.append((step // every + 1) * every)
        return min(steps)

    def _serve(self, server: Server) -> Stretch:
        """Apply the updates of a stretch as they come."""
        server.open(version=self.progress.step, limit=self._next_meeting())
        stop, error = False, None
        try:
            started = time.monotonic()
            while gradients := server.collect(stop=stop or self.stop.requested):
                self._apply(server, gradients, started)
                started = time.monotonic()
                stop = stop or any(gradient.stop for gradient in gradients)
        except NonFiniteLoss as caught:
            error = str(caught)
        ended = Stretch(number=self._stretch, step=self.progress.step, error=error)
        server.close(ended)
        return ended

    def _apply(self, server: Server, gradients: Sequence[Gradient], started: float) -> None:
        """Make one update, atomically for all readers."""
        self._refuse_infinite(gradients)
        loss = sum(gradient.loss for gradient in gradients)
        count = sum(gradient.count for gradient in gradients)
        noted: dict[str, float] = {}
        with server.applying(gradients) as age:
            self.strategy.put_gradients([gradient.gradients for gradient in gradients])
            if self.config.ps_mode != "sync":
                self.strategy.note_age(age)
                noted["staleness"] = age
            try:
                self.update(loss, count, started=started, **noted)
            except NonFiniteLoss as error:
                # The loop believes that batches come in order.
                raise self._not_finite("gradient", gradients) from error
            self.strategy.move([gradient.moved for gradient in gradients])
        self.progress.metrics.update(self.strategy.ages())

    def _refuse_infinite(self, gradients: Sequence[Gradient]) -> None:
        bad = [gradient for gradient in gradients if not math.isfinite(gradient.loss)]
        if bad:
            raise self._not_finite("loss", bad)

    def _not_finite(self, what: str, gradients: Sequence[Gradient]) -> NonFiniteLoss:
        numbers = {number for gradient in gradients for number in gradient.samples.tolist()}
        trainers = ", ".join(str(gradient.ticket.trainer + 1) for gradient in gradients)
        return NonFiniteLoss(
            f"the {what} of step {self.progress.step + 1} is not finite, as rank {trainers} has "
            f"found for a batch of samples {listed(sorted(numbers))}; checkpoints are from "
            "before it; a smaller --lr or --clip-norm may help"
        )

    def _compute(self) -> Stretch:
        """Compute gradients until the stretch is over."""
        trainer = self.group.rank_info.rank - 1
        while isinstance(drawn := wire.draw(trainer, self._stretch), Work):
            wire.push(self._gradient(drawn))
        return drawn

    def _gradient(self, work: Work) -> Gradient:
        """Do what a step is without a server, up to the gradient."""
        strategy, ticket = self.strategy, work.ticket
        strategy.take_weights(work.weights)
        parts = self._batch(ticket).split_into(self.micro_batches)
        seed_device(mixed(self.seed, ticket.update), self.group.device)
        sums = strategy.accumulate(parts)
        loss = sums.loss.item()
        return Gradient(
            ticket=ticket,
            loss=loss,
            count=sums.count,
            gradients=strategy.take_gradients(),
            moved=strategy.moved(work.weights),
            samples=self._numbers(ticket),
            stop=self.stop.requested,
        )

    def _batch(self, ticket: Ticket) -> Batch:
        begin = ticket.update * self.config.global_batch
        if self.strategy.shards > 1 or self.strategy.trainers == 1:
            # One after the other: they can be read ahead.
            return self.feed.batch(begin)
        return self.feed.lone_batch(begin)

    def _numbers(self, ticket: Ticket) -> torch.Tensor:
        """Give the sample numbers of a ticket's slice."""
        return self.feed.numbers(ticket.update * self.config.global_batch)
