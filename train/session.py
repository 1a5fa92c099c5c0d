"""One start of the trainer: connect, check the run directory, train, record how it ended."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from train import checkpoint, recovery, strategies, tasks
from train.config import Config
from train.console import Console, figures
from train.distributed import Group, open_group
from train.environment import Place
from train.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    CheckpointError,
    FencedError,
    NonFiniteLoss,
    PeerError,
    TrainError,
    UsageError,
    is_collateral,
)
from train.loop import Trainer
from train.optimizing import NamedOptimizer
from train.ownership import claim
from train.rundir import Outcome, RunDirectory
from train.stopping import StopRequest


# torchrun hands every worker an error file; `record` writes an exception into it, so that
# torchrun can name the rank that failed first.
@record
def train(config: Config, place: Place, stop: StopRequest, console: Console) -> int:
    """Train as configured and return the exit status.

    Raises:
        UsageError: the run directory holds another run, or something is missing on this machine.
        TrainError: the run failed; the outcome says so already.
    """
    directory = RunDirectory(config.directory, place)
    trainer: Trainer | None = None
    try:
        task = tasks.load(config.task)
        strategy_name = config.strategy_on(place)
        with open_group(place, strategy=strategy_name, timeout_s=config.timeout_s) as group:
            # All ranks are here: from now on they can agree on where to stop.
            stop.wait_for_the_loop()
            identity = {**config.identity(), **task.identity()}
            steps = config.total_steps(len(task.train()))
            nothing_left = claim(directory, identity, steps, group)
            if nothing_left is not None:
                console.say(nothing_left)
                if config.export:
                    export_finished(directory, group, config.export)
                    console.say(f"wrote its weights to {config.export}")
                return EXIT_DONE
            # The initial weights are a function of the seed alone.
            torch.manual_seed(config.seed)
            strategy = strategies.build(strategy_name, task, task.model(), group)
            trainer = Trainer(
                config=config,
                identity=identity,
                group=group,
                task=task,
                strategy=strategy,
                # After the strategy has wrapped the model: it may have replaced the parameters.
                optimizer=NamedOptimizer(strategy.named_parameters(), lr=config.lr),
                directory=directory,
                console=console,
                stop=stop,
            )
            announce(trainer, strategy_name)
            trainer.resume()
            if not trainer.run():
                return EXIT_PREEMPTED
            finish(trainer)
            return EXIT_DONE
    except UsageError:
        raise
    except Exception as error:
        report(error, directory, trainer)
        if not is_collateral(error):
            raise
        # Neither a traceback nor torchrun's error file: both would point here, while the cause is
        # another rank's, which names it.
        console.complain(f"lost the other ranks: {error}", every_rank=True)
        return EXIT_FAILED


def export_finished(directory: RunDirectory, group: Group, path: Path) -> None:
    """Write the weights of a run that is done; nothing in its directory changes.

    Raises:
        UsageError: on all ranks; the last checkpoint is gone, or the file cannot be written.
    """
    outcome = directory.read_outcome()
    last_step = group.broadcast(outcome.step if outcome else None)
    seen, source = recovery.find(directory.path, group)
    best = None if source is None else seen[source].best
    if source is None or best is None or best.step != last_step:
        damage = sorted({reason for sighting in seen for _, reason in sighting.damaged})
        raise UsageError(
            f"cannot export to {path}: {directory.path} has no whole checkpoint of step "
            f"{last_step}; to make the last steps again, remove {directory.outcome_path} first"
            + "".join(f"\n  {reason}" for reason in damage)
        )
    model = recovery.read(directory.path, group, seen, source).model
    try:
        group.on_rank_0(lambda: checkpoint.export(path, model))
    except (CheckpointError, PeerError) as error:
        # Not a failure of the run, which would be recorded as its outcome.
        raise UsageError(str(error)) from error


def announce(trainer: Trainer, strategy: str) -> None:
    """Say what starts, to people and to `events.jsonl`."""
    place, device = trainer.group.place, trainer.group.device
    accumulation = trainer.config.global_batch // trainer.micro_batch // trainer.strategy.shards
    trainer.directory.event(
        "start",
        step=0,
        steps=trainer.steps,
        task=trainer.config.task,
        strategy=strategy,
        world_size=place.world_size,
        device=device.type,
        global_batch=trainer.config.global_batch,
        micro_batch=trainer.micro_batch,
        accumulation=accumulation,
    )
    trainer.console.say(
        f"{trainer.config.task}: {trainer.steps} steps of {trainer.config.global_batch} samples = "
        f"{place.world_size} ranks x {accumulation} x {trainer.micro_batch}, {strategy} on "
        f"{device.type}, attempt {place.attempt}, restart {place.restart}"
    )


def finish(trainer: Trainer) -> None:
    """Record that the run is done; its last line says how well and where."""
    trainer.directory.event("done", step=trainer.step, **trainer.metrics)
    if trainer.group.place.rank == 0 and not trainer.directory.write_outcome(
        trainer.outcome("done", "all steps done")
    ):
        raise FencedError(f"a newer attempt has taken over {trainer.directory.path}")
    trainer.console.say(
        f"done: step {trainer.step}/{trainer.steps}, {figures(trainer.metrics)} · "
        f"run directory {trainer.directory.path}"
    )


def report(error: Exception, directory: RunDirectory, trainer: Trainer | None) -> None:
    """Record a failure: `fatal` for a cause, `retryable` for the echo of one elsewhere."""
    place = directory.place
    # All ranks raise this one at the same step: none of them is the culprit, and rank 0 writes.
    agreed = isinstance(error, (NonFiniteLoss, FencedError))
    if isinstance(error, FencedError) or (agreed and place.rank != 0):
        return
    old = directory.read_outcome()
    name = "" if isinstance(error, TrainError) else f"{type(error).__name__}: "
    outcome = Outcome(
        status="retryable" if is_collateral(error) else "fatal",
        attempt=place.attempt,
        restart=place.restart,
        step=trainer.step if trainer else old.step if old else 0,
        steps=trainer.steps if trainer else None,
        samples_seen=trainer.samples_seen if trainer else old.samples_seen if old else 0,
        rank=None if agreed else place.rank,
        reason=f"{name}{error}",
        metrics=dict(trainer.metrics) if trainer else {},
    )
    # A missing directory (another node's) or a full disk must not hide the error itself.
    with suppress(OSError):
        directory.write_outcome(outcome)
    with suppress(OSError):
        directory.event("error", step=outcome.step, status=outcome.status, reason=outcome.reason)
