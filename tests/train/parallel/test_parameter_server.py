"""A parameter server: in step, equal to one process; else never more out of date than allowed."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.train.support import kinds
from tests.train.support.ladder import like_the_models, trainer_of
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import Batch, SampleOrder
from train.errors import NonFiniteLoss, UsageError
from train.loop import Trainer
from train.model.optimizer import NamedOptimizer
from train.parallel.base import Parts, Sums
from train.parallel.layout import Layout
from train.parallel.parameter_server import wire
from train.parallel.parameter_server.server import Gradient, Pacing, Server, Stretch, Ticket, Work
from train.parallel.parameter_server.strategy import Served, ServedTrainer
from train.proof.draws import double_precision
from train.proof.trial import config_of_one_process
from train.rundir.files import read_lines
from train.runtime.process_group import Alone, RankGroup
from train.runtime.rank import RankInfo
from train.tasks import load

if TYPE_CHECKING:
    pass

PICTURES = f"{Path(__file__).parents[1] / 'support/pictures.py'}:Pictures"
RANKS = 4
TRAINERS = RANKS - 1
CLOSE = 1e-12
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-4}


def config_of(**chosen: Any) -> Config:
    # Shares of 3, 3 and 4 samples.
    common: dict[str, Any] = {"task": "digits", "global_batch": 10, "timeout_s": 60}
    return Config(strategy="ps", **{**common, **SGD, "checkpoint_every": 0, **chosen})


def group_of(rank: int) -> RankGroup:
    rank_info = RankInfo(
        rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS, launched=True
    )
    return RankGroup(rank_info=rank_info, device=torch.device("cpu"))


State = dict[str, Tensor]


def state_of(trainer: Trainer) -> State:
    state = {**trainer.strategy.model_state(), **trainer.optimizer.tensors()}
    return {name: tensor.clone() for name, tensor in state.items()}


def difference(a: State, b: State) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def served(config: Config, group: RankGroup, folder: Path, steps: int = 5) -> Trainer:
    trainer = trainer_of(config, Layout(dp_replicate=RANKS), group, folder)
    trainer.progress.steps = steps
    return trainer


# In step: equal to one process.

IN_STEP = {
    "sgd": config_of(),
    "adamw": config_of(**ADAMW),
    "chars": config_of(task="chars", **ADAMW),
    "micro-batches": config_of(micro_batch=2),
    "clipped": config_of(clip_norm=0.1),
    "statistics": config_of(task=PICTURES),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """What rank 0 has seen of one configuration."""

    weights: State
    resumed: State
    alone: State
    losses: list[float]
    alone_losses: list[float]
    test_loss: tuple[float, float]


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]  # type: ignore[misc]


def in_step(rank: int) -> dict[str, Runs]:
    torch.set_default_dtype(torch.float64)
    found = {}
    group = group_of(rank)
    for name, config in IN_STEP.items():
        with tempfile.TemporaryDirectory() as own:
            # Rank 0's: all ranks see the same one.
            folder = Path(group.broadcast(own))
            first = served(config, group, folder / "first")
            assert first.run()
            again = served(config, group, folder / "again", steps=3)
            assert again.run()
            rest = served(config, group, folder / "again")
            rest.resume()
            assert rest.progress.step == 3 or rank > 0
            assert rest.run()
            if rank == 0:
                rank_info = dataclasses.replace(group.rank_info, world_size=1)
                one = trainer_of(
                    config_of_one_process(config),
                    Layout(),
                    Alone(rank_info=rank_info, device=group.device),
                    folder / "alone",
                )
                one.progress.steps = 5
                for _ in range(5):
                    one.train_step()
                one.directory.flush()
                found[name] = Runs(
                    weights=state_of(first),
                    resumed=state_of(rest),
                    alone=state_of(one),
                    losses=losses_of(folder / "first"),
                    alone_losses=losses_of(folder / "alone"),
                    test_loss=(first.progress.metrics["test_loss"], one.measure()["test_loss"]),
                )
            group.sum([0.0])
    return found


@pytest.fixture(scope="module")
def runs() -> dict[str, Runs]:
    return on_ranks(RANKS, in_step)[0]


@pytest.mark.parametrize("name", [name for name in IN_STEP if name != "statistics"])
def test_trainers_in_step_equal_one_process(runs: dict[str, Runs], name: str) -> None:
    run = runs[name]
    assert difference(run.weights, run.alone) <= CLOSE
    assert run.losses == pytest.approx(run.alone_losses, abs=CLOSE)
    assert run.test_loss[0] == pytest.approx(run.test_loss[1], abs=CLOSE)


@pytest.mark.parametrize("name", IN_STEP)
def test_a_run_in_step_resumes_to_the_same_bits(runs: dict[str, Runs], name: str) -> None:
    """Hence the order in which gradients arrive does not matter either."""
    assert difference(runs[name].weights, runs[name].resumed) == 0.0


@double_precision()
def test_running_statistics_are_the_mean_of_the_trainers(runs: dict[str, Runs]) -> None:
    config = IN_STEP["statistics"]
    task = like_the_models(load(config.task))
    alone = Alone(rank_info=RankInfo(), device=torch.device("cpu"))
    parts = Parts(task=task, config=config, layout=Layout(), group=alone)
    model = parts.model()
    optimizer = NamedOptimizer(model.named_parameters(), config)
    data = task.train()
    assert isinstance(data, Batch)
    order = SampleOrder(size=len(data), seed=config.seed)
    for step in range(5):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after = []
        for shard in range(TRAINERS):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            batch = data.take(order.share(step * 10, 10, shard=shard, shards=TRAINERS))
            torch.autograd.backward(task.loss(model(batch.inputs), batch.targets) / 10)
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for name, buffer in model.named_buffers():
            mean = torch.stack([state[name] for state in after]).double().mean(dim=0)
            buffer.copy_(mean)
        optimizer.step()
    expected = {**model.state_dict(), **optimizer.tensors()}
    assert difference(runs["statistics"].weights, expected) <= CLOSE
    # The buffers have moved at all.
    assert expected["0.1.num_batches_tracked"] == 5


# Apart: how old gradients get.

LAG = {"bounded": 2, "async": 9}
STALENESS = 2


def last_step(folder: Path) -> int:
    """Give the last update that is in the metrics; they come a moment later, but they come."""
    return max((int(str(line["step"])) for line in read_lines(folder / "metrics.jsonl")), default=0)


def with_a_slow_trainer(rank: int) -> dict[str, tuple[list[int], list[int], int]]:
    """One trainer takes as long for its first gradient as the others take for so many updates."""
    found = {}
    group = group_of(rank)
    for mode, lag in LAG.items():
        config = config_of(ps_mode=mode, staleness=STALENESS, lr=0.01, checkpoint_every=20)
        with tempfile.TemporaryDirectory() as own:
            folder = Path(group.broadcast(own))
            trainer = served(config, group, folder, steps=50)
            assert isinstance(trainer, ServedTrainer)
            compute, first = trainer._gradient, [True]

            def slowly(
                work: Work,
                *,
                folder: Path = folder,
                lag: int = lag,
                compute: Callable[[Work], Gradient] = compute,
                first: list[bool] = first,
            ) -> Gradient:
                """Let the slow one draw before any update, and push after so many."""
                drawn = folder / "the slow one has drawn"
                if first and rank == RANKS - 1:
                    drawn.touch()
                    while last_step(folder) < work.ticket.version + lag:
                        time.sleep(0.002)
                while first and not drawn.exists():
                    time.sleep(0.002)
                first.clear()
                return compute(work)

            trainer._gradient = slowly  # type: ignore[method-assign]
            assert trainer.run()
            lines = read_lines(folder / "metrics.jsonl")
            ages = [int(str(line["staleness"])) for line in lines if "staleness" in line]
            steps = [int(str(line["step"])) for line in lines if "staleness" in line]
            found[mode] = ages, steps, int(trainer.progress.metrics.get("staleness_max", -1))
            group.sum([0.0])
    return found


@pytest.fixture(scope="module")
def slow() -> dict[str, tuple[list[int], list[int], int]]:
    return on_ranks(RANKS, with_a_slow_trainer)[0]


def test_a_slow_trainer_never_makes_a_gradient_older_than_the_bound(
    slow: dict[str, tuple[list[int], list[int], int]],
) -> None:
    ages, steps, largest = slow["bounded"]
    # The others went on for as long as they may, and no longer.
    assert max(ages) == largest == STALENESS
    assert steps == list(range(1, 51))


def test_without_a_bound_it_does(slow: dict[str, tuple[list[int], list[int], int]]) -> None:
    ages, steps, largest = slow["async"]
    assert max(ages) == largest >= LAG["async"] > STALENESS
    assert steps == list(range(1, 51))


# Updates are never lost.

PUSHES = 25


class Racing(Server):
    """The wrong form: each call applies its update itself, without the lock.

    Between reading the weights and writing them it waits for the others to have read them too,
    which they may do at any time.
    """

    weights: Tensor
    barrier = threading.Barrier(TRAINERS)

    def push(self, gradient: Gradient) -> None:
        before = self.weights.clone()
        self.barrier.wait()
        assert gradient.gradients[0] is not None
        self.weights.copy_(before - gradient.gradients[0])
        self.barrier.wait()
        super().push(gradient)


def pushing(rank: int, wrong: bool) -> float:
    """Let each trainer push so many gradients of 1 with a learning rate of 1; give the weight."""
    weights = torch.zeros(1000)
    pacing = Pacing()
    server = (Racing if wrong else Server)(pacing, lambda: [weights.clone()], timeout_s=60)
    if isinstance(server, Racing):
        server.weights = weights
    with wire.connect(group_of(rank), server if rank == 0 else None, timeout_s=60):
        if rank == 0:
            total = TRAINERS * PUSHES
            server.open(version=0, limit=total)
            while gradients := server.collect(stop=False):
                with server.applying(gradients):
                    if not wrong:
                        assert gradients[0].gradients[0] is not None
                        weights -= gradients[0].gradients[0]
            server.close(Stretch(number=1, step=total))
        else:
            while isinstance(work := wire.draw(rank - 1, 1), Work):
                sent = work.weights[0]
                # Never half of an update.
                assert wrong or (sent == sent[0]).all()
                wire.push(gradient_of(work.ticket, torch.ones(1000)))
    assert (weights == weights[0]).all()
    return weights[0].item()


def gradient_of(ticket: Ticket, gradient: Tensor) -> Gradient:
    return Gradient(
        ticket=ticket,
        loss=0.0,
        count=1,
        gradients=[gradient],
        moved=[],
        samples=torch.zeros(0),
        stop=False,
    )


def both(rank: int) -> tuple[float, float]:
    return pushing(rank, wrong=False), pushing(rank, wrong=True)


def test_concurrent_updates_are_all_in_the_weights_and_without_the_lock_are_not() -> None:
    right, wrong = on_ranks(RANKS, both)[0]
    assert right == -float(TRAINERS * PUSHES)
    # Of those that read the same weights, one survives.
    assert wrong == -float(PUSHES)


# What trainers may not do.

COUNTED = f"{kinds.__file__}:CountedLate"


def test_counters_move_alike_in_step_and_add_up_without_waiting() -> None:
    config = config_of(task=COUNTED, ps_mode="async")
    parts = Parts(
        task=load(COUNTED), config=config, layout=Layout(dp_replicate=RANKS), group=group_of(0)
    )
    strategy = Served(parts)
    mean, two, three = torch.zeros(kinds.WIDTH), torch.tensor(2), torch.tensor(3)
    # A trainer that waits for nobody has the whole batch of its update.
    for piece in ([mean, two], [mean, three]):
        strategy.move([piece])
    strategy.move([[mean, two], [mean, two]])
    assert strategy.model_state()["middle.0.count"] == 2 + 3 + 2
    with pytest.raises(UsageError, match=r"buffer 'middle\.0\.count' of task 'kind' holds whole "):
        strategy.move([[mean, two], [mean, three]])


def test_parameters_that_a_trainer_writes_are_refused_without_waiting_too(tmp_path: Path) -> None:
    trainer = served(config_of(ps_mode="async"), group_of(0), tmp_path)
    assert isinstance(trainer, ServedTrainer)
    gradient = gradient_of(Ticket(trainer=1, update=0, version=0), torch.zeros(1))
    server = Server(Pacing(), trainer.strategy.copy_weights, timeout_s=1)
    with pytest.raises(
        UsageError, match=r"in step 1 forward\(\) of .* writes 0\.weight\. Trainers have copies"
    ):
        trainer._apply(server, [dataclasses.replace(gradient, written=["0.weight"])], 0.0)


# Failures.


def poisoned(rank: int) -> dict[str, tuple[str, list[int], float]]:
    """One trainer's loss is not a number in its third gradient."""
    found = {}
    group = group_of(rank)
    for mode in ("sync", "async"):
        with tempfile.TemporaryDirectory() as own:
            folder = Path(group.broadcast(own))
            trainer = served(config_of(ps_mode=mode), group, folder, steps=50)
            compute, calls = trainer.strategy.accumulate, iter(range(50))

            def spoil(
                batches: Sequence[Batch],
                factor: float = 1.0,
                *,
                compute: Callable[..., Sums] = compute,
                calls: Iterator[int] = calls,
            ) -> Sums:
                sums = compute(batches, factor)
                return (
                    dataclasses.replace(sums, loss=sums.loss * float("nan"))
                    if next(calls) == 2
                    else sums
                )

            if rank == 2:
                trainer.strategy.accumulate = spoil  # type: ignore[method-assign, assignment]
            with pytest.raises(NonFiniteLoss) as raised:
                trainer.run()
            shard, shards = (1, TRAINERS) if mode == "sync" else (0, 1)
            order = SampleOrder(size=len(trainer.train), seed=0)
            numbers = order.share(2 * 10, 10, shard=shard, shards=shards).tolist()
            finite = all(t.isfinite().all() for t in trainer.strategy.model_state().values())
            found[mode] = str(raised.value), sorted(numbers), float(finite)
            # An error leaves the calls connected, as the process ends; here another case follows.
            group.sum([0.0])
            wire.leave()
            group.sum([0.0])
    return found


def test_a_loss_that_is_not_finite_ends_all_ranks_before_it_reaches_the_weights() -> None:
    for found in on_ranks(RANKS, poisoned):
        text, numbers, finite = found["sync"]
        assert text == (
            "the loss of step 3 is not finite, as rank 2 has found for a batch of samples "
            f"{', '.join(map(str, numbers))}; checkpoints are from before it; a smaller "
            "--lr or --clip-norm may help"
        )
        assert finite
        text, _, finite = found["async"]
        assert "is not finite, as rank 2 has found for a batch of samples " in text
        assert finite
