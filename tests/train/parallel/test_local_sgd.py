"""Local SGD: separate models that become one every few steps, where a checkpoint may be taken."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.train.support.ladder import like_the_models, trainer_of
from tests.train.support.making import trainer_for
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import SampleOrder, share_of
from train.loop import Trainer
from train.parallel.layout import Layout
from train.proof.draws import double_precision
from train.proof.trial import config_of_one_process
from train.runtime.process_group import Alone, RankGroup
from train.runtime.rank import RankInfo
from train.tasks import load

if TYPE_CHECKING:
    from tests.train.conftest import Start

RESTING, THAWING = (
    f"{Path(__file__).parents[1] / 'support/proved.py'}:{name}" for name in ("Resting", "Thawing")
)
PICTURES = f"{Path(__file__).parents[1] / 'support/pictures.py'}:Pictures"
RANKS = 3
CLOSE = 1e-12
# Shares of 3, 3 and 4 samples.
COMMON: dict[str, Any] = {"global_batch": 10, "task": "digits"}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3}


def config_of(**chosen: Any) -> Config:
    return Config(strategy="local-sgd", **{**COMMON, **chosen})


# Name, configuration, steps.
RUNS: dict[str, tuple[Config, int]] = {
    "sgd": (config_of(**SGD, local_steps=4), 8),
    "adamw": (config_of(**ADAMW, local_steps=4), 8),
    "post-local": (config_of(**SGD, local_steps=3, local_start=2), 6),
    "each step": (config_of(**SGD, local_steps=1), 6),
    "each step, micro-batches": (config_of(**SGD, local_steps=1, micro_batch=2), 6),
    "ended between": (config_of(**ADAMW, local_steps=4), 6),
    "statistics": (config_of(**SGD, local_steps=2, task=PICTURES), 4),
}

End = dict[str, Tensor]


def end_of(trainer: Trainer) -> End:
    state = {**trainer.strategy.model_state(), **trainer.optimizer.tensors()}
    return {name: tensor.clone() for name, tensor in state.items()}


def resumed(rank: int) -> tuple[End, End]:
    """Go on from what a checkpoint holds after step 4; give the state after step 8 of both."""
    rank_info = RankInfo(
        rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS, launched=True
    )
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    config, layout = RUNS["adamw"][0], Layout(dp_replicate=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        unbroken = trainer_of(config, layout, group, Path(folder))
        for _ in range(4):
            unbroken.train_step()
        again = trainer_of(config, layout, group, Path(folder))
        again.strategy.load_model_state(unbroken.strategy.model_state())
        moments = unbroken.optimizer.tensors()
        slots = {key: (tensor.shape, tensor.dtype) for key, tensor in moments.items()}
        for key, tensor in again.optimizer.allocate(slots).items():
            tensor.copy_(moments[key])
        again.progress.step = unbroken.progress.step
        again.progress.samples_seen = unbroken.progress.samples_seen
        for trainer in (unbroken, again):
            for _ in range(4):
                trainer.train_step()
        return end_of(unbroken), end_of(again)


def test_a_checkpoint_of_a_settled_step_holds_everything() -> None:
    for unbroken, again in on_ranks(RANKS, resumed):
        assert difference(unbroken, again) == 0.0


def trained(rank: int) -> dict[str, tuple[End, list[float]]]:
    """Make all runs; give the last state on this rank, and how far the ranks were apart by step."""
    rank_info = RankInfo(
        rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS, launched=True
    )
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, (config, steps) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(config, Layout(dp_replicate=RANKS), group, Path(folder))
            apart = []
            for step in range(1, steps + 1):
                trainer.train_step()
                state = end_of(trainer)
                others = group.gather(state)
                apart.append(max(difference(state, other) for other in others))
                assert trainer.strategy.settled(step) == (apart[-1] == 0.0)
            trainer.strategy.finish()
            found[name] = (end_of(trainer), apart)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[End, list[float]]]]:
    return on_ranks(RANKS, trained)


def difference(a: End, b: End) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@double_precision()
def simulated(config: Config, steps: int, copies: int) -> End:
    """The same by hand: some models with optimizers of their own, one after the other."""
    task = like_the_models(load(config.task))
    torch.manual_seed(config.seed)
    models = [task.model()]
    models += [copy.deepcopy(models[0]) for _ in range(copies - 1)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        if config.optimizer == "adamw"
        else torch.optim.SGD(
            model.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        for model in models
    ]
    data = task.train()
    order = SampleOrder(size=len(data), seed=config.seed)

    def state_of(number: int) -> End:
        names = {p: name for name, p in models[number].named_parameters()}
        slots = optimizers[number].state
        moments = {f"{names[p]}/{k}": v for p in names for k, v in slots[p].items()}
        return {**models[number].state_dict(), **moments}

    items = [0] * copies
    for step in range(1, steps + 1):
        numbers = order.positions((step - 1) * config.global_batch, step * config.global_batch)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            start, stop = share_of(config.global_batch, shard=number, shards=copies)
            batch = data.take(numbers[start:stop])  # type: ignore[union-attr]
            loss = task.loss(model(batch.inputs), batch.targets) / len(batch)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            items[number] += len(batch)
        if step % config.local_steps == 0 or step <= config.local_start or step == steps:
            states = [state_of(number) for number in range(copies)]
            for name, tensor in states[0].items():
                if tensor.is_floating_point():
                    parts = [s[name].double() * n for s, n in zip(states, items, strict=True)]
                    mean = torch.stack(parts).sum(0) / sum(items)
                    for state in states:
                        state[name].detach().copy_(mean)
            items = [0] * copies
    return {name: tensor.detach() for name, tensor in state_of(0).items()}


@pytest.mark.parametrize("name", RUNS)
def test_ranks_equal_a_simulation_of_separate_models(
    ranks: list[dict[str, tuple[End, list[float]]]], name: str
) -> None:
    expected = simulated(*RUNS[name], RANKS)
    for found, _ in (rank[name] for rank in ranks):
        assert difference(found, expected) <= CLOSE


@pytest.mark.parametrize("name", ["each step", "each step, micro-batches"])
def test_averaging_sgd_after_each_step_equals_one_process(
    ranks: list[dict[str, tuple[End, list[float]]]], name: str
) -> None:
    assert difference(ranks[1][name][0], simulated(*RUNS[name], 1)) <= CLOSE


def test_wrong_form_rare_averaging_is_not_one_process(
    ranks: list[dict[str, tuple[End, list[float]]]],
) -> None:
    assert difference(ranks[0]["sgd"][0], simulated(*RUNS["sgd"], 1)) > 1e-4


def test_ranks_agree_when_settled_and_only_then(
    ranks: list[dict[str, tuple[End, list[float]]]],
) -> None:
    agreed = {
        name: [step for step, far in enumerate(ranks[0][name][1], start=1) if far == 0.0]
        for name in RUNS
    }
    assert agreed == {
        "sgd": [4, 8],
        "adamw": [4, 8],
        "post-local": [1, 2, 3, 6],
        "each step": [1, 2, 3, 4, 5, 6],
        "each step, micro-batches": [1, 2, 3, 4, 5, 6],
        "ended between": [4],
        "statistics": [2, 4],
    }
    for name in RUNS:
        ends = [rank[name][0] for rank in ranks]
        assert max(difference(ends[0], end) for end in ends) == 0.0


def with_resting_experts(rank: int) -> dict[str, tuple[End, End, bool]]:
    """Train with experts; give the last state, that of one process, and whether experts rested."""
    rank_info = RankInfo(
        rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS, launched=True
    )
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, chosen in {
        "sgd": {**SGD, "local_steps": 1, "task": RESTING},
        "sgd, thawed": {**SGD, "local_steps": 1, "task": THAWING},
        "sgd, rarely": {**SGD, "local_steps": 3, "task": RESTING},
        "adamw, rarely": {**ADAMW, "local_steps": 3, "task": RESTING},
        "adamw, rarely, thawed": {**ADAMW, "local_steps": 3, "task": THAWING},
    }.items():
        config = config_of(**{**chosen, "global_batch": 6, "weight_decay": 0.1})
        alone = Alone(rank_info=RankInfo(), device=group.device)
        ends, rested = [], False
        for one, layout, ranks in (
            (config, Layout(dp_replicate=RANKS), group),
            (config_of_one_process(config), Layout(), alone),
        ):
            with tempfile.TemporaryDirectory() as folder:
                trainer = trainer_of(one, layout, ranks, Path(folder))
                for _ in range(6):
                    trainer.train_step()
                    # Averaging has given them a state by then.
                    states = group.gather(sorted(trainer.optimizer.tensors()))
                    rested |= any(state != states[0] for state in states)
                ends.append(end_of(trainer))
        found[name] = (ends[0], ends[1], rested)
    return found


def test_an_expert_that_no_sample_of_a_rank_reaches_is_averaged_with_the_others() -> None:
    ranks = on_ranks(RANKS, with_resting_experts)
    for name in ranks[0]:
        ends = [rank[name][0] for rank in ranks]
        assert max(difference(ends[0], end) for end in ends) == 0.0, name
    assert ranks[0]["adamw, rarely"][2], "a rank had no state of an expert"
    for name in ("sgd", "sgd, thawed"):
        mine, one, _ = ranks[0][name]
        assert difference(mine, one) <= CLOSE, name
    steps = {v.item() for key, v in ranks[0]["adamw, rarely"][0].items() if key.endswith("/step")}
    assert max(steps) == 6.0


def test_a_checkpoint_that_is_due_between_averages_is_written_after_the_next(
    start: Start, tmp_path: Path
) -> None:
    flags = ("--strategy=local-sgd", "--local-steps=8", "--checkpoint-every=20", "--steps=50")
    run = start.whole(2, *flags, run_dir=tmp_path / "run")
    saved = [event["step"] for event in run.events() if event["event"] == "checkpoint"]
    assert saved == [24, 40, 50]


def averaged(rank: int) -> list[tuple[list[float], float]]:
    found = []
    for items in ((1, 0), (0, 0)):
        with tempfile.TemporaryDirectory() as folder:
            chosen: dict[str, Any] = {"strategy": "local-sgd", "local_steps": 1}
            strategy: Any = trainer_for(rank, 2, Path(folder), **chosen).strategy
            strategy.model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            with torch.no_grad():
                strategy.model[0].bias[0] = 1.0 + rank
            strategy._items = items[rank]
            strategy._average()
            found.append((strategy.model.mask.tolist(), strategy.model[0].bias[0].item()))
    return found


def test_ranks_without_items_spoil_no_average() -> None:
    mask = [0.0, -torch.inf]
    assert on_ranks(2, averaged) == [[(mask, 1.0), (mask, 1.5)]] * 2
