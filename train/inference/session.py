"""One use of a trained model: connect, load a checkpoint, evaluate or predict, report.

It takes no claim and records nothing: the run may be active, and its directory may be read-only. A
stop request may arrive at any moment, since no work is lost.
"""

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from .. import parallel, tasks
from ..cli.config import Config
from ..data.loader import resident, source_of
from ..data.order import Batch, Source
from ..errors import EXIT_DONE, OutputError, UsageError
from ..failure.record import report, tell_torchrun
from ..model.evaluation import batch_size, measure
from ..model.trees import tensors_of
from ..parallel.base import Parts, Strategy
from ..parallel.consistency import check_data
from ..parallel.pipeline import split
from ..rundir.console import Console, figures
from ..rundir.jsonl import as_recorded, dump
from ..runtime.process_group import Channel, RankGroup, open_group
from ..runtime.rank import RankInfo
from ..runtime.signals import StopRequest
from ..tasks.base import Task
from . import checkpoint, rows
from .checkpoint import LoadedCheckpoint
from .parts import Partition, PredictionFile

PREDICTED = 64
"""Default number of samples in a forward pass of --predict."""
PROGRESS_S = 10.0
"""Seconds between two progress lines."""


def infer(config: Config, rank_info: RankInfo, stop: StopRequest, console: Console) -> int:
    """Evaluate or predict as configured and return the exit status; a failure has been reported.

    Raises:
        UsageError: the checkpoint is missing or does not fit, the test set is empty, or the
            prediction file cannot be written.
    """
    hint = "" if config.predict is None else " to continue with the existing parts"

    def leave(signal_name: str) -> None:
        console.complain(f"stopped by {signal_name}; start again{hint}")
        # torchrun also sends the signal to the ranks that are left when one has failed.
        tell_torchrun(f"stopped by {signal_name}", echo=True)

    stop.leave_by(leave)
    task: Task | None = None
    try:
        task = tasks.load(config.task)
        with open_group(rank_info, config) as group:
            if group.device.type == "cpu" and (config.predict or config.reduce == "exact"):
                # The number of threads changes how sums are divided, and a single process may use
                # more threads than one of several ranks.
                torch.set_num_threads(1)
            test = resident(
                source_of(task.test(), workers=config.workers, task=task.name),
                group.device,
                task=task.name,
            )
            if config.evaluate_only and not len(test):
                raise UsageError(f"--evaluate-only: test() of task {task.name!r} has no samples")
            check_data(test, test, group, task=task.name)
            strategy = prepare(config, task, group, test)
            identity = as_recorded({"task": config.task, **task.identity()})
            loaded = checkpoint.load(strategy, group, identity, console)
            if config.predict is None:
                evaluate(config, strategy, test, loaded, console)
            else:
                predict(config, config.predict, strategy, test, loaded, console)
            return EXIT_DONE
    except UsageError:
        raise
    # A task that calls sys.exit() must not look like success.
    except (Exception, SystemExit) as error:
        return report(error, rank_info, task)


def prepare(config: Config, task: Task, group: RankGroup, test: Source) -> Strategy:
    """Arrange the model on the ranks, without loading its weights.

    Raises:
        UsageError: the model cannot be split by the layout.
    """
    layout = config.layout_on(group.rank_info)
    if layout.pp > 1:
        try:
            split.check(config, layout)
        except UsageError:
            # Use the batch size of training without stages.
            stages = split.stage_count(config.pp_schedule, layout.pp)
            batch = 2 * stages * layout.shards
            config = dataclasses.replace(config, global_batch=batch, micro_batch=1)
    parts = Parts(task=task, config=config, layout=layout, group=group)
    strategy = parallel.build(config.strategy_on(group.rank_info), parts, trains=False)
    strategy.verify()
    strategy.warm_up(test.take(torch.arange(min(len(test), 1))))
    return strategy


def evaluate(
    config: Config, strategy: Strategy, test: Source, loaded: LoadedCheckpoint, console: Console
) -> None:
    """Evaluate on the whole test set, and print the metrics."""
    group, task = strategy.parts.group, strategy.task
    batch = batch_size(config, strategy)
    metrics = measure(task, strategy, group, test, batch=batch)
    if config.json:
        record = {"step": loaded.step, "checkpoint": str(loaded.path), "samples": len(test)}
        console.say(dump({**record, "metrics": metrics}, indent=2))
        return
    console.say(
        f"{config.task}, step {loaded.step}: {figures(metrics)} · {len(test)} samples · checkpoint "
        f"{loaded.path}"
    )


def predict(
    config: Config,
    path: Path,
    strategy: Strategy,
    test: Source,
    loaded: LoadedCheckpoint,
    console: Console,
) -> None:
    """Write the predictions for all test samples, in their order.

    Raises:
        UsageError: on all ranks; the file or its parts belong to another command.
        OutputError: the file or a part cannot be written.
    """
    group, task = strategy.parts.group, strategy.task
    batch = config.eval_batch or config.micro_batch or PREDICTED
    partition = Partition(samples=len(test), batch=batch)
    first = group.rank_info.rank == 0
    command = command_of(config, strategy, test, loaded, batch) if first else {}
    file = PredictionFile(path, partition, command)
    missing = _begin(file, group)
    if missing is None:
        console.say(f"{path} is the result of this command already")
        return
    if not Channel(group, timeout_s=config.timeout_s).sees_one(file.folder):
        raise UsageError(
            f"--predict {path}: not all ranks see {file.folder}; name a file in a directory that "
            "all nodes share"
        )
    console.say(
        f"{config.task}: predicting {len(test)} samples in batches of {batch} by the checkpoint "
        f"{loaded.path}"
    )
    if len(missing) < partition.parts:
        there = partition.parts - len(missing)
        console.say(f"continuing: {there} of {partition.parts} parts exist")
    plan = list(rows.passes(partition, missing, shard=strategy.shard, shards=strategy.shards))
    lines: list[str] = []
    reported = time.monotonic()
    for number, (one, some) in enumerate(
        rows.predict(task, strategy, test, plan, seed=config.seed), start=1
    ):
        lines += some or []
        if not one.closes:
            continue
        _write(file, one.part, lines, group)
        lines = []
        if (now := time.monotonic()) - reported > PROGRESS_S:
            console.say(f"{number / len(plan):.0%} of this start's batches are done")
            reported = now
    group.on_rank_0(file.join)
    console.say(f"done: {len(test)} predictions in {path}")


def _begin(file: PredictionFile, group: RankGroup) -> list[int] | None:
    """Let rank 0 check the existing files, and return the missing parts on all ranks."""
    missing: list[int] | None = None
    problem = ""
    if group.rank_info.rank == 0:
        try:
            missing = file.begin()
        except UsageError as error:
            problem = str(error)
    missing, problem = group.broadcast((missing, problem))
    if problem:
        raise UsageError(problem)
    return missing


def _write(file: PredictionFile, part: int | None, lines: list[str], group: RankGroup) -> None:
    """Write this rank's part, and agree that all ranks succeeded, so that none waits for long."""
    problem = ""
    if part is not None and lines:
        try:
            file.write(part, lines)
        except OutputError as error:
            problem = str(error)
    if problems := [text for text in group.gather(problem) if text]:
        raise OutputError(problems[0])


def command_of(
    config: Config, strategy: Strategy, test: Source, loaded: LoadedCheckpoint, batch: int
) -> Mapping[str, object]:
    """Return everything that determines the bytes of the predictions, as JSON types.

    The number of ranks is excluded, and so are layouts that compute the same numbers.
    """
    layout = strategy.parts.layout
    name, colon, _ = config.task.rpartition(":")
    source = hashlib.sha256(Path(name).read_bytes()).hexdigest() if colon else None
    return {
        "step": loaded.step,
        "manifest_sha256": loaded.manifest_sha256,
        "task": config.task,
        "task_sha256": source,
        "samples": len(test),
        "data_sha256": digest_of(test),
        "batch": batch,
        "seed": config.seed,
        "device": strategy.parts.group.device.type,
        "precision": config.precision,
        "tf32": config.tf32,
        "compile": config.compile,
        "tp": layout.tp,
        "cp": layout.cp,
        "cp_method": config.cp_method if layout.cp > 1 else None,
        "torch": torch.__version__,
    }


def digest_of(test: Source) -> str | None:
    """Return a digest of samples in memory; None: they are read one by one."""
    if not isinstance(test, Batch):
        return None
    digest = hashlib.sha256()
    for tensor in tensors_of((test.inputs, test.targets)):
        digest.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.hexdigest()
