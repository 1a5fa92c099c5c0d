"""One start of the trainer: connect, check the run directory, train, record how it ended."""

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from . import parallel, tasks
from .checkpoints import recovery
from .checkpoints.reader import export, export_problem, weights
from .checkpoints.saver import Saver
from .cli import flags
from .cli.config import Config
from .data.loader import source_of
from .errors import (
    EXIT_DONE,
    EXIT_PREEMPTED,
    CheckpointError,
    FencedError,
    PeerError,
    UsageError,
)
from .failure.record import fail, tell_torchrun
from .loop import Trainer
from .model import dropout, sparse
from .model.gradients import LossScaler
from .model.optimizer import NamedOptimizer
from .parallel.base import Parts
from .parallel.consistency import some_of
from .parallel.layout import counted
from .profiling.capture import Profiler
from .profiling.timeline import Profile
from .proof.session import before_training, refusing_failures
from .rundir.claim import adopt, claim
from .rundir.console import Console, figures
from .rundir.files import RunDirectory, TrainingProgress
from .rundir.jsonl import as_recorded
from .rundir.tensorboard import EventFile
from .runtime.environment import environment
from .runtime.phases import Phases
from .runtime.process_group import RankGroup, open_group
from .runtime.rank import RankInfo
from .runtime.signals import StopRequest
from .tasks.base import Task, sketch_of

BEFORE_FIRST_STEP_S = 10.0
"""How long a stop waits for a checkpoint to be loaded, or for the first step to be compiled."""


def train(
    config: Config, rank_info: RankInfo, stop: StopRequest, console: Console, phases: Phases
) -> int:
    """Train as configured and return the exit status; a failure has been reported by then.

    `phases` are those of this process until now.

    Raises:
        UsageError: the run directory holds another run, or something is missing on this machine.
    """
    directory = RunDirectory(config.directory, rank_info)
    task: Task | None = None
    progress: TrainingProgress | None = None
    saver: Saver | None = None
    claimed = False
    try:
        layout = config.layout_on(rank_info)
        task = tasks.load(config.task)
        with open_group(rank_info, config) as group:
            # All ranks are here, so they can now agree on the step to stop at. Before the first
            # step, an early stop loses nothing and avoids a checkpoint, which may take minutes.
            stop.wait_for_the_loop(at_most_s=BEFORE_FIRST_STEP_S)
            group.agree_on_restart()
            directory = RunDirectory(config.directory, group.rank_info)
            phases.end("process_group")
            samples = len(source_of(task.train(), task=task.name))
            progress = TrainingProgress(steps=config.total_steps(samples))
            identity = as_recorded({**config.identity(), **task.identity()})
            nothing_left = claim(directory, identity, progress.steps, group, adopt=config.adopt)
            if nothing_left is not None:
                console.say(nothing_left)
                if config.export:
                    export_finished(directory, group, config.export)
                    console.say(f"wrote its weights to {config.export}")
                return EXIT_DONE
            claimed = True
            stop.leave_by(lambda name: leave_early(directory, name))
            check_ahead(config, progress, group)
            group.on_rank_0(lambda: write_config(directory, config))
            parts = Parts(task=task, config=config, layout=layout, group=group)
            with refusing_failures(parts):
                trainer = assemble(parts, identity, progress, directory, console, stop)
            saver = trainer.saver
            announce(trainer, parts)
            directory.event("environment", step=0, **environment(group))
            phases.end("setup")
            with refusing_failures(parts):
                trainer.resume()
            step = progress.step
            group.on_rank_0(lambda: adopt(directory, identity, step, console))
            before_training(parts, directory, console, step=step)
            if config.tensorboard == "auto" and rank_info.rank == 0:
                directory.event_file = EventFile(
                    directory.path,
                    attempt=rank_info.attempt,
                    first_step=step + 1,
                    console=console,
                )
            phases.end("restore")
            directory.event("ready", step=step, began=phases.began, phases=phases.seconds)
            if config.compile:
                directory.event("compilation", step=step)  # the first step takes its time
            if not trainer.run():
                return EXIT_PREEMPTED
            finish(trainer)
            return EXIT_DONE
    # A task that calls sys.exit() must not end the run as if it were done.
    except (Exception, SystemExit) as error:
        if isinstance(error, UsageError) and not claimed:
            raise
        exit_status = fail(error, directory, task, progress, claimed=claimed)
        if saver:
            saver.leave()
        return exit_status
    finally:
        if directory.event_file:
            directory.event_file.close()


def write_config(directory: RunDirectory, config: Config) -> None:
    """Record the configuration of this start, for another run: without the run directory.

    Raises:
        UsageError: the file cannot be written.
    """
    # A link there may lead to any file of the user's.
    with suppress(OSError):
        (directory.path / "config.toml").unlink()
    flags.write_file(directory.path / "config.toml", dataclasses.replace(config, run_dir=None))


def leave_early(directory: RunDirectory, signal_name: str) -> None:
    """Record a stop before the first step; the run directory is claimed."""
    reason, old = f"stopped by {signal_name}", directory.read_outcome()
    if directory.rank_info.rank == 0 and old is not None:
        with suppress(OSError):
            directory.write_outcome(
                directory.outcome_after(old, "preempted", reason, steps=old.steps)
            )
    # torchrun also sends the signal to the ranks that are left when one has failed.
    tell_torchrun(reason, echo=True)


def check_ahead(config: Config, progress: TrainingProgress, group: RankGroup) -> None:
    """Detect errors before the first step that would otherwise appear after the last one.

    Raises:
        UsageError: on all ranks; the run has no step to profile, or cannot write the weights.
    """
    first = Profile.parse(config.profile).first if config.profile else 0
    if first > progress.steps:
        raise UsageError(f"--profile {config.profile}: the run has {progress.steps} steps only")
    if config.export:
        path = config.export
        problem = group.broadcast(export_problem(path) if group.rank_info.rank == 0 else "")
        if problem:
            raise UsageError(f"--export {path}: {problem}")


def export_finished(directory: RunDirectory, group: RankGroup, path: Path) -> None:
    """Export the weights of a finished run without changing its directory.

    Raises:
        UsageError: on all ranks; the last checkpoint is gone, or the file cannot be written.
    """
    outcome = directory.read_outcome()
    last_step = group.broadcast(outcome.step if outcome else None)
    seen, source = recovery.find(directory.path, group, shared=False)
    best = None if source is None else seen[source].best
    if source is None or best is None or best.step != last_step:
        damage = sorted({reason for sighting in seen for _, reason in sighting.damaged})
        raise UsageError(
            f"cannot export to {path}: {directory.path} has no whole checkpoint of step "
            f"{last_step}; to make the last steps again, remove {directory.outcome_path} first"
            + "".join(f"\n  {reason}" for reason in damage)
        )
    try:
        resumption = recovery.describe(directory.path, group, best, source=source, shared=False)
        resumption = dataclasses.replace(resumption, listing=weights(resumption.listing))
        # The source rank may be on another node, but rank 0 must write the file.
        model = {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in resumption.listing.items()
            if group.rank_info.rank == 0
        }
        recovery.fill(directory.path, group, resumption, model)
        group.on_rank_0(lambda: export(path, resumption.listing, model.__getitem__))
    except (CheckpointError, PeerError) as error:
        # Do not record this as the run's outcome: the run has not failed.
        raise UsageError(str(error)) from error


def assemble(
    parts: Parts,
    identity: Mapping[str, object],
    progress: TrainingProgress,
    directory: RunDirectory,
    console: Console,
    stop: StopRequest,
) -> Trainer:
    """Build model, strategy and optimizer, in this order, and the trainer around them.

    Raises:
        UsageError: the model cannot be split by the layout.
    """
    config, group = parts.config, parts.group
    name = config.strategy_on(group.rank_info)
    strategy = parallel.build(name, parts)
    strategy.verify()
    sparse.refuse(strategy.sparse_layers, config, strategy=name, task=parts.task.name)
    # After the strategy has wrapped the model: it may have replaced the parameters.
    optimizer = NamedOptimizer(strategy.named_parameters(), config)
    strategy.bind(optimizer)
    saver = Saver(
        identity=identity,
        strategy=strategy,
        optimizer=optimizer,
        scaler=LossScaler(enabled=config.precision == "fp16"),
        directory=directory,
        console=console,
    )
    trainer = Trainer
    if config.strategy_on(group.rank_info) == "ps":
        # Import this late, as it imports torch.distributed.rpc.
        from .parallel.parameter_server.strategy import ServedTrainer

        trainer = ServedTrainer
    profile = Profile.parse(config.profile) if config.profile else None
    profiler = Profiler(profile, directory, console)
    return trainer(saver=saver, profiler=profiler, progress=progress, stop=stop)


def announce(trainer: Trainer, parts: Parts) -> None:
    """Report the start, on the console and in `events.jsonl`."""
    config, rank_info, device = parts.config, parts.group.rank_info, parts.group.device
    strategy = config.strategy_on(rank_info)
    trainer.directory.event(
        "start",
        step=0,
        steps=trainer.progress.steps,
        task=config.task,
        strategy=strategy,
        layout=parts.layout.sizes(),
        world_size=rank_info.world_size,
        device=device.type,
        global_batch=config.global_batch,
        shards=trainer.strategy.shards,
        accumulation=trainer.micro_batches,
    )
    micro = config.global_batch / trainer.strategy.shards / trainer.micro_batches
    shape = "" if strategy in ("single", "ps") else f" ({parts.layout})"
    trainer.console.say(
        f"{config.task}: {trainer.progress.steps} steps of {config.global_batch} samples = "
        f"{counted(trainer.strategy.shards, 'shard')} x "
        f"{counted(trainer.micro_batches, 'micro-batch')} of {micro:g}, "
        f"{strategy}{shape} on {device.type}, attempt {rank_info.attempt}, "
        f"restart {rank_info.restart}"
    )
    if names := trainer.strategy.evaluating:
        trainer.console.say(f"only evaluate, as model() has set them: {some_of(names)}")
    if description := trainer.strategy.describe():
        trainer.console.say(description)
    if config.dropout is not None:
        # Sketch a copy of the task: a task may keep a reference to its latest model.
        described = dropout.describe(sketch_of(copy.copy(parts.task)))
        trainer.console.say(f"--dropout {config.dropout} {described}")


def finish(trainer: Trainer) -> None:
    """Record that the run is done; its last line shows the metrics and the run directory."""
    progress, directory, rank_info = trainer.progress, trainer.directory, trainer.group.rank_info
    directory.event("done", step=progress.step, **progress.metrics)
    if rank_info.rank == 0 and not directory.write_outcome(
        progress.outcome(rank_info, "done", "all steps done")
    ):
        raise FencedError(f"a newer attempt has taken over {directory.path}")
    if report := trainer.strategy.report():
        trainer.console.say(report)
    trainer.console.say(
        f"done: step {progress.step}/{progress.steps}, {figures(progress.metrics)} · "
        f"run directory {directory.path}"
    )
