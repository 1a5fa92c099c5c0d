"""The training loop: steps, agreement, evaluation, checkpoints."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from .checkpoints.interval import Interval
from .checkpoints.saver import Saver
from .data.loader import Feed, resident, source_of
from .data.order import SampleOrder, mixed, seed_generators, seed_of
from .errors import NonFiniteLoss, UsageError
from .model import sparse
from .model.evaluation import EvaluationStopped, batch_size, measure
from .model.gradients import clip, total_norm
from .model.optimizer import LearningRate
from .model.recomputation import attributes_of, changed_attributes, left_alone
from .parallel.base import Sums, full
from .parallel.consistency import Untrained, check_data, some_of
from .profiling.capture import Profiler
from .rundir.console import figures
from .rundir.files import TrainingProgress, read_lines
from .runtime.signals import StopRequest
from .tasks.base import held_by, item_count


class Trainer:
    """The training run of this process: makes steps, evaluates, and saves checkpoints."""

    def __init__(
        self, *, saver: Saver, profiler: Profiler, progress: TrainingProgress, stop: StopRequest
    ) -> None:
        strategy = saver.strategy
        config, group, task = strategy.parts.config, strategy.parts.group, strategy.task
        self.config, self.group, self.task, self.strategy = config, group, task, strategy
        self.optimizer, self.scaler, self.saver = saver.optimizer, saver.scaler, saver
        self.directory, self.console = saver.directory, saver.console
        self.profiler, self.progress, self.stop = profiler, progress, stop
        self.train = source_of(task.train(), workers=config.workers, task=task.name)
        self.train = resident(self.train, group.device, task=task.name)
        self.samples = len(self.train)
        self.test = source_of(task.test(), workers=config.workers, task=task.name)
        self.test = resident(self.test, group.device, task=task.name)
        weights = task.weights() if config.sampling == "balanced" else None
        self.feed = Feed(
            self.train,
            SampleOrder(size=self.samples, seed=config.seed, weights=weights),
            global_batch=config.global_batch,
            shard=strategy.shard,
            shards=strategy.shards,
        )
        self.micro_batches = strategy.micro_batches()
        self.untrained = Untrained(strategy, group)
        self.learning_rate = LearningRate(config, progress.steps)
        self._sparse_checked = False
        # Whether a checkpoint is due by rank 0's clock, with `--checkpoint-every auto`.
        self._due = False
        self.seed = seed_of("step", config.seed, *strategy.axes)
        # Passes divide gradients by this. It depends only on the run, so that a resumed run
        # rounds alike; `update()` corrects it once all ranks know the true count.
        first = torch.zeros(1, dtype=torch.int64)
        sample = self.train.take(first)
        if len(self.test):
            # Refuse a value that is not a tensor now, not after an epoch.
            self.test.take(first)
        self.expected_count = max(item_count(task, sample.targets), 1) * config.global_batch

    @property
    def epoch(self) -> int:
        """Whole passes over the training data so far."""
        return self.progress.samples_seen // self.samples

    def resume(self) -> None:
        """Resume from the newest valid checkpoint that any rank sees, if there is one."""
        # Before the weights are loaded, as it may move them, if only to put them back.
        check_data(self.train, self.test, self.group, task=self.task.name)
        first = torch.arange(min(self.config.global_batch, self.samples))
        shares = self.train.take(first).split_into(self.strategy.shards * self.micro_batches)
        with left_alone(self.task):
            self.strategy.warm_up(shares[-1])
        self.saver.resume(self.progress)

    def run(self) -> bool:
        """Train to the last step, or until stopped; return whether the run is done."""
        progress, every = self.progress, self.config.checkpoint_every
        if every == "auto" and self.group.rank_info.rank == 0:
            events = read_lines(self.directory.path / "events.jsonl")
            self.saver.interval = Interval(events, self.console)
        stop = self.group.sum([self.stop.requested])[0] > 0
        evaluated = self._evaluated_epoch()
        first, of_task = progress.step + 1, attributes_of(self.task)
        saved = max(progress.step - 1, 0)
        while progress.step < progress.steps:
            # Do not evaluate or save ranks that have drifted apart.
            if self.strategy.settled(progress.step):
                due = self._due
                if every and every != "auto":  # ranks may have been apart when it was due
                    due = progress.step // every > saved // every
                if stop or due:
                    self.saver.save(progress, epoch=self.epoch)
                    self._due, saved = False, progress.step
                # After a stop request, leave the evaluation to the next start.
                if not stop and self.epoch > evaluated:
                    # Evaluation may run out of memory: finish writing the checkpoint first.
                    self.saver.wait()
                    stop = not self.evaluate()
                    evaluated = self.epoch
                    if stop and not due:
                        self.saver.save(progress, epoch=self.epoch)
                if stop:
                    self.stop.wait_for_the_loop()
                    self.saver.wait()
                    self._stopped()
                    return False
            with self.profiler.step(progress.step + 1):
                stop = self.train_step() or stop
            self.stop.wait_for_the_loop()
            if progress.step == first:
                self._name_untrained_of_task()
                self._name_attributes_of_task(of_task)
                self.saver.watch.check_names(progress.step)
        self.strategy.finish()
        self.close()
        self.saver.save(progress, epoch=self.epoch)
        self.saver.wait(last=True)
        if not self.evaluate():
            self._stopped()
            return False
        if self.config.export:
            self.saver.export(self.config.export)
        return True

    def _evaluated_epoch(self) -> int:
        """Return the epoch of the last evaluation up to the step from which the run continues.

        The evaluation of a step follows its checkpoint, so it may have failed or been stopped.
        Rank 0 looks for its event in the run directory; all ranks call this.
        """
        step = self.progress.step
        # The last step before this one after which ranks held one model, and could be measured.
        before = step - 1
        while before > 0 and not self.strategy.settled(before):
            before -= 1
        size = self.config.global_batch
        earlier, now = (max(each, 0) * size // self.samples for each in (before, step))
        if earlier == now:
            return now
        evaluated = self.group.rank_info.rank == 0 and any(
            event.get("event") == "epoch" and event.get("step") == step
            for event in read_lines(self.directory.path / "events.jsonl")
        )
        return now if self.group.broadcast(evaluated) else earlier

    def train_step(self) -> bool:
        """Make one optimizer step; return whether any rank got a stop request meanwhile.

        Raises:
            NonFiniteLoss: on all ranks, before the weights are touched.
        """
        started = time.monotonic()
        progress, strategy, watch = self.progress, self.strategy, self.saver.watch
        held: list[float] = []
        if watch.due(progress.step) and strategy.settled(progress.step):
            # Now, as passes may move buffers.
            held = watch.numbers(progress)
        strategy.begin_step(progress.step + 1)
        if strategy.writes is not None and not strategy.writes.started:
            strategy.writes.start(contents=True)
        with self.profiler.data():
            parts = self.feed.batch(progress.samples_seen).split_into(self.micro_batches)
        # The seed is a function of the step, so no generator state must be saved or restored.
        # Seed after reading the batch, which may also draw numbers.
        seed_generators(mixed(self.seed, progress.step), self.group.device)
        divisor = self.expected_count / self.scaler.scale
        sums = strategy.accumulate(parts, 1.0 / divisor)
        written = strategy.has_written()
        loss, count, stop_flags, changed, writers, due = self._agree(
            sums, self.untrained.changed(), written, held
        )
        self._due = self._due or due > 0
        if changed:
            self._agree_on_untrained()
        if writers:
            self._check_writes(strategy.written() if written else [])
        self.untrained.forget_zeros()
        self.update(loss, count, divisor=divisor, started=started)
        return stop_flags > 0 and self.note_stop(stop_flags)

    def update(
        self, loss: float, count: float, *, divisor: float = 1.0, started: float, **extra: float
    ) -> None:
        """Make an optimizer step from the gradients, and record it.

        Args:
            loss: summed over the global batch.
            count: how many items it sums over.
            divisor: the number by which the gradients have already been divided.
            started: when the step began, by the monotonic clock.
            extra: further fields for its line in `metrics.jsonl`.

        Raises:
            NonFiniteLoss: the gradients are not finite.
        """
        progress, lr = self.progress, self.learning_rate.at(self.progress.step)
        # Divide by the count of the whole global batch: a mean of means would weight items
        # unequally. If the count is the expected one, the factor is 1 and nothing is left to do.
        if not self._sparse_checked:
            self._refuse_sparse_gradients()
        self.strategy.scale_gradients(divisor / max(count, 1.0))
        if self._gradients_are_good():
            self.optimizer.step(lr)
        else:
            self.optimizer.forget()
        progress.step += 1
        progress.samples_seen += self.config.global_batch
        self.strategy.after_step(progress.step)
        if self.strategy.writes is not None:
            self.strategy.writes.start()
        progress.metrics["loss"] = loss / max(count, 1.0)
        self.directory.metric(
            step=progress.step,
            epoch=self.epoch,
            samples_seen=progress.samples_seen,
            loss=progress.metrics["loss"],
            lr=lr,
            samples_per_s=self.config.global_batch / max(time.monotonic() - started, 1e-9),
            **extra,
        )

    def _refuse_sparse_gradients(self) -> None:
        """Refuse sparse gradients that no layer reveals, as `functional.embedding()` may have."""
        named, name = self.strategy.named_parameters(), self.task.name
        strategy = self.config.strategy_on(self.group.rank_info)
        sparse.refuse(sparse.gradients(named), self.config, strategy=strategy, task=name)
        self._sparse_checked = True

    def note_stop(self, ranks_signalled: float) -> bool:
        """Whether any rank got a stop request, and record it in `events.jsonl`."""
        if ranks_signalled:
            self.directory.event(
                "stop_requested",
                step=self.progress.step,
                ranks_signalled=int(ranks_signalled),
                signal=self.stop.signal_name,
            )
        return ranks_signalled > 0

    def _agree(
        self, sums: Sums, changed: bool, written: bool, held: Sequence[float]
    ) -> tuple[float, ...]:
        """Exchange in one small collective all that ranks must agree on before updating weights.

        `held`: values for the watch to compare, if any. Returns the loss and the count of the
        whole batch, and four numbers of ranks: those with a stop request, those that have left
        out other parameters than before, those that have written parameters in their passes, and
        those by whose clock a checkpoint is due (rank 0).
        """
        mine = full(sums.loss)
        due = self.saver.interval is not None and self.saver.interval.due
        own = (sums.count, self.stop.requested, changed, written, due)
        loss, *others = self.group.sum_with(mine, (*own, *held))
        if held:
            self.saver.watch.check(others[len(own) :])
        if not math.isfinite(loss):
            finite = math.isfinite(mine.item())
            numbers = self.feed.numbers(self.progress.samples_seen).tolist()
            culprits = self.group.gather([] if finite else numbers)
            bad_ranks = sum(self.group.gather(not finite))
            raise NonFiniteLoss(
                f"the loss of step {self.progress.step + 1} is not finite on {bad_ranks} of "
                f"{self.group.rank_info.world_size} ranks, for a batch of samples "
                f"{listed(sorted({number for rank in culprits for number in rank}))}; "
                "checkpoints are from before it; a smaller --lr or --clip-norm may help, in "
                "another --run-dir; if these samples are sound, the step before has spoilt the "
                "weights, which --clip-norm would find"
            )
        return (loss, *others[: len(own)])

    def _check_writes(self, mine: Sequence[str]) -> None:
        """Make sure that parameter writes of the passes persist, and match on all ranks.

        Raises:
            UsageError: on all ranks; names the parameters.
        """
        names = sorted({name for rank in self.group.gather(mine) for name in rank})
        problem = self.strategy.lost_write(names)
        problem = next(filter(None, self.group.gather(problem)), "")
        if not problem and (unlike := self.strategy.unlike(names)):
            problem = f"{some_of(unlike)}, on each rank by its own samples"
        if problem:
            raise UsageError(
                f"task {self.task.name!r}: in step {self.progress.step + 1} forward() of its model "
                f"writes {problem}, which one process would not; write parameters in model() only "
                "and keep what moves in buffers of floats, or use --strategy single"
            )

    def _agree_on_untrained(self) -> None:
        """Agree on the parameters without gradients in this step; report them the first time."""
        first = not self.untrained.names
        self.untrained.agree()
        if first and (names := self.untrained.names):
            step = self.progress.step + 1
            self.directory.event("without_gradient", step=step, parameters=sorted(names))
            self.console.say(
                f"in step {step} nothing gives a gradient to {some_of(names)}: they stay as they "
                "are until something does"
            )

    def _name_untrained_of_task(self) -> None:
        """Report parameters that the loss depends on but the model does not contain."""
        own = {id(parameter) for _, parameter in self.strategy.named_parameters()}
        mine = [
            n
            for n, t in held_by(self.task)
            if t.is_leaf and t.grad is not None and id(t) not in own
        ]
        if names := frozenset(name for rank in self.group.gather(mine) for name in rank):
            self.console.say(
                f"the loss gives a gradient to {some_of(names)} of the task, which nothing trains: "
                "only parameters of the model are; make it one of a module that model() returns, "
                "or detach() it"
            )

    def _name_attributes_of_task(self, before: dict[str, object]) -> None:
        """Report attributes that the loss changes but no checkpoint stores."""
        if names := changed_attributes(before, attributes_of(self.task)):
            self.console.say(
                f"loss() changes {some_of(names)} of the task, which no checkpoint holds: a start "
                "that resumes begins with what the task has then; if the loss depends on it, make "
                "it a buffer of the model"
            )

    def _gradients_are_good(self) -> bool:
        """Clip, and return whether to make the step; free without clipping or fp16."""
        if self.config.clip_norm is None and not self.scaler.enabled:
            return True
        norm = self.strategy.agree_on_norm(total_norm(self.strategy))
        if math.isfinite(norm):
            self.scaler.passed()
            if self.config.clip_norm is not None:
                clip(self.strategy, norm, self.config.clip_norm)
            return True
        if self.scaler.overflowed():
            scale = self.scaler.scale
            self.directory.event("step_skipped", step=self.progress.step + 1, new_scale=scale)
            return False
        raise NonFiniteLoss(
            f"the gradient of step {self.progress.step + 1} is not finite, for a batch of samples "
            f"{listed(sorted(self.feed.everyone(self.progress.samples_seen).tolist()))}; "
            "checkpoints are from before it"
        )

    def measure(self) -> dict[str, float]:
        """Measure on the whole test set."""
        with left_alone(self.task):
            return measure(
                *(self.task, self.strategy, self.group, self.test),
                batch=batch_size(self.config, self.strategy),
                stop_requested=lambda: self.stop.requested,
            )

    def evaluate(self) -> bool:
        """Evaluate on the test set and report; False if a stop request has ended it early."""
        progress, started = self.progress, time.monotonic()
        self.directory.event("evaluation", step=progress.step)
        measured: dict[str, float] | None = None
        with suppress(EvaluationStopped):
            measured = self.measure()
        # If one rank measures for all, the others get its status here.
        stopped, signalled = self.group.sum([measured is None, self.stop.requested])
        if stopped or measured is None:
            self.note_stop(signalled)
            return False
        progress.metrics.update(measured)
        place = {"epoch": self.epoch, "samples_seen": progress.samples_seen}
        self.directory.metric(step=progress.step, **place, **measured)
        seconds = time.monotonic() - started
        self.directory.event(
            "epoch", step=progress.step, **place, **progress.metrics, seconds=seconds
        )
        done = f"step {progress.step}/{progress.steps}, epoch {self.epoch}"
        untested = "" if len(self.test) else " · nothing is tested, as test() has no samples"
        self.console.say(f"{done}: {figures(progress.metrics)}{untested}")
        return True

    def close(self) -> None:
        """End the work that runs in parallel with the steps."""
        self.feed.close()
        self.profiler.close()
        self.directory.flush()

    def _stopped(self) -> None:
        self.close()
        progress = self.progress
        reason = f"stopped by {self.stop.signal_name or 'a signal to another rank'}"

        def write() -> None:
            self.directory.event("stopped", step=progress.step, samples_seen=progress.samples_seen)
            self.directory.write_outcome(
                progress.outcome(self.group.rank_info, "preempted", reason)
            )

        # As for a checkpoint: when the first rank leaves, the others are ended.
        self.group.on_rank_0(write)
        self.console.say(
            f"{reason} after step {progress.step}/{progress.steps}; start again to continue · "
            f"run directory {self.directory.path}"
        )


def listed(numbers: list[int], most: int = 16) -> str:
    """Format sample numbers, at most `most` of them."""
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, … ({len(numbers)} in all)"
