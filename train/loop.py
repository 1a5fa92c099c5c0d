"""The training loop: steps, agreement, evaluation, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from train import checkpoint, recovery
from train.config import Config
from train.console import Console, figures
from train.data import Batch, Order, seed_of
from train.distributed import Group
from train.errors import FencedError, NonFiniteLoss
from train.evaluation import measure
from train.optimizing import NamedOptimizer
from train.rundir import Outcome, RunDirectory
from train.stopping import StopRequest
from train.strategies import Strategy
from train.tasks import Task


class Trainer:
    """One run in the making: what has been done so far, and how to do the next step."""

    def __init__(
        self,
        *,
        config: Config,
        identity: Mapping[str, object],
        group: Group,
        task: Task,
        strategy: Strategy,
        optimizer: NamedOptimizer,
        directory: RunDirectory,
        console: Console,
        stop: StopRequest,
    ) -> None:
        """Put the parts together; `resume()` and `run()` do the work."""
        self.config, self.identity, self.group, self.task = config, identity, group, task
        self.strategy, self.optimizer, self.directory = strategy, optimizer, directory
        self.console, self.stop = console, stop
        self.train: Batch = task.train().to(group.device)
        self.test: Batch = task.test().to(group.device)
        self.order = Order(size=len(self.train), seed=config.seed)
        self.micro_batch = config.micro_batch_on(strategy.shards)
        self.steps = config.total_steps(len(self.train))
        self.step = 0
        self.samples_seen = 0
        self.metrics: dict[str, float] = {}
        self._saved_step: int | None = None

    @property
    def epoch(self) -> int:
        """Whole passes over the training data so far."""
        return self.samples_seen // len(self.train)

    def resume(self) -> None:
        """Go on from the newest valid checkpoint that any rank sees, if there is one."""
        # Before the weights are loaded, as it may move them, if only to put them back.
        self.strategy.warm_up(self.train.part(0, min(self.micro_batch, len(self.train))))
        seen, source = recovery.find(self.directory.path, self.group)
        for rank, sighting in enumerate(seen):
            for position, reason in sighting.damaged:
                self.directory.event(
                    "checkpoint_skipped",
                    step=position.step,
                    of_attempt=position.attempt,
                    seen_by=rank,
                    reason=reason,
                )
                self.console.say(f"skipping a damaged checkpoint: {reason}")
        if source is None:
            return
        found = recovery.read(self.directory.path, self.group, seen, source)
        self.strategy.load_model_state(found.model)
        self.optimizer.load(found.optimizer)
        self.step, self.samples_seen = found.state.step, found.state.samples_seen
        # Rank 0's own directory has it only if rank 0 was the one to read it.
        self._saved_step = self.step if source == 0 else None
        where = found.position.path(self.directory.path)
        self.directory.event(
            "resume",
            step=self.step,
            samples_seen=self.samples_seen,
            checkpoint=str(where.relative_to(self.directory.path)),
            read_by=source,
            written_by_ranks=found.state.world_size,
        )
        self.console.say(f"resuming after step {self.step}/{self.steps} from {where}")

    def run(self) -> bool:
        """Train to the last step, or until stopped; say whether the run is done."""
        stop_agreed = self.group.sum([self.stop.requested])[0] > 0
        while self.step < self.steps and not stop_agreed:
            epoch_before = self.epoch
            stop_agreed = self.train_step()
            # Evaluation can wait when somebody waits for us to go; a checkpoint cannot.
            if self.epoch > epoch_before and self.step < self.steps and not stop_agreed:
                self.evaluate()
            every = self.config.checkpoint_every
            if stop_agreed or (every and self.step % every == 0):
                self.save_checkpoint()
        if self.step < self.steps:
            self._stopped()
            return False
        self.evaluate()
        self.save_checkpoint()
        if self.config.export:
            self.export(self.config.export)
        return True

    def train_step(self) -> bool:
        """Make one optimizer step; say whether any rank was asked to stop meanwhile.

        Raises:
            NonFiniteLoss: on all ranks, before the weights are touched.
        """
        started = time.monotonic()
        shard, shards = self.strategy.shard, self.strategy.shards
        # A function of the step instead of a generator's state: there is nothing to save or
        # restore.
        torch.manual_seed(seed_of("step", self.config.seed, self.step, shard))
        numbers = self.order.share(
            self.samples_seen, self.config.global_batch, shard=shard, shards=shards
        )
        batch = self.train.take(numbers.to(self.group.device))
        loss = self.strategy.accumulate(batch.split(self.micro_batch)).item()
        finite = math.isfinite(loss)
        # Everything the ranks must agree on before the weights move, in one small collective.
        loss_sum, count, stop_flags, bad_ranks = self.group.sum(
            [
                loss if finite else 0.0,
                self.task.count(batch.targets),
                self.stop.requested,
                not finite,
            ]
        )
        if bad_ranks:
            raise NonFiniteLoss(
                f"the loss of step {self.step + 1} is not finite on {bad_ranks:.0f} of "
                f"{shards} ranks "
                f"(samples {self.samples_seen} to "
                f"{self.samples_seen + self.config.global_batch - 1} of the data order); "
                "the last checkpoint is from before it; a smaller --lr may help"
            )
        # Divided here, by the count of the whole global batch: a mean of means would weigh items
        # differently.
        self.strategy.scale_gradients(1.0 / max(count, 1.0))
        self.optimizer.step()
        self.step += 1
        self.samples_seen += self.config.global_batch
        self.metrics["loss"] = loss_sum / max(count, 1.0)
        self.directory.metric(
            step=self.step,
            epoch=self.epoch,
            samples_seen=self.samples_seen,
            loss=self.metrics["loss"],
            lr=self.config.lr,
            samples_per_s=self.config.global_batch / max(time.monotonic() - started, 1e-9),
        )
        if stop_flags:
            self.directory.event(
                "stop_requested",
                step=self.step,
                ranks_signalled=int(stop_flags),
                signal=self.stop.signal_name,
            )
        return stop_flags > 0

    def evaluate(self) -> None:
        """Measure on the test set, and say so."""
        measured = measure(self.task, self.strategy, self.group, self.test)
        self.metrics.update(measured)
        progress = {"epoch": self.epoch, "samples_seen": self.samples_seen}
        self.directory.metric(step=self.step, **progress, **measured)
        self.directory.event("epoch", step=self.step, **progress, **self.metrics)
        self.console.say(
            f"step {self.step}/{self.steps}, epoch {self.epoch}: {figures(self.metrics)}"
        )

    def save_checkpoint(self) -> None:
        """Commit a checkpoint of this moment, and only then remove old ones.

        Raises:
            CheckpointError: on rank 0, when it could not be written.
            FencedError: on rank 0, when a newer attempt has taken over.
            PeerError: on the other ranks, in both cases.
        """
        if self._saved_step == self.step:
            return
        position = checkpoint.Position(attempt=self.group.place.attempt, step=self.step)
        path = position.path(self.directory.path)
        state = checkpoint.State(
            step=self.step,
            epoch=self.epoch,
            samples_seen=self.samples_seen,
            world_size=self.group.place.world_size,
            identity=self.identity,
            config={name: _plain(value) for name, value in dataclasses.asdict(self.config).items()},
        )
        # On all ranks: gathering a sharded model needs every one of them.
        model, optimizer = self.strategy.model_state(), self.optimizer.tensors()

        def write() -> None:
            # Our own outcome with the new step; refused if a newer attempt has written one.
            if not self.directory.write_outcome(self.outcome("running", "training")):
                raise FencedError(
                    f"attempt {position.attempt} writes no more: a newer attempt has taken over "
                    f"{self.directory.path}"
                )
            started = time.monotonic()
            checkpoint.save(path, state, model, optimizer)
            self.directory.event(
                "checkpoint",
                step=self.step,
                samples_seen=self.samples_seen,
                checkpoint=str(path.relative_to(self.directory.path)),
                seconds=time.monotonic() - started,
            )
            checkpoint.prune(self.directory.path, position, keep=self.config.keep_checkpoints)

        # The others wait: a rank that exits makes torchrun end the one that is still writing.
        self.group.on_rank_0(write)
        self._saved_step = self.step

    def export(self, path: Path) -> None:
        """Write the final weights to one file."""
        model = self.strategy.model_state()
        self.group.on_rank_0(lambda: checkpoint.export(path, model))

    def outcome(self, status: str, reason: str, *, rank: int | None = None) -> Outcome:
        """Describe the run as it stands."""
        return Outcome(
            status=status,
            attempt=self.group.place.attempt,
            restart=self.group.place.restart,
            step=self.step,
            steps=self.steps,
            samples_seen=self.samples_seen,
            rank=rank,
            reason=reason,
            metrics=dict(self.metrics),
        )

    def _stopped(self) -> None:
        reason = f"stopped by {self.stop.signal_name or 'a signal to another rank'}"

        def write() -> None:
            self.directory.event("stopped", step=self.step, samples_seen=self.samples_seen)
            self.directory.write_outcome(self.outcome("preempted", reason))

        # As for a checkpoint: the first rank to leave has the others ended.
        self.group.on_rank_0(write)
        self.console.say(
            f"{reason} after step {self.step}/{self.steps}; start again to go on · "
            f"run directory {self.directory.path}"
        )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
