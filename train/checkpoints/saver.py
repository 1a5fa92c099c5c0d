"""Saving a run's state to a checkpoint, and restoring it."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from ..cli.config import Config
from ..errors import CheckpointError, FencedError, NonFiniteLoss, UsageError
from ..model.gradients import LossScaler, not_finite
from ..model.optimizer import NamedOptimizer
from ..parallel.base import Strategy
from ..parallel.watch import Watch
from ..rundir.claim import differences
from ..rundir.console import Console
from ..rundir.files import RunDirectory, TrainingProgress
from . import recovery
from .checkpointer import Checkpointer, SaveTiming
from .interval import Interval
from .reader import MODEL, OPTIMIZER, Stored, export
from .retention import Retention
from .safetensors_file import problem_of
from .store import Position, State

PATIENCE_S = 60.0
"""Seconds that a failing process waits for a checkpoint that is being written."""
REPORTED_CHANGES = (
    "precision", "reduce", "sync_batch_norm", "comm_hook", "local_steps", "ps_mode", "staleness",
)  # fmt: skip
"""Settings that may differ between two starts of a run, and change more than the last digits."""


class Saver:
    """Saves and restores everything that a checkpoint of this run holds.

    Its methods raise the same error on all ranks: a FencedError if a later start has taken over; a
    CheckpointError if a checkpoint cannot be read, or if it cannot be written and
    `--on-checkpoint-error` is `stop`.
    """

    def __init__(
        self,
        *,
        identity: Mapping[str, object],
        strategy: Strategy,
        optimizer: NamedOptimizer,
        scaler: LossScaler,
        directory: RunDirectory,
        console: Console,
    ) -> None:
        """Connect the ranks for checkpoints; nothing is read or written yet.

        Raises:
            UsageError: on all ranks; the model holds something that no checkpoint can store.
        """
        config, group = strategy.parts.config, strategy.parts.group
        self.config, self.identity, self.group = config, identity, group
        self.strategy, self.optimizer, self.scaler = strategy, optimizer, scaler
        self.directory, self.console = directory, console
        self._checkpointer = Checkpointer(directory.path, group, timeout_s=config.timeout_s)
        self.watch = Watch(strategy, optimizer, scaler)
        self._retention = Retention(directory, console, keep=config.keep_checkpoints)
        # The checkpoint of the last save, if rank 0 sees its directory.
        self._saved: Position | None = None
        self._last_step = 0
        # On rank 0, with `--checkpoint-every auto`; from when training begins.
        self.interval: Interval | None = None
        # Refuse these now: the first checkpoint could not store them.
        problems = self._everywhere(
            f"{name} {text}"
            for name, tensor in strategy.model_state().items()
            if (text := problem_of(tensor))
        )
        if problems:
            raise UsageError(
                "checkpoints cannot hold all of the model: register what can be computed anew with "
                "persistent=False, or give it another type:\n"
                + "\n".join(f"  {problem}" for problem in problems)
            )
        self._frozen = self._everywhere(
            name for name, weight in self.strategy.named_parameters() if not weight.requires_grad
        )

    def resume(self, progress: TrainingProgress) -> None:
        """Resume from the newest valid checkpoint that any rank sees, if there is one."""
        run_dir, shared = self.directory.path, self._checkpointer.shared
        sightings, source = recovery.find(run_dir, self.group, shared=shared)
        self._retention.damaged = {position for position, _ in sightings[0].damaged}
        self._report_damage(sightings)
        if source is None or (best := sightings[source].best) is None:
            return
        resumption = recovery.describe(run_dir, self.group, best, source=source, shared=shared)
        slots = {
            name.removeprefix(OPTIMIZER): entry
            for name, entry in resumption.listing.items()
            if name.startswith(OPTIMIZER)
        }
        self.optimizer.allocate(slots)
        tensors = _named(self.strategy.model_state(), self.optimizer.tensors())
        recovery.load(run_dir, self.group, resumption, tensors)
        model = {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}
        self.strategy.load_model_state(model)
        self.scaler.load(resumption.state.scaler)
        progress.step, progress.samples_seen = resumption.state.step, resumption.state.samples_seen
        if resumption.state.loss is not None:
            progress.metrics["loss"] = resumption.state.loss
        # Rank 0's own directory has the checkpoint only if rank 0 is the source.
        self._saved = best if source == 0 else None
        where = best.path(run_dir)
        thawed = self._everywhere(
            name
            for name, weight in self.strategy.named_parameters()
            if weight.requires_grad and name in (resumption.state.frozen or ())
        )
        changed = changes(resumption.state, self.config, frozen=self._frozen, thawed=thawed)
        self.directory.event(
            "resume",
            step=progress.step,
            samples_seen=progress.samples_seen,
            checkpoint=str(where.relative_to(run_dir)),
            read_by=source,
            written_by_ranks=resumption.state.world_size,
            changed=changed,
        )
        self.console.say(f"resuming after step {progress.step}/{progress.steps} from {where}")
        if changed:
            self.console.say(f"with another configuration: {'; '.join(changed)}")

    def save(self, progress: TrainingProgress, *, epoch: int) -> None:
        """Start a checkpoint of the current state; the next call raises if writing has failed.

        Raises:
            NonFiniteLoss: on all ranks; these weights would replace good ones.
            UsageError: on all ranks; the model has other tensors than at the start.
            ReplicaError: on all ranks; ranks that must hold the same tensors do not.
        """
        if self._saved and self._saved.step == progress.step:
            self.wait()
            if self._saved:
                return
        since = time.monotonic()
        if self.interval:
            self.interval.saving()
        # A kill cannot undo these steps, so their metrics must be on disk.
        self.directory.flush()
        self._attempt(lambda: self._checkpointer.wait(for_next=True))
        model, moments = self.strategy.model_state(), self.optimizer.tensors()
        self._agree(progress, model, moments)
        position = Position(attempt=self.group.rank_info.attempt, step=progress.step)
        state = State(
            step=progress.step,
            epoch=epoch,
            samples_seen=progress.samples_seen,
            world_size=self.group.rank_info.world_size,
            identity=self.identity,
            config=self.config.as_json(),
            scaler=self.scaler.state(),
            loss=progress.metrics.get("loss"),
            frozen=self._frozen,
        )
        running = progress.outcome(self.group.rank_info, "running", "training")

        def may_commit() -> None:
            # Write our outcome with the new step; refused if a later start has written one.
            if not self.directory.advance(running):
                raise self._fenced()

        def committed(timing: SaveTiming) -> None:
            self.directory.event(
                "checkpoint",
                step=state.step,
                samples_seen=state.samples_seen,
                checkpoint=str(position.path(self.directory.path).relative_to(self.directory.path)),
                seconds=timing.total_s,
                stall_seconds=timing.stall_s,
            )
            if self.interval:
                self.interval.committed(timing)
            self._retention.damaged.discard(position)
            self._retention.prune(position)

        self._saved, self._last_step = position, progress.step
        self._attempt(
            lambda: self._checkpointer.save(
                position,
                state,
                _named(model, moments),
                since=since,
                make_room=lambda: self._retention.make_room(position),
                may_go=lambda: self._retention.may_go(position),
                may_commit=may_commit,
                committed=committed,
            )
        )

    def wait(self, *, last: bool = False) -> None:
        """Wait until the checkpoint is committed or has failed; `last`: none follows, so raise."""
        self._attempt(self._checkpointer.wait, last=last)

    def leave(self) -> None:
        """Let a pending checkpoint be committed before an error ends the process."""
        self._checkpointer.leave(PATIENCE_S)

    def export(self, path: Path) -> None:
        """Write the weights of the last checkpoint to one file.

        Raises:
            CheckpointError: on rank 0; no checkpoint exists, or the file could not be written.
            PeerError: on the other ranks, in both cases.
        """
        self.wait()

        def write() -> None:
            if self._saved is None:
                raise CheckpointError(f"cannot export to {path}: the last step could not be saved")
            stored = Stored(self._saved.path(self.directory.path))
            export(path, stored.listing, stored.whole)

        self.group.on_rank_0(write)

    def _everywhere(self, names: Iterable[str]) -> list[str]:
        return sorted({name for rank in self.group.gather(list(names)) for name in rank})

    def _agree(
        self,
        progress: TrainingProgress,
        model: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
    ) -> None:
        """Refuse a checkpoint of weights that are not finite, or not the same on all ranks.

        A gradient can be infinite under a finite loss, and is not checked without clipping.
        """
        own_names = not_finite(self.strategy)
        numbers = self.watch.numbers(progress, model, moments)
        others = self.watch.other_names(model)
        *totals, other, found = self.group.sum([*numbers, len(others), len(own_names)])
        if other:
            self.watch.check_names(progress.step)
        if found:
            names = self._everywhere(own_names)
            raise NonFiniteLoss(
                f"{len(names)} parameters are not finite after step {progress.step}, such as "
                f"{names[0]}, and are not saved: checkpoints are from before it; --clip-norm finds "
                "the step that makes them so"
            )
        self.watch.check(totals)

    def _attempt(self, action: Callable[[], None], *, last: bool = False) -> None:
        """Run an action that fails on all ranks or none; then stop or continue, as configured."""
        try:
            action()
        except CheckpointError as error:
            self._saved = None
            # Not a disk error: a later start has removed our drafts.
            if self.group.broadcast(self.directory.superseded()):
                raise self._fenced() from error
            if last or self.config.on_checkpoint_error == "stop":
                raise
            # If the disk is full, the event may not fit either.
            with suppress(OSError):
                self.directory.event("checkpoint_failed", step=self._last_step, reason=str(error))
            self.console.complain(f"{error}; training goes on")

    def _fenced(self) -> FencedError:
        old, attempt = self.directory.read_outcome(), self.group.rank_info.attempt
        newer = old is not None and old.attempt > attempt
        return FencedError(
            f"attempt {attempt} writes no more: "
            f"{'a newer attempt' if newer else 'a later start of it'} has taken over "
            f"{self.directory.path}"
        )

    def _report_damage(self, sightings: list[recovery.Sighting]) -> None:
        for rank, sighting in enumerate(sightings):
            for position, reason in sighting.damaged:
                self.directory.event(
                    "checkpoint_skipped",
                    step=position.step,
                    of_attempt=position.attempt,
                    seen_by=rank,
                    reason=reason,
                )
                self.console.say(f"skipping a damaged checkpoint: {reason}")
        damaged = any(sighting.damaged for sighting in sightings)
        if damaged and not any(sighting.best for sighting in sightings):
            self.console.say("no whole checkpoint is left: starting from the first step")


def changes(
    state: State, config: Config, *, frozen: Collection[str], thawed: Collection[str]
) -> list[str]:
    """List the differences between a checkpoint's configuration and this start's.

    `frozen` parameters are not trained now; `thawed` ones are trained now, and were not.
    """
    there, here = (
        {name: values.get(name) for name in REPORTED_CHANGES}
        for values in (state.config, config.as_json())
    )
    newly_frozen = () if state.frozen is None else sorted(set(frozen).difference(state.frozen))
    lists = {
        "trained there, frozen here": newly_frozen,
        "frozen there, trained here": sorted(thawed),
    }
    lines = [f"{how}: {', '.join(names)}" for how, names in lists.items() if names]
    return differences(there, here) + lines


def _named(model: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the live tensors that a checkpoint holds, this rank's parts."""
    named = {MODEL + name: tensor for name, tensor in model.items()}
    return named | {OPTIMIZER + key: tensor for key, tensor in moments.items()}
