"""`--reduce exact`: the same bits on any number of ranks, also after failures."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.train.support.ladder import trainer_of
from tests.train.support.making import trainer_for
from tests.train.support.ranks import on_ranks
from tests.train.support.reading import whole
from train.cli.config import Config
from train.errors import UsageError
from train.parallel import build
from train.parallel.base import Parts
from train.parallel.ddp import sum_rows
from train.parallel.layout import Layout
from train.rundir.files import read_lines
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.tasks import load

if TYPE_CHECKING:
    from tests.train.conftest import Running, Start

PICTURES = f"{Path(__file__).parents[1] / 'support/pictures.py'}:Pictures"
STEPS = 100
# Virtual shards of 3 and of 2 samples.
SHAPE: dict[str, Any] = {"global_batch": 10}
CASES: dict[str, dict[str, Any]] = {
    "chars": {"task": "chars", "clip_norm": 1.0, "dropout": 0.2},
    "digits": {"task": "digits", "micro_batch": 2, "activation_checkpointing": True},
    # Its running statistics must be the same as well.
    "batch normalisation": {"task": PICTURES, "micro_batch": 2},
}


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def ends(
    rank: int, world_size: int, reduce: str, steps: int
) -> dict[str, tuple[str, str, list[float]]]:
    """Train all cases; give digests of weights and optimizer, and the losses on rank 0."""
    rank_info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launched=True,
    )
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    found = {}
    for name, chosen in CASES.items():
        config = Config(strategy="ddp", reduce=reduce, **SHAPE, **chosen)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            layout = Layout(dp_replicate=world_size)
            trainer = trainer_of(config, layout, group, Path(folder))
            trainer.resume()
            for _ in range(steps):
                trainer.train_step()
            trainer.directory.flush()
            metrics = read_lines(Path(folder) / "metrics.jsonl")
        found[name] = (
            digest(trainer.strategy.model_state()),
            digest(trainer.optimizer.tensors()),
            [float(str(line["loss"])) for line in metrics],
        )
    return found


@pytest.mark.slow
def test_one_two_and_four_ranks_end_in_the_same_bits() -> None:
    (alone,) = on_ranks(1, ends, 1, "exact", STEPS)
    for losses in (losses for *_, losses in alone.values()):
        assert len(losses) == STEPS
        assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    for world_size in (2, 4):
        ranks = on_ranks(world_size, ends, world_size, "exact", STEPS)
        assert ranks[0] == alone
        for name in CASES:
            # All ranks hold the same; rank 0 alone writes metrics.
            assert {rank[name][:2] for rank in ranks} == {alone[name][:2]}


def apart(rank: int) -> dict[str, float]:
    """Train some steps exactly and as one process does; give the largest difference of weights."""
    torch.set_default_dtype(torch.float64)
    group = RankGroup(rank_info=RankInfo(), device=torch.device("cpu"))
    sgd: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "global_batch": 10}
    found = {}
    for task in ("chars", "digits"):
        states = []
        for reduce in ("exact", "fast"):
            config = Config(strategy="single", task=task, reduce=reduce, **sgd)
            with tempfile.TemporaryDirectory() as folder:
                trainer = trainer_of(config, Layout(), group, Path(folder))
                for _ in range(3):
                    trainer.train_step()
            states.append(trainer.strategy.model_state())
        exact, fast = states
        found[task] = max((exact[name] - fast[name]).abs().max().item() for name in exact)
    return found


def test_exact_trains_what_one_process_trains() -> None:
    (found,) = on_ranks(1, apart)
    assert max(found.values()) <= 1e-12


@pytest.mark.slow
def test_wrong_form_ddp_differs_between_one_and_four_ranks() -> None:
    (alone,) = on_ranks(1, ends, 1, "fast", 10)
    four = on_ranks(4, ends, 4, "fast", 10)[0]
    for name in CASES:
        assert four[name][0] != alone[name][0]


def summed(rank: int, ranks: int, wrong: bool) -> Tensor:
    """Add eight rows, whose sum depends on the order, on some ranks."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(8, 1001, generator=generator) * 10 ** torch.arange(-4.0, 4.0)[:, None]
    mine = rows.chunk(ranks)[rank]
    if wrong:
        total = mine.sum(0)
        if ranks > 1:
            torch.distributed.all_reduce(total)
        return total
    return sum_rows(mine, ranks)


def test_rows_are_added_from_top_to_bottom() -> None:
    (alone,) = on_ranks(1, summed, 1, False)
    (wrong_alone,) = on_ranks(1, summed, 1, True)
    for total in on_ranks(4, summed, 4, False):
        assert torch.equal(total, alone)
    for total in on_ranks(4, summed, 4, True):
        assert not torch.equal(total, wrong_alone)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "ranks": (
        {"virtual_shards": 4},
        3,
        "--reduce exact shares --virtual-shards 4 evenly, but 4 = 1 x 3 + 1; start 1, 2, 4 ranks, "
        "or begin a new run with --virtual-shards 3 or a multiple",
    ),
    "batch": (
        {"virtual_shards": 16, "global_batch": 10},
        2,
        "--virtual-shards 16 cannot each have a sample of --global-batch 10; use "
        "--virtual-shards 10 or fewer",
    ),
    "strategy": (
        {"strategy": "fsdp"},
        2,
        "--reduce exact keeps the whole model on each rank: it fits --strategy ddp, not --strategy "
        "fsdp (dp_replicate 2); leave out one of the two",
    ),
    "pipeline": (
        {"pp": 2},
        2,
        "--reduce exact keeps the whole model on each rank: it fits --strategy ddp, not --strategy "
        "auto (pp 2); leave out one of the two",
    ),
    "normalisation": (
        {"sync_batch_norm": True},
        2,
        "--sync-batch-norm normalises over whatever ranks there are, which --reduce exact must not "
        "depend on; leave out one of the two",
    ),
    "hook": (
        {"comm_hook": "fp16"},
        2,
        "--comm-hook fp16 rounds what --reduce exact keeps; leave out one of the two",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_change_the_bits_is_refused(reason: str) -> None:
    chosen, ranks, message = REFUSED[reason]
    config = Config(reduce="exact", **chosen)
    layout = Layout(pp=ranks) if config.pp else Layout(dp_replicate=ranks)
    group = RankGroup(rank_info=RankInfo(world_size=ranks), device=torch.device("cpu"))
    parts = Parts(task=load("digits"), config=config, layout=layout, group=group)
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        build(config.strategy_on(group.rank_info), parts)


FLAGS = (
    "--reduce=exact",
    "--task=chars",
    "--dropout=0.1",
    "--global-batch=8",
    "--steps=100",
    "--checkpoint-every=10",
    "--export=weights.st",
)
LAST = "checkpoints/attempt-{}/step-00000100"


@pytest.mark.slow
def test_four_then_two_then_four_ranks_with_kills_end_as_one_process(
    start: Start, tmp_path: Path
) -> None:
    alone = start.single(*FLAGS, run_dir=tmp_path / "alone").finish()
    expected = contents(alone, 0)
    run_dir = tmp_path / "run"
    first = start.held(4, *FLAGS, after=25, rank=2, run_dir=run_dir)
    first.wait_until_held(25, saved=20)
    os.kill(first.workers()[2], signal.SIGKILL)
    assert first.wait() != 0
    second = start.held(2, *FLAGS, after=60, rank=0, run_dir=run_dir, attempt=1)
    second.wait_until_held(60, saved=50)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() != 0
    assert second.outcome()["status"] == "preempted"
    third = start.ranks(4, *FLAGS, run_dir=run_dir, attempt=2).finish()
    resumed = [event for event in third.events() if event["event"] == "resume"]
    assert [event["written_by_ranks"] for event in resumed] == [4, 2]
    assert resumed[0]["step"] >= 20
    assert resumed[1]["step"] >= 60
    assert contents(third, 2) == expected
    assert third.losses() == alone.losses()


def contents(run: Running, attempt: int) -> dict[str, bytes]:
    """The final weights and the tensors of the last checkpoint."""
    tensors = whole(run.run_dir / LAST.format(attempt))
    found = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return {**found, "weights.st": (run.log.parent / "weights.st").read_bytes()}


MASKED = """
import torch
from torch import nn
from train.tasks.digits import Digits

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(64, 10)
        self.register_buffer("mask", torch.tensor([0.0] * 8 + [float("-inf")] * 2))

    def forward(self, x):
        return self.scores(x) + self.mask.exp().log().clamp(min=-1.0)

class Masked(Digits):
    def model(self):
        return Net()
"""


def test_a_mask_of_infinities_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "masked.py").write_text(MASKED)
    task = f"{tmp_path / 'masked.py'}:Masked"
    trainer = trainer_for(0, 1, tmp_path / "run", task=task, strategy="ddp", reduce="exact")
    trainer.train_step()
    mask = trainer.strategy.model_state()["mask"]
    assert mask.tolist() == [0.0] * 8 + [-float("inf")] * 2
