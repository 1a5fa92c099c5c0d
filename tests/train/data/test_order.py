"""The order of the data: a function of (seed, epoch); and how batches are read and cut."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from train.data.loader import DatasetReader, Feed, source_of
from train.data.order import Batch, SampleOrder, permutation, share_of, targets_of
from train.errors import UsageError
from train.model import trees
from train.model.trees import Tree
from train.tasks import Task, load

sizes = st.integers(1, 200)
shard_counts = st.integers(1, 9)
PINNED = (
    [9, 8, 2, 0, 6, 1, 4, 7, 3, 5],
    [6, 5, 2, 9, 0, 8, 4, 3, 7, 1],
    [8, 9, 3, 4, 6, 0, 5, 7, 1, 2],
)


def drawn(order: SampleOrder, seen: int, batch: int, shards: int) -> list[int]:
    """One global batch as its ranks draw it, one after the other."""
    parts = [order.share(seen, batch, shard=shard, shards=shards) for shard in range(shards)]
    return [int(number) for part in parts for number in part]


@given(size=sizes, seed=st.integers(0, 5), batch=st.integers(1, 50), data=st.data())
def test_every_epoch_draws_each_sample_once_however_the_ranks_change(
    size: int, seed: int, batch: int, data: st.DataObject
) -> None:
    stream: list[int] = []
    while len(stream) < 2 * size:
        # A restart at every step: a new order object, another number of ranks.
        order = SampleOrder(size=size, seed=seed)
        stream += drawn(order, len(stream), batch, data.draw(shard_counts))
    for epoch in range(2):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert stream[epoch * size : (epoch + 1) * size] == permutation(size, seed, epoch).tolist()


def test_order_is_pinned() -> None:
    """A change of this would silently continue old runs with other samples."""
    assert permutation(10, seed=0, epoch=0).tolist() == PINNED[0]
    assert permutation(10, seed=0, epoch=1).tolist() == PINNED[1]
    assert permutation(10, seed=1, epoch=0).tolist() == PINNED[2]


@given(count=st.integers(0, 100), shards=shard_counts)
def test_shares_are_a_partition_without_padding(count: int, shards: int) -> None:
    shares = [share_of(count, shard=shard, shards=shards) for shard in range(shards)]
    assert [i for a, b in shares for i in range(a, b)] == list(range(count))
    assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1


@given(size=st.integers(0, 60), count=st.integers(1, 20))
def test_nearly_even_micro_batches_are_the_batch(size: int, count: int) -> None:
    batch = Batch(inputs=torch.arange(size), targets=torch.arange(size))
    parts = batch.split_into(count)
    assert torch.cat([part.inputs for part in parts]).equal(batch.inputs)
    assert len(parts) == count
    assert max(map(len, parts)) == math.ceil(size / count)
    assert min(map(len, parts)) == size // count


def test_an_empty_batch_adds_nothing() -> None:
    outputs = torch.randn(0, 10, requires_grad=True)
    weight = torch.randn(10, 4, requires_grad=True)
    loss = functional.cross_entropy(
        outputs @ weight, torch.zeros(0, dtype=torch.int64), reduction="sum"
    )
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


class Squares:
    """A data set as torch defines one: a length and items."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.read.append(index)
        return torch.tensor([float(index)]), index**2


def drawn_by(feed: Feed, steps: range, global_batch: int) -> list[list[int]]:
    batches = [feed.batch(step * global_batch) for step in steps]
    assert all(b.targets.equal(b.inputs.squeeze(1).long() ** 2) for b in batches)
    return [[int(number) for number in batch.inputs] for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_read_in_the_same_order_and_resumed_at_the_next_sample(workers: int) -> None:
    size, batch = 11, 4
    order = SampleOrder(size=size, seed=3)
    everything = Batch(
        inputs=torch.arange(size).float().unsqueeze(1), targets=torch.arange(size) ** 2
    )
    for shard in range(2):

        def feed(source: Batch | DatasetReader, shard: int = shard) -> Feed:
            return Feed(source, order, global_batch=batch, shard=shard, shards=2)

        randomness = torch.get_rng_state()
        expected = drawn_by(feed(everything), range(6), batch)
        reading = feed(DatasetReader(Squares(size), workers=workers))
        assert drawn_by(reading, range(4), batch) == expected[:4]
        # A new process, or a step back to a checkpoint: nothing that was read ahead may be used.
        assert drawn_by(reading, range(2, 6), batch) == expected[2:]
        reading.close()
        # The model's random numbers, for its dropout, must not depend on the reader or the start.
        assert torch.get_rng_state().equal(randomness)


def test_only_what_is_asked_for_is_read() -> None:
    squares = Squares(1000)
    feed = Feed(
        DatasetReader(squares), SampleOrder(size=1000, seed=0), global_batch=4, shard=1, shards=2
    )
    feed.batch(0)
    assert squares.read == feed.numbers(0).tolist()


def test_an_empty_draw_of_a_data_set_has_the_shape_of_others() -> None:
    batch = DatasetReader(Squares(5)).take(torch.arange(0))
    assert batch.inputs.shape == (0, 1)
    assert batch.targets.dtype == torch.int64


def test_targets_are_found_with_and_without_an_attribute() -> None:
    assert targets_of(Squares(4)).tolist() == [0, 1, 4, 9]
    assert targets_of(Batch(inputs=torch.zeros(2), targets=torch.ones(2))).tolist() == [1.0, 1.0]


def tree(size: int) -> Batch:
    return Batch(
        inputs={"image": torch.arange(2 * size).view(size, 2), "marks": [(torch.ones(size),)]},
        targets=Pair(torch.arange(size), torch.arange(size).double()),
    )


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_a_batch_of_trees_is_cut_and_drawn_from_like_one_of_tensors() -> None:
    batch = tree(5)
    numbers = torch.tensor([3, 0])
    drawn = batch.take(numbers)
    assert len(batch) == 5 and len(drawn) == 2
    assert drawn.inputs["image"].equal(batch.inputs["image"][numbers])
    assert isinstance(drawn.targets, Pair) and drawn.targets.second.tolist() == [3.0, 0.0]
    parts = batch.split_into(3)
    assert [len(part) for part in parts] == [1, 2, 2]
    whole = trees.joined([part.inputs for part in parts])
    assert whole["image"].equal(batch.inputs["image"])
    assert isinstance(whole["marks"][0], tuple)
    # Without copying.
    assert batch.part(1, 3).inputs["image"].data_ptr() == batch.inputs["image"][1:].data_ptr()
    assert not batch.zeros().targets.first.any() and len(batch.zeros()) == 5
    assert batch.to(torch.device("meta")).inputs["marks"][0][0].is_meta
    # One tensor and one tree.
    mixed = Batch(inputs=torch.arange(5), targets={"kind": torch.arange(5)}).take(numbers)
    assert mixed.inputs.tolist() == mixed.targets["kind"].tolist() == [3, 0]


class Records:
    """A data set of dicts of any form, by number."""

    def __init__(self, give: Callable[[int], object]) -> None:
        self.give = give

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.give(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_of_dicts_is_put_together_leaf_by_leaf(workers: int) -> None:
    records = Records(lambda n: ({"x": [float(n)] * 2, "n": n}, (n, {"y": torch.tensor(n)})))
    reader = DatasetReader(records, workers=workers)
    (batch,) = reader.read([torch.tensor([2, 1, 3])])
    assert len(batch) == 3
    assert [row.tolist() for row in batch.inputs["x"]] == [[2.0, 1.0, 3.0]] * 2
    assert batch.targets[1]["y"].tolist() == batch.inputs["n"].tolist() == [2, 1, 3]
    nothing = reader.take(torch.arange(0))
    assert len(nothing) == 0 and nothing.targets[1]["y"].dtype == torch.int64


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"x": 1.0, "y": 2.0},
            "a sample of its data is a dict of 2, but must be a pair (input, target); several "
            "inputs are one dict, list or tuple in it",
        ),
        ((1.0, 2.0, 3.0), "a sample of its data is a tuple of 3, but must be a pair"),
        (torch.zeros(2), "a sample of its data is a Tensor of 2, but must be a pair"),
        (
            ({"image": 1.0, "note": ["a"]}, 1),
            f"inputs['note'][0][0] of its data is of type str; {trees.ONLY}: make a tensor of it, "
            "or leave it out",
        ),
        ((1.0, None), "samples of its data make no batch: default_collate: batch must contain"),
        ((1.0, {}), f"targets of its data hold no tensor ({{}}); {trees.ONLY}, at least one"),
    ],
    ids=["dict", "three", "tensor", "text", "none", "empty"],
)
def test_a_sample_that_is_no_pair_of_tensors_is_refused_by_its_part(
    sample: object, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^task 'mine': {re.escape(message)}"):
        # Of two samples, two names of a dict would pass for inputs and targets.
        source_of(Records(lambda n: sample), task="mine").take(torch.arange(2))


def test_samples_of_another_form_than_the_first_are_refused() -> None:
    def give(number: int) -> object:
        return ({"a": 1.0, "b": 2.0} if number < 2 else {"a": 1.0}), number

    reader = DatasetReader(Records(give))
    reader.take(torch.arange(2))
    with pytest.raises(ValueError, match=re.escape("than the first one was: inputs['a'] [2]")):
        reader.take(torch.arange(2, 4))


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (
            {"image": torch.zeros(3), "ids": [1, 2, 3]},
            torch.zeros(3),
            f"inputs['ids'][0] of its data is of type int; {trees.ONLY}: make a tensor of it, or "
            "leave it out",
        ),
        (
            {"image": torch.zeros(3), "mask": None},
            torch.zeros(3),
            f"inputs['mask'] of its data is of type NoneType; {trees.ONLY}: make a tensor of it, "
            "or leave it out",
        ),
        (
            torch.zeros(3),
            Pair(torch.zeros(3), torch.zeros(2)),
            "its data hold 3 samples of inputs, but 2 of targets.second: give one of each for "
            "every sample",
        ),
        (
            {},
            torch.zeros(3),
            f"inputs of its data hold no tensor ({{}}); {trees.ONLY}, at least one",
        ),
        (
            [torch.zeros(3), torch.tensor(1.0)],
            torch.zeros(3),
            "inputs[1] of its data is a single number; the first dimension of every tensor is the "
            "sample: give a number for each",
        ),
    ],
    ids=["numbers", "none", "lengths", "empty", "scalar"],
)
def test_a_batch_whose_leaves_are_not_one_row_per_sample_is_refused_by_the_leaf(
    inputs: Tree, targets: Tree, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^task 'mine': {re.escape(message)}$"):
        source_of(Batch(inputs=inputs, targets=targets), task="mine")


def test_samples_are_counted_and_not_the_names_of_a_dict() -> None:
    task = load("digits")
    targets = {"box": torch.zeros(5, 4), "kind": torch.zeros(5)}
    assert Task.count(task, targets) == 5
    assert Task.score(task, torch.zeros(5), targets).shape == (0,)


def test_targets_that_name_no_class_are_refused_with_a_way_out() -> None:
    for samples in (
        Batch(inputs=torch.zeros(2), targets={"kind": torch.zeros(2)}),
        Records(lambda n: (n, {"kind": n})),
    ):
        with pytest.raises(UsageError, match=r"weights\(\) in the task, or leave out --sampling"):
            targets_of(samples)


def test_data_that_cannot_be_drawn_from_is_refused() -> None:
    with pytest.raises(UsageError, match=r"of type generator, which has no numbered samples"):
        source_of(i for i in range(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the training data is empty"):
        SampleOrder(size=0, seed=0)
