"""Trainers in the making, on ranks that `ranks.on_ranks` has connected."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.train.support.ladder import trainer_of
from train.cli.config import Config
from train.errors import UsageError
from train.loop import Trainer
from train.runtime.process_group import Alone, RankGroup
from train.runtime.rank import RankInfo


def config_of(**chosen: object) -> Config:
    return Config(**{"global_batch": 8, **chosen})  # type: ignore[arg-type]


def group_of(rank: int, ranks: int) -> RankGroup:
    """The group of all ranks; of one, where `ranks` is 1, also among connected ones."""
    rank_info = RankInfo(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        launched=True,
    )
    return (Alone if ranks == 1 else RankGroup)(rank_info=rank_info, device=torch.device("cpu"))


def trainer_for(rank: int, ranks: int, folder: Path, **chosen: object) -> Trainer:
    """Make what the command line would; `folder` is the run directory."""
    config, group = config_of(**chosen), group_of(rank, ranks)
    return trainer_of(config, config.layout_on(group.rank_info), group, folder)


def refusal(rank: int, ranks: int, folder: Path, *, steps: int = 0, **chosen: object) -> str:
    """Why a training is refused at its start, or in its first steps; '' if it is not."""
    try:
        trainer = trainer_for(rank, ranks, folder, **chosen)
        trainer.resume()
        for _ in range(steps):
            trainer.train_step()
    except UsageError as error:
        return str(error)
    return ""
