"""Kinds of models that strategies once trained otherwise: now as in one process, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.support import kinds
from tests.train.support.ladder import STEPS, merged, weights_of
from tests.train.support.making import group_of, trainer_for
from tests.train.support.ranks import on_ranks
from train.data.loader import source_of
from train.errors import UsageError
from train.model import recomputation
from train.model.batchnorm import SynchronisedBatchNorm, synchronised
from train.model.modes import settle
from train.parallel.consistency import check_data

FILE = Path(kinds.__file__)
# Double precision has 2.2e-16; what was wrong was off by 1e-4 and more.
MOST = 1e-9
COMMON: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "global_batch": 12}
DDP = {"strategy": "ddp"}
FSDP = {"strategy": "fsdp"}
META = {"strategy": "fsdp", "meta_init": True}
EXACT = {"strategy": "ddp", "reduce": "exact", "virtual_shards": 4}
TP = {"strategy": "tp"}
PP = {"strategy": "pp", "micro_batch": 3}
ZB = {**PP, "pp_schedule": "ZBVZeroBubble"}
RIGHT = ""

Case = tuple[str, dict[str, Any], str]
"""Task, options, and the message that refuses it; '' where it trains as one process does."""

HOOKED = r".*parameter 'first\.0\.weight' has a hook \(register_\w+\(\)\), which would never run.*"
HELD = r".*{} '{}' beside its module, and would keep the initial values forever.*"
LIST = HELD.format("attribute 'list' of module 'middle.0' refers to", "middle.0.weight")
CLOSURE = HELD.format("closure.* refers to", "middle.0.weight")
VIEW = HELD.format("attribute 'held' of module 'middle.0' refers to", "middle.0.weight")
MEMORY = HELD.format("attribute 'held' .* shares the memory of", "middle.0.weight")
WRITTEN = r".*in step {} forward\(\) of its model writes middle\.0\.\w+, {}.*"
GATHERED = (
    r".*in step {} forward\(\) of its model writes middle\.0\.\w+ "
    r"\(ranks gather copies of it and drop them.*"
)

TWO: list[Case] = [
    *(("Kind", how, RIGHT) for how in (DDP, FSDP, META, EXACT, TP, PP, ZB)),
    # Hooks on parameters that are replaced.
    *((task, how, RIGHT) for task in ("Masked", "Accumulated") for how in (DDP, EXACT, PP)),
    *((task, how, HOOKED) for task in ("Masked", "Accumulated") for how in (FSDP, TP)),
    ("Masked", META, HOOKED),
    # Parameters that are held beside their module.
    *((task, how, RIGHT) for task in ("Listed", "Closed", "Viewed") for how in (DDP, EXACT, PP)),
    *(
        (task, how, words)
        for how in (FSDP, META)
        for task, words in (
            ("Listed", LIST), ("Closed", CLOSURE), ("Viewed", VIEW), ("InMemory", MEMORY),
        )
    ),
    *((task, ZB, RIGHT) for task in ("Listed", "Closed")),
    ("Viewed", ZB, r".* a view of 'middle\.0\.weight' that was made with the model.*"),
    *(
        ("Lent", how, r".* uses 'first\.0\.bias', which another stage holds.*")
        for how in (PP, ZB)
    ),
    # Layers that only evaluate.
    *(
        (task, how, RIGHT)
        for task in ("Evaluating", "OwnTrain")
        for how in (DDP, FSDP, EXACT, PP)
    ),
    # Buffers that forward() moves.
    *((task, how, RIGHT) for task in ("Replaced", "Moved") for how in (DDP, FSDP, EXACT)),
    ("InPython", DDP, RIGHT),
    *(
        (task, {**how, "activation_checkpointing": True}, RIGHT)
        for task in ("Replaced", "Moved", "InPython")
        for how in (DDP, FSDP)
    ),
    *(
        ("CountedLate", how, r".* buffer 'middle\.0\.count' holds whole numbers that differ .*")
        for how in (DDP, FSDP)
    ),
    ("CountedLate", EXACT, r".* writes middle\.0\.count, whole numbers, in each virtual shard .*"),
    # A loss that reads the model's weights, or a teacher's.
    *(("Decayed", how, RIGHT) for how in (DDP, EXACT)),
    *(("Annealed", how, RIGHT) for how in (DDP, FSDP)),
    *(
        ("Decayed", how, r".*loss\(\) of task 'kind' reads parameter '\w+\.[\w.]+' of the model.*")
        for how in (FSDP, TP, PP, ZB)
    ),
    *(("Taught", how, RIGHT) for how in (FSDP, PP)),
    # Layers that are trained from some step on.
    ("Thawed", FSDP, RIGHT),
    *(
        (task, how, r".* first\.0\.bias, first\.0\.weight of task 'kind' was frozen when the .*")
        for task, how in (("ThawedLater", DDP), ("Thawed", EXACT))
    ),
    # Dropout of what is cut.
    ("DroppedByFunction", TP, r"--tp 2: layer 'first\.2' \(_Functional\) of task 'kind' drops .*"),
    # Parameters that forward() writes.
    *((task, how, RIGHT) for task in ("Clamped", "ThroughData") for how in (DDP, EXACT, TP)),
    *((task, how, RIGHT) for task in ("Followed", "AtFirst", "Later") for how in (DDP, TP)),
    *(
        (task, FSDP, GATHERED.format(step))
        for task, step in (
            ("Clamped", 1), ("ThroughData", 1), ("Followed", 1), ("BySamples", 1),
            ("AtFirst", 1), ("Later", 2),
        )
    ),
    ("BySamples", DDP, WRITTEN.format(1, "on each rank by its own samples")),
    *(
        (task, how, WRITTEN.format("[12]", "once in each of the step's passes, each time"))
        for task in ("Followed", "BySamples")
        for how in (EXACT, {**DDP, "micro_batch": 2})
    ),
    *(
        (task, {**DDP, "activation_checkpointing": True}, RIGHT)
        for task in ("Clamped", "ThroughData", "Followed", "AtFirst")
    ),
    (
        "Later", {**DDP, "activation_checkpointing": True},
        r".* forward\(\) writes parameter '0\.weight' of 'middle' now, and has not in the first.*",
    ),
    *(
        ("Grown", how, r".*after step \d its model has .*, such as 'middle\.0\.extra'.*")
        for how in (DDP, FSDP, PP)
    ),
    ("Clamped", PP, r".* writes middle\.0\.weight, between the forward and the backward passes.*"),
]  # fmt: skip


def outcome(
    rank: int, ranks: int, folder: Path, task: str, chosen: dict[str, Any]
) -> tuple[str, dict[str, Tensor], list[float]]:
    """The refusal, or weights and losses after some steps."""
    try:
        config = {**COMMON, **chosen, "task": f"{FILE}:{task}"}
        trainer = trainer_for(rank, ranks, folder, **config)
        trainer.resume()
        # Replicas are compared after each step, not every so many.
        trainer.saver.watch.due = lambda step: True  # type: ignore[method-assign]
        if ranks > 1:
            # Leaves no trace.
            trainer.measure()
        losses = []
        for _ in range(STEPS):
            trainer.train_step()
            losses.append(trainer.progress.metrics["loss"])
        trainer.saver.watch.compare(trainer.progress)
    except UsageError as error:
        return str(error), {}, []
    return "", merged(trainer.group, weights_of(trainer)), losses


def all_of(rank: int, ranks: int, cases: list[Case], folder: Path) -> list[str]:
    """What is wrong with each case on this rank; '' of those that are right."""
    torch.set_default_dtype(torch.float64)
    found, alone = [], {}
    for number, (task, chosen, _) in enumerate(cases):
        text, weights, losses = outcome(rank, ranks, folder / str(number), task, chosen)
        if not text and rank == 0:
            if task not in alone:
                alone[task] = outcome(0, 1, folder / f"{number}-alone", task, {})
            _, expected, its_losses = alone[task]
            far = max(
                *(abs(a - b) for a, b in zip(losses, its_losses, strict=True)),
                *(float((weights[name] - t).abs().max()) for name, t in expected.items()),
            )
            text = f"differs by {far}" if not far < MOST else ""
        found.append(text)
    return found


FSDP_RECOMPUTED = {**FSDP, "activation_checkpointing": True}
DDP_RECOMPUTED = {**DDP, "activation_checkpointing": True}
# What several strategies share, several kinds of models need not show; and what several kinds
# share, several strategies need not.
SHARED: dict[str, tuple[dict[str, Any], ...]] = {
    # The ladder trains such a net by all strategies.
    "Kind": (DDP, FSDP, META, EXACT, TP, PP, ZB),
    "Masked": (EXACT, PP, META),
    "Accumulated": (EXACT, PP),
    "InMemory": (META,),
    "Listed": (FSDP, META, EXACT, PP),
    "Closed": (META, EXACT, PP, ZB),
    "Viewed": (META, EXACT, PP),
    "OwnTrain": (FSDP, EXACT, PP),
    **dict.fromkeys(("Replaced", "Moved", "InPython"), (FSDP_RECOMPUTED,)),
    **dict.fromkeys(("CountedLate", "Grown", "Annealed"), (FSDP,)),
    "Clamped": (EXACT, DDP_RECOMPUTED),
    "ThroughData": (EXACT, TP),
    "Followed": (FSDP, TP),
    "BySamples": (FSDP,),
    "AtFirst": (FSDP, TP, DDP_RECOMPUTED),
    "Later": (TP,),
}
AGAIN = [(task, how, words) for task, how, words in TWO if how in SHARED.get(task, ())]


EACH = [case for case in TWO if case not in AGAIN]


def everything(
    rank: int, folder: Path
) -> tuple[list[str], list[str], tuple[list[Tensor], list[Tensor]]]:
    """What the tests of the gate look at, in one start of the ranks."""
    return all_of(rank, 2, EACH, folder), refusals_of_data(rank), masks(rank, folder / "masks")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(2, everything, tmp_path_factory.mktemp("kinds"))


def check(cases: list[Case], every: list[list[str]]) -> None:
    for rank, found in enumerate(every):
        wrong = [
            f"{task} {chosen} on rank {rank}: {text or 'trained'}"
            for (task, chosen, words), text in zip(cases, found, strict=True)
            if not re.fullmatch(words, text, re.DOTALL)
        ]
        assert not wrong, "\n".join(wrong)


def test_two_ranks_train_each_kind_as_one_process_or_refuse_it(seen: list[Any]) -> None:
    check(EACH, [kinds for kinds, _, _ in seen])


@pytest.mark.slow
def test_more_strategies_train_each_kind_so(tmp_path: Path) -> None:
    check(AGAIN, on_ranks(2, all_of, 2, AGAIN, tmp_path))


def test_a_loaded_model_that_evaluates_as_a_whole_trains_as_a_whole() -> None:
    model = kinds.Net()
    assert settle(model.eval()) == []
    assert all(module.training for module in model.modules())


def test_an_evaluation_leaves_layers_in_the_modes_that_the_task_has_set(tmp_path: Path) -> None:
    trained = []
    for evaluated in (False, True):
        config = {**COMMON, "task": f"{FILE}:OwnTrain", "strategy": "single"}
        trainer = trainer_for(0, 1, tmp_path / str(evaluated), **config)
        trainer.resume()
        if evaluated:
            trainer.measure()
        for _ in range(2):
            trainer.train_step()
        trained.append(trainer.strategy.model_state())
    assert trainer.strategy.evaluating == ["middle.2"]
    assert not trained[0]["middle.2.running_mean"].any()
    for name, tensor in trained[0].items():
        assert torch.equal(tensor, trained[1][name]), name


@pytest.mark.parametrize("large", [False, True])
def test_a_repetition_starts_from_what_the_first_pass_saw(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(recomputation, "SMALL", 0 if large else recomputation.SMALL)
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        layer = kinds.Moving("moved").double()
        if again:
            recomputation.recompute(layer)
        for _ in range(3):
            layer.zero_grad()
            layer(torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(3, 8)).sum().backward()
        gradients.append((layer.weight.grad, layer.mean))
    for plain, repeated in zip(*gradients, strict=True):
        assert plain is not None and repeated is not None
        assert torch.equal(plain, repeated)


def test_a_large_buffer_that_moves_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "SMALL", 0)
    layer = kinds.Moving("counted")
    recomputation.recompute(layer)
    inputs = torch.ones(2, kinds.WIDTH)
    for _ in range(2):
        layer(inputs).sum().backward()
    with pytest.raises(UsageError, match="buffer 'count' of a Moving has not moved in the first"):
        layer(inputs)


def refusals_of_data(rank: int) -> list[str]:
    numbers = [float(n) for n in range(20)]
    pairs: list[tuple[kinds.Pairs, kinds.Pairs]] = [
        (kinds.Pairs(*numbers), kinds.Pairs(*numbers, noise=True)),
        (kinds.Pairs(*numbers[rank::2]), kinds.Pairs(*numbers)),
        (kinds.Pairs(*numbers), kinds.Pairs(*numbers[rank:])),
        (kinds.Pairs(*numbers[rank:]), kinds.Pairs(*numbers)),
    ]
    found = []
    for train, test in pairs:
        text = ""
        try:
            one, other = (source_of(data, task="pairs") for data in (train, test))
            check_data(one, other, group_of(rank, 2), task="pairs")
        except UsageError as error:
            text = str(error)
        found.append(text)
    return found


def test_a_dataset_that_is_cut_by_rank_is_refused(seen: list[Any]) -> None:
    given = "task 'pairs': the ranks were given different data: "
    for _, (same, cut, shorter, longer), _ in seen:
        assert same == ""
        assert cut.startswith(f"{given}samples of the training data (tensor 0);")
        assert shorter.startswith(f"{given}the number of test samples;")
        assert longer.startswith(f"{given}the number of training samples;")


def masks(rank: int, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """What two dropout layers keep in the second step, of a run and of one that resumes there."""
    found: list[list[Tensor]] = []
    for number in range(2):
        config = {**COMMON, **TP, "task": f"{FILE}:Dropped"}
        trainer = trainer_for(rank, 2, folder / str(number), **config)
        trainer.resume()
        if number == 0:
            trainer.train_step()
        trainer.progress.step, trainer.progress.samples_seen = 1, 12
        kept: list[Tensor] = []
        for name in ("first.2", "third.2"):
            layer = trainer.strategy.modules()[0].get_submodule(name)
            layer.register_forward_hook(lambda *given, kept=kept: kept.append(given[2] != 0))
        trainer.train_step()
        found.append(kept)
    return found[0], found[1]


def test_ranks_that_hold_other_units_drop_other_places(seen: list[Any]) -> None:
    (*_, (first, resumed)), (*_, (other, _)) = seen
    assert first[0].shape == (12, kinds.WIDTH // 2)
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[1], other[1])
    assert all(map(torch.equal, first, resumed))


def test_a_normalisation_that_something_else_refers_to_is_not_replaced() -> None:
    hooked, held = nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.BatchNorm1d(2))
    hooked[0].register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    held.layers = [held[0]]  # type: ignore[assignment]
    with pytest.raises(UsageError, match="layer '0', and would lose its hooks"):
        synchronised(hooked)
    with pytest.raises(UsageError, match="layer '0', but a list, a dict or a closure still"):
        synchronised(held)
    (made,) = synchronised(nn.Sequential(nn.BatchNorm1d(2))).children()
    assert isinstance(made, SynchronisedBatchNorm)
