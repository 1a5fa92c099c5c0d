"""The promise of train/: every training equals that of one process, or is refused by name.

`make property` draws as many as wanted; here are a few, and the ones that have failed once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.train.promise.check import (
    LAYOUTS,
    Draw,
    Layout,
    by_plain_torch,
    distance,
    draw,
    judge,
    possible,
    shown,
)
from tests.train.promise.grammar import FEATURES, LOSSES, Model, source_of
from tests.train.promise.pool import Pool

FIRST, COUNT = 1000, 12


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("count", [COUNT, pytest.param(200, marks=pytest.mark.slow)])
def test_what_is_trained_equals_plain_torch_or_is_refused_by_name(pool: Pool, count: int) -> None:
    kept = Counter[str]()
    for seed in range(FIRST, FIRST + count):
        judged = judge(one := draw(seed), pool)
        assert not judged.broken, shown(one, judged)
        kept[judged.kept] += 1
    # Neither of both for want of trying.
    assert kept["equal"] > count / 3 and kept["refused"] > 0, kept


def layout_of(*flags: str) -> int:
    return next(n for n, layout in enumerate(LAYOUTS) if layout.flags == flags)


THREE = ("--micro-batch", "3")
ZERO_BUBBLE = ("--pp", "2", "--pp-schedule", "ZBVZeroBubble", *THREE)
FAILED_ONCE = {
    "a hang where one rank alone refuses": (
        ("view of a weight", "hook on a layer's input"), ZERO_BUBBLE, "refused",
    ),
    "a buffer that moves under micro-batches": (
        ("own function", "scale by step"), ZERO_BUBBLE, "refused",
    ),
    "a write in a stage whose ranks keep the parameters gathered": (
        ("clamped weight",), ("--pp", "2", "--pp-schedule", "GPipe", *THREE, "--dp-replicate", "2"),
        "refused",
    ),
    "a layer that normalises by the batch, in a pass of one sample": (
        ("batch norm without statistics",), ("--pp", "2", "--pp-schedule", "1F1B", *THREE),
        "refused",
    ),
    "an activation that a recomputed pass remembers": (
        ("remembered activation", "own function"), ("--activation-checkpointing",), "equal",
    ),
    "numbers of random and numpy that are drawn again": (
        ("noise", "numpy noise"), ("--activation-checkpointing",), "equal",
    ),
    "a stage's output that is not contiguous": (
        ("output that is not contiguous",), ZERO_BUBBLE, "equal",
    ),
    "stages that tensor parallelism splits": (
        (), ("--pp", "2", "--pp-schedule", "1F1B", *THREE, "--tp", "2"), "equal",
    ),
    "a model that needs numbers on meta": (
        ("orthogonal",), ("--strategy", "fsdp", "--meta-init"), "refused",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED_ONCE)
def test_what_a_draw_has_failed_of_once_does_not_come_again(name: str, pool: Pool) -> None:
    features, flags, wanted = FAILED_ONCE[name]
    model = Model(blocks=(("mlp",), ("layer norm", *features), ("mlp",), ("linear",)))
    judged = judge(Draw(model=model, layout=LAYOUTS[layout_of(*flags)]), pool)
    assert (judged.kept, judged.broken) == (wanted, ""), judged.output


@pytest.mark.parametrize("loss", ["sum", "reads weights"])
def test_a_sparse_layer_trains_behind_others_and_where_the_loss_reads_it(
    loss: str, pool: Pool
) -> None:
    model = Model(blocks=(("mlp",), ("sparse embedding",)), loss=loss)
    judged = judge(Draw(model=model, layout=LAYOUTS[layout_of("--strategy", "ddp")]), pool)
    assert judged.kept == "equal", judged


def test_stages_with_a_part_of_each_sequence_need_no_model_on_meta(pool: Pool) -> None:
    model = Model(blocks=(("attention",), ("mlp", "orthogonal")), time=True)
    layout = layout_of("--pp", "2", "--pp-schedule", "1F1B", *THREE, "--cp", "2")
    judged = judge(Draw(model=model, layout=LAYOUTS[layout]), pool)
    assert judged.kept == "equal", judged


def test_a_branch_on_the_batch_is_named_before_a_part_of_it_decides_otherwise(pool: Pool) -> None:
    model = Model(blocks=(("layer norm",), ("mlp",), ("linear", "branch on data")), inputs="pair")
    layout = layout_of("--strategy", "fsdp", "--meta-init")
    judged = judge(Draw(model=model, layout=LAYOUTS[layout]), pool)
    assert re.search(r"branches on a value of its batch .* layer-mixes-samples", judged.output), (
        judged
    )


def test_naming_the_dropout_layers_leaves_a_model_that_the_task_holds_alone(pool: Pool) -> None:
    model = Model(blocks=(("linear", "no dropout"),), loss="reads weights")
    judged = judge(Draw(model=model, layout=Layout(ranks=1, flags=("--dropout", "0.0"))), pool)
    assert judged.kept == "equal", judged


def test_everything_is_drawn() -> None:
    draws = [draw(seed) for seed in range(2000)]
    assert {name for one in draws for name in one.model.features} == FEATURES.keys()
    assert {one.model.loss for one in draws} == LOSSES.keys()
    assert {one.layout for one in draws} == {*LAYOUTS}


def test_a_difference_is_found_and_the_model_made_small() -> None:
    """Plain torch with another model than was trained is told apart."""
    model = Model(blocks=(("linear", "hook on a parameter"), ("mlp", "constant")), inputs="dict")
    one = Draw(model=model, layout=LAYOUTS[0])
    plain = replace(one, model=replace(model, blocks=(("linear", "slice of a weight"),)))
    right, wrong = (by_plain_torch(each, source_of(each.model)) for each in (one, plain))
    assert distance(right, right.losses, right.end) == 0.0
    assert distance(right, wrong.losses, right.end) > 1e-3
    smaller = list(model.simpler())
    assert all(len(source_of(each)) < len(source_of(model)) for each in smaller)
    assert all(possible(replace(one, model=each)) for each in smaller)
