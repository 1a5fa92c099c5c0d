"""Training under a parameter server: the model on the server and on a trainer, and their loop.

The server holds parameters and optimizer. A trainer loads the received weights, computes a gradient
and sends it back; it has no state that a checkpoint would have to save.

Checkpoints, evaluation, stops and the end are those of `train.loop`: there all ranks meet. Between
two meetings there is a stretch of updates, with a known end, in which no trainer waits longer than
`--ps-mode` allows. So each batch is drawn exactly once, and no gradient is in flight at a
checkpoint.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ...data.order import mixed, seed_generators
from ...errors import NonFiniteLoss, TrainError, UsageError
from ...loop import Trainer, listed
from ...model import batchnorm, compilation
from ...model.evaluation import batch_size, measure
from ...model.optimizer import NamedOptimizer
from ...runtime.process_group import Alone
from ..base import Parts, WholeModel
from ..consistency import some_of
from ..layout import Layout
from ..writes import Writes
from . import wire
from .server import Gradient, InStep, Pacing, Server, Stretch, Work


class Served(WholeModel):
    """One rank's copy of the model; the copy of rank 0 is the trained model."""

    writes: Writes

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.model())
        self.serves = parts.group.rank_info.rank == 0
        if not self.serves:
            compilation.compile_whole(self.model, parts.config)
        # In sync mode, each trainer has a slice of every batch; otherwise it has whole batches.
        self.trainers = parts.group.rank_info.world_size - 1
        in_step = parts.config.ps_mode == "sync"
        self.shards = self.trainers if in_step else 1
        self.shard = max(parts.group.rank_info.rank - 1, 0) if in_step else 0
        self.axes = (self.shard,)
        # The number of recorded ages, their sum, and the largest.
        self._ages = 0, 0, 0

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers with changes to send: running statistics that checkpoints save.

        They are read anew on each call, as forward() may replace them.
        """
        saved = self.model.state_dict().keys()
        buffers = batchnorm.numeric_buffers(self.model)
        return {name: buffer.detach() for name, buffer in buffers.items() if name in saved}

    def describe(self) -> str:
        """Describe the role of each rank."""
        config = self.parts.config
        waits = {
            "sync": "which wait for each other",
            "async": "which wait for nobody",
            "bounded": f"with gradients at most {config.staleness} updates old",
        }[config.ps_mode]
        return f"rank 0 serves {self.trainers} trainers, {waits}"

    def report(self) -> str:
        """Describe the age of gradients."""
        if not (ages := self.ages()) or self.parts.config.ps_mode == "sync":
            return ""
        return (
            f"gradients were {ages['staleness_mean']:.2f} updates old in the mean, at most "
            f"{ages['staleness_max']:g}"
        )

    def note_age(self, age: int) -> None:
        """Record the age of an update's gradient, in updates."""
        count, total, largest = self._ages
        self._ages = count + 1, total + age, max(largest, age)

    def ages(self) -> dict[str, float]:
        """Return the mean and the largest age since the start of this process."""
        count, total, largest = self._ages
        if not count:
            return {}
        return {"staleness_mean": total / count, "staleness_max": float(largest)}

    def bind(self, optimizer: NamedOptimizer) -> None:
        """Store the optimizer; the optimizer of a trainer has no parameters."""
        super().bind(optimizer)
        self.writes = Writes(dict(self.model.named_parameters()), self.norm_device)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the server's parameters; on a trainer, there are none for an optimizer."""
        return self.model.named_parameters() if self.serves else iter(())

    def model_state(self) -> dict[str, Tensor]:
        """Return the server's model; a trainer has nothing to save."""
        return super().model_state() if self.serves else {}

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Load the server's model; a trainer receives weights with its work."""
        if self.serves:
            super().load_model_state(state)

    def copy_weights(self) -> list[Tensor]:
        """Copy parameters and moving buffers to the CPU."""
        return [tensor.detach().to("cpu", copy=True) for tensor in self._moving()]

    def take_weights(self, weights: Sequence[Tensor]) -> None:
        """Load the weights that the server has copied."""
        with torch.no_grad():
            for mine, sent in zip(self._moving(), weights, strict=True):
                mine.copy_(sent)

    def take_gradients(self) -> list[Tensor | None]:
        """Move this trainer's gradients to the CPU, out of the parameters."""
        gradients = [None if p.grad is None else p.grad.cpu() for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return gradients

    def moved(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the changes of buffers since these weights."""
        buffers = self._buffers().values()
        before = weights[len(weights) - len(buffers) :]
        pairs = zip(buffers, before, strict=True)
        return [batchnorm.change(now.cpu(), then) for now, then in pairs]

    def put_gradients(self, pieces: Sequence[Sequence[Tensor | None]]) -> None:
        """Set the parameters' gradients to the sum of pieces, added in the given order."""
        for parameter, column in zip(
            self.model.parameters(), zip(*pieces, strict=True), strict=True
        ):
            total: Tensor | None = None
            for gradient in column:
                if gradient is not None:
                    total = gradient.clone() if total is None else total.add_(gradient)
            parameter.grad = None if total is None else total.to(parameter.device)

    def move(self, pieces: Sequence[Sequence[Tensor]]) -> None:
        """Change buffers by the mean of the trainers' changes: see `train.model.batchnorm`.

        Raises:
            UsageError: a counter has changed differently on trainers that share a batch.
        """
        columns = zip(*pieces, strict=True)
        for (name, buffer), column in zip(self._buffers().items(), columns, strict=True):
            mean = torch.stack(column).double().mean(dim=0)
            # Pass counters are whole numbers, and change equally on all trainers.
            exact = not buffer.is_floating_point()
            if exact and not all(piece.equal(column[0]) for piece in column):
                raise UsageError(
                    f"--strategy ps: buffer {name!r} of task {self.task.name!r} holds whole "
                    "numbers, depends on each trainer's samples, and how to combine them is "
                    "undefined: make it a buffer of floats, or one that is not saved "
                    "(persistent=False)"
                )
            buffer += mean.to(buffer.device, buffer.dtype)

    def _moving(self) -> list[Tensor]:
        return [*self.model.parameters(), *self._buffers().values()]


class ServedTrainer(Trainer):
    """The training loop, for the server on rank 0 and for trainers."""

    strategy: Served

    def run(self) -> bool:
        """Train to the last step, or until stopped; return whether the run is done."""
        self._stretch = 0
        self._server: Server | None = None
        if self.strategy.serves:
            bound = self.config.staleness if self.config.ps_mode == "bounded" else None
            in_step = self.config.ps_mode == "sync"
            pacing = InStep(self.strategy.trainers) if in_step else Pacing(bound)
            self._server = Server(
                pacing, self.strategy.copy_weights, timeout_s=self.config.timeout_s
            )
        with wire.connect(self.group, self._server, timeout_s=self.config.timeout_s):
            return super().run()

    def train_step(self) -> bool:
        """Make all updates up to the next meeting; return whether any rank got a stop request."""
        self._stretch += 1
        ended = self._compute() if self._server is None else self._serve(self._server)
        # All ranks reach this point, so all of them can leave without a hang.
        stop = self.note_stop(self.group.sum([self.stop.requested])[0])
        if ended.error is not None:
            raise ended.error
        self.progress.step = ended.step
        self.progress.samples_seen = ended.step * self.config.global_batch
        return stop

    def measure(self) -> dict[str, float]:
        """Evaluate the whole test set on the server, which tells trainers that it goes on."""
        if not self.strategy.serves:
            # Their wait for a single answer is limited by --timeout-s.
            while self.group.sum([0.0, self.stop.requested])[0]:
                pass
            return {}
        rank_info = dataclasses.replace(self.group.rank_info, rank=0, world_size=1)
        alone = Alone(rank_info=rank_info, device=self.group.device)
        parts = dataclasses.replace(self.strategy.parts, layout=Layout(), group=alone)
        whole = WholeModel(parts, self.strategy.model)
        batch = batch_size(self.config, self.strategy)
        try:
            return measure(
                *(self.task, whole, alone, self.test),
                batch=batch,
                stop_requested=lambda: self.group.sum([1.0, self.stop.requested])[1] > 0,
            )
        finally:
            self.group.sum([0.0, 0.0])

    def _serve(self, server: Server) -> Stretch:
        """Apply the updates of a stretch as they arrive, up to the next meeting of all ranks."""
        step, every = self.progress.step, self.config.checkpoint_every
        assert every != "auto", "refused with the command line"
        end_of_epoch = math.ceil((self.epoch + 1) * len(self.train) / self.config.global_batch)
        checkpoint = (step // every + 1) * every if every else self.progress.steps
        server.open(version=step, limit=min(self.progress.steps, end_of_epoch, checkpoint))
        stop = False
        error: TrainError | None = None
        try:
            started = time.monotonic()
            while gradients := server.collect(stop=stop or self.stop.requested):
                self._apply(server, gradients, started)
                started = time.monotonic()
                stop = stop or any(gradient.stop for gradient in gradients)
        except (NonFiniteLoss, UsageError) as caught:
            error = caught
        ended = Stretch(number=self._stretch, step=self.progress.step, error=error)
        server.close(ended)
        return ended

    def _apply(self, server: Server, gradients: Sequence[Gradient], started: float) -> None:
        """Make one update, atomically for all readers."""
        if infinite := [gradient for gradient in gradients if not math.isfinite(gradient.loss)]:
            raise self._not_finite("loss", infinite)
        if written := {name for gradient in gradients for name in gradient.written}:
            raise UsageError(
                f"--strategy ps: in step {self.progress.step + 1} forward() of the model of task "
                f"{self.task.name!r} writes {some_of(written)}. Trainers have copies of it and do "
                "not send them back; write parameters in model() only and keep what moves in "
                "buffers of floats, or use --strategy single"
            )
        loss = sum(gradient.loss for gradient in gradients)
        count = sum(gradient.count for gradient in gradients)
        extra: dict[str, float] = {}
        with server.applying(gradients) as age:
            self.strategy.put_gradients([gradient.gradients for gradient in gradients])
            if self.config.ps_mode != "sync":
                self.strategy.note_age(age)
                extra["staleness"] = age
            try:
                self.update(loss, count, started=started, **extra)
            except NonFiniteLoss as error:
                # The loop's own message assumes batches in order.
                raise self._not_finite("gradient", gradients) from error
            self.strategy.move([gradient.moved for gradient in gradients])
        self.progress.metrics.update(self.strategy.ages())

    def _not_finite(self, what: str, gradients: Sequence[Gradient]) -> NonFiniteLoss:
        numbers = {number for gradient in gradients for number in gradient.samples.tolist()}
        trainers = ", ".join(str(gradient.ticket.trainer + 1) for gradient in gradients)
        return NonFiniteLoss(
            f"the {what} of step {self.progress.step + 1} is not finite, as rank {trainers} has "
            f"found for a batch of samples {listed(sorted(numbers))}; checkpoints are from "
            "before it; a smaller --lr or --clip-norm may help"
        )

    def _compute(self) -> Stretch:
        trainer = self.group.rank_info.rank - 1
        while isinstance(work := wire.draw(trainer, self._stretch), Work):
            wire.push(self._gradient(work))
        return work

    def _gradient(self, work: Work) -> Gradient:
        strategy, ticket = self.strategy, work.ticket
        strategy.take_weights(work.weights)
        begin = ticket.update * self.config.global_batch
        # With one trainer, or in sync mode, batches come in order and can be prefetched.
        in_turn = strategy.shards > 1 or strategy.trainers == 1
        batch = self.feed.batch(begin) if in_turn else self.feed.lone_batch(begin)
        seed_generators(mixed(self.seed, ticket.update), self.group.device)
        strategy.writes.start(contents=not strategy.writes.started)
        sums = strategy.accumulate(batch.split_into(self.micro_batches))
        return Gradient(
            ticket=ticket,
            loss=sums.loss.item(),
            count=sums.count,
            gradients=strategy.take_gradients(),
            moved=strategy.moved(work.weights),
            samples=self.feed.numbers(begin),
            stop=self.stop.requested,
            written=strategy.written() if strategy.has_written() else (),
        )
