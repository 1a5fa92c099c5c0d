"""Every test sample counts once, for any number of ranks and any uneven shares."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tests.train.support.ladder import like_the_models
from tests.train.support.making import config_of, trainer_for
from tests.train.support.ranks import on_ranks
from train import tasks
from train.checkpoints import store
from train.checkpoints.store import Position
from train.data.loader import source_of
from train.data.order import Batch
from train.model.evaluation import batch_size, measure
from train.parallel.base import Strategy, Tally, tally
from train.proof.draws import double_precision
from train.rundir.files import read_lines
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

if TYPE_CHECKING:
    from tests.train.conftest import Start

TASK = "digits"
SAMPLES = 301


class Measuring:
    """The part of a strategy that evaluation needs; the last rank leaves reporting to another."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.task = like_the_models(tasks.load(TASK))
        torch.manual_seed(0)
        self.model = self.task.model()
        self.silent = ranks > 1 and rank == ranks - 1
        self.shards = max(ranks - 1, 1)
        self.shard = min(rank, self.shards - 1)
        self.axes = (self.shard,)
        self.calls = 0

    def evaluate(self, batch: Batch) -> Tally:
        self.calls += 1
        with torch.no_grad():
            found = tally(self.task, self.model(batch.inputs), batch.targets)
        if self.silent:
            # Like a pipeline's first stage, which sees no outputs.
            return Tally(loss=torch.zeros(()), score=torch.zeros(0), count=0)
        return found


def measured(rank: int, ranks: int, batch: int = SAMPLES) -> tuple[dict[str, float], int]:
    torch.set_default_dtype(torch.float64)
    strategy = Measuring(rank, ranks)
    rank_info = RankInfo(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    test = source_of(strategy.task.test()).take(torch.arange(SAMPLES))
    found = measure(strategy.task, cast(Strategy, strategy), group, test, batch=batch)
    return found, strategy.calls


@double_precision()
def test_uneven_parts_give_the_figures_of_one_process() -> None:
    (alone,) = on_ranks(1, measured, 1)
    strategy = Measuring(0, 1)
    test = source_of(strategy.task.test()).take(torch.arange(SAMPLES))
    whole = strategy.evaluate(test)
    assert alone[0] == pytest.approx(
        {
            "test_accuracy": whole.score[0].item() / SAMPLES,
            "test_loss": whole.loss.item() / SAMPLES,
        },
        rel=1e-12,
    )
    # Two shards of 150 and 151 samples, and a rank that another one reports for.
    several = on_ranks(3, measured, 3)
    assert [calls for _, calls in several] == [1, 1, 1]
    for metrics, _ in several:
        assert metrics == several[0][0]
        assert metrics["test_accuracy"] == alone[0]["test_accuracy"]
        assert metrics["test_loss"] == pytest.approx(alone[0]["test_loss"], rel=1e-12)


def test_a_mean_of_the_ranks_means_is_another_number() -> None:
    """The wrong form: parts of different size, weighed alike."""
    right = torch.cat([torch.ones(150), torch.zeros(151)])
    means = [right[:150].mean(), right[150:].mean()]
    assert sum(means) / 2 != right.mean()


@pytest.mark.parametrize("batch", [1, 64])
def test_the_batch_changes_how_often_ranks_evaluate_and_not_what_they_find(batch: int) -> None:
    (alone,) = on_ranks(1, measured, 1)
    several = on_ranks(3, measured, 3, batch)
    # Of shards of 150 and 151 samples, the smaller one's last pass may be of a sample twice.
    assert {calls for _, calls in several} == {-(-151 // batch)}
    for metrics, _ in several:
        assert metrics["test_accuracy"] == alone[0]["test_accuracy"]
        assert metrics["test_loss"] == pytest.approx(alone[0]["test_loss"], rel=1e-12)


@pytest.mark.parametrize(
    ("chosen", "size"),
    [
        ({"global_batch": 40}, 40),
        ({"global_batch": 40, "micro_batch": 16}, 14),
        ({"global_batch": 40, "eval_batch": 90}, 90),
        ({"global_batch": 40, "reduce": "exact", "virtual_shards": 3}, 14),
        ({"global_batch": 40, "reduce": "exact", "virtual_shards": 3, "micro_batch": 5}, 5),
    ],
)
def test_evaluation_takes_as_many_samples_at_a_time_as_training(
    tmp_path: Path, chosen: dict[str, Any], size: int
) -> None:
    trainer = trainer_for(0, 1, tmp_path, **chosen)
    sizes = {"training": 0, "evaluation": 0}
    run: torch.nn.Module = trainer.strategy.run  # type: ignore[attr-defined]

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        kind = "training" if module.training else "evaluation"
        sizes[kind] = max(sizes[kind], len(inputs[0]))

    run.register_forward_pre_hook(note)
    trainer.train_step()
    trainer.measure()
    assert sizes["evaluation"] == size
    assert sizes["training"] == (size if "eval_batch" not in chosen else 40)


def sizes_of(rank: int, folder: Path) -> dict[str, tuple[int, dict[str, float]]]:
    """What layouts that exchange in each pass find, one sample at a time."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, layout in SHARED.items():
        chosen = {"global_batch": 8, "task": "chars", **layout}
        trainer = trainer_for(rank, 2, folder / name, **chosen)
        # Odd: one rank has a sample more than the other.
        trainer.test = trainer.test.take(torch.arange(9))
        size = batch_size(trainer.config, trainer.strategy)
        trainer.config = config_of(**chosen, eval_batch=1)
        found[name] = size, trainer.measure()
    return found


SHARED: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "micro_batch": 2},
    "cp": {"cp": 2},
}


@double_precision()
def test_ranks_that_exchange_in_each_pass_evaluate_one_sample_at_a_time(tmp_path: Path) -> None:
    first, second = on_ranks(2, sizes_of, tmp_path)
    alone = trainer_for(0, 1, tmp_path / "alone", global_batch=8, task="chars")
    alone.test = alone.test.take(torch.arange(9))
    expected = alone.measure()
    assert {name: size for name, (size, _) in first.items()} == {
        "fsdp": 4, "tp": 8, "pp": 2, "cp": 8,
    }  # fmt: skip
    for name, (_, metrics) in [*first.items(), *second.items()]:
        assert metrics == pytest.approx(expected, rel=1e-12), name


# The test set is read wrongly as long as there is a file beside.
BROKEN = """
from pathlib import Path
import torch
from train.data import Batch
from train.tasks.digits import Digits

class Broken(Digits):
    def train(self):
        return super().train().part(0, 60)

    def score(self, outputs, targets):
        if Path(__file__).with_name("broken").exists():
            raise RuntimeError("out of memory, perhaps")
        return super().score(outputs, targets)
"""


def broken_task(folder: Path) -> str:
    (folder / "task.py").write_text(BROKEN)
    (folder / "broken").touch()
    return f"{folder / 'task.py'}:Broken"


def evaluations(run_dir: Path) -> list[tuple[int, int]]:
    events = read_lines(run_dir / "events.jsonl")
    return [(e["step"], e["epoch"]) for e in events if e["event"] == "epoch"]  # type: ignore[misc]


def losses(run_dir: Path) -> list[object]:
    return [m["step"] for m in read_lines(run_dir / "metrics.jsonl") if "loss" in m]


@pytest.mark.slow
def test_a_failure_of_the_last_evaluation_costs_no_step_and_the_next_start_makes_it(
    start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = ["--task", broken_task(tmp_path), "--steps=7", "--checkpoint-every=5"]
    flags += ["--global-batch=6", "--export", str(tmp_path / "w.st")]
    failed = start.single(*flags, run_dir=run_dir).finish(1)
    assert failed.outcome()["status"] == "fatal"
    assert "in the evaluation after step 7" in failed.output()
    assert [position.step for position in store.list_committed(run_dir)] == [7, 5]
    (tmp_path / "broken").unlink()
    done = start.single(*flags, run_dir=run_dir).finish()
    assert losses(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    assert evaluations(run_dir) == [(7, 0)]
    outcome = done.outcome()
    assert outcome["status"] == "done"
    assert outcome["metrics"]["loss"] == done.losses()[7]
    assert sorted(outcome["metrics"]) == ["loss", "test_accuracy", "test_loss"]
    assert (tmp_path / "w.st").exists()


def test_each_epoch_is_evaluated_once_after_its_checkpoint_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, run_dir = broken_task(tmp_path), tmp_path / "run"

    def run(*, steps: int = 20, stop_after: int | None = None) -> bool:
        # An epoch is ten steps, at whose end a checkpoint is due, too.
        chosen = {"task": task, "global_batch": 6, "checkpoint_every": 5, "steps": steps}
        trainer = trainer_for(0, 1, run_dir, **chosen)
        trainer.progress.steps = steps
        step = trainer.train_step

        def stopped_step() -> bool:
            return step() or trainer.progress.step == stop_after

        monkeypatch.setattr(trainer, "train_step", stopped_step)
        trainer.resume()
        return trainer.run()

    with pytest.raises(RuntimeError, match="out of memory"):
        run()
    # The checkpoint that was being written when it failed is whole.
    assert [position.step for position in store.list_committed(run_dir)] == [10, 5]
    assert evaluations(run_dir) == []
    with pytest.raises(RuntimeError, match="out of memory"):
        run()
    (tmp_path / "broken").unlink()
    # After a signal at the end of an epoch, it stops immediately.
    assert not run(stop_after=20, steps=21)
    assert evaluations(run_dir) == [(10, 1)]
    assert run(steps=21)
    assert evaluations(run_dir) == [(10, 1), (20, 2), (21, 2)]
    assert losses(run_dir) == list(range(1, 22))
    # A longer run goes on from where an evaluation was made already.
    shutil.rmtree(Position(attempt=0, step=21).path(run_dir))
    assert run(steps=22)
    assert evaluations(run_dir) == [(10, 1), (20, 2), (21, 2), (22, 2)]


class Watched:
    """Samples that record their readers in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.read.append(number)
        return torch.full((64,), number / 24), number % 10


def test_test_data_are_read_by_the_processes_that_training_data_are_read_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    monkeypatch.setattr(type(tasks.load(TASK)), "test", lambda self: watched)
    here = trainer_for(0, 1, tmp_path / "here")
    there = trainer_for(0, 1, tmp_path / "there", workers=1)
    watched.read.clear()
    expected = here.measure()
    assert sorted(set(watched.read)) == list(range(24))
    watched.read.clear()
    assert there.measure() == expected
    assert watched.read == []
