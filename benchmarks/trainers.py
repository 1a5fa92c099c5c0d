"""Our trainer, built as `python -m train` builds it, for the benchmarks to step by hand."""

from pathlib import Path

import torch

from train.cli.config import Config
from train.loop import Trainer
from train.parallel.base import Parts
from train.rundir.console import Console
from train.rundir.files import RunDirectory, TrainingProgress
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.runtime.signals import StopRequest
from train.session import assemble
from train.tasks import Task


def trainer_of(
    task: Task,
    config: Config,
    rank_info: RankInfo | None = None,
    device: torch.device | None = None,
) -> Trainer:
    """Build a trainer that writes its metrics into `config.run_dir`, and prints nothing."""
    here = rank_info or RankInfo()
    parts = Parts(
        task=task,
        config=config,
        layout=config.layout_on(here),
        group=RankGroup(rank_info=here, device=device or torch.device("cpu")),
    )
    directory = config.directory
    Path(directory).mkdir(parents=True, exist_ok=True)
    return assemble(
        parts,
        {**config.identity(), **task.identity()},
        TrainingProgress(steps=1 << 40),
        RunDirectory(directory, here),
        # No rank of this number speaks.
        Console(rank=-1),
        StopRequest(),
    )
