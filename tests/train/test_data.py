"""The order of the data: a function of (seed, epoch); and how batches are read and cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from train.data import Batch, Order, permutation, share_of, source_of, targets_of
from train.errors import UsageError
from train.reading import Feed, Reader

sizes = st.integers(1, 200)
shard_counts = st.integers(1, 9)
PINNED = (
    [9, 8, 2, 0, 6, 1, 4, 7, 3, 5],
    [6, 5, 2, 9, 0, 8, 4, 3, 7, 1],
    [8, 9, 3, 4, 6, 0, 5, 7, 1, 2],
)


def drawn(order: Order, seen: int, batch: int, shards: int) -> list[int]:
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
        order = Order(size=size, seed=seed)
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
    order = Order(size=size, seed=3)
    everything = Batch(
        inputs=torch.arange(size).float().unsqueeze(1), targets=torch.arange(size) ** 2
    )
    for shard in range(2):

        def feed(source: Batch | Reader, shard: int = shard) -> Feed:
            return Feed(source, order, global_batch=batch, shard=shard, shards=2)

        randomness = torch.get_rng_state()
        expected = drawn_by(feed(everything), range(6), batch)
        reading = feed(Reader(Squares(size), workers=workers))
        assert drawn_by(reading, range(4), batch) == expected[:4]
        # A new process, or a step back to a checkpoint: nothing that was read ahead may be used.
        assert drawn_by(reading, range(2, 6), batch) == expected[2:]
        reading.close()
        # What the model draws, for its dropout, must not depend on who reads, or from where on.
        assert torch.get_rng_state().equal(randomness)


def test_only_what_is_asked_for_is_read() -> None:
    squares = Squares(1000)
    feed = Feed(Reader(squares), Order(size=1000, seed=0), global_batch=4, shard=1, shards=2)
    feed.batch(0)
    assert squares.read == feed.numbers(0).tolist()


def test_an_empty_draw_of_a_data_set_has_the_shape_of_others() -> None:
    batch = Reader(Squares(5)).take(torch.arange(0))
    assert batch.inputs.shape == (0, 1)
    assert batch.targets.dtype == torch.int64


def test_targets_are_found_with_and_without_an_attribute() -> None:
    assert targets_of(Squares(4)).tolist() == [0, 1, 4, 9]
    assert targets_of(Batch(inputs=torch.zeros(2), targets=torch.ones(2))).tolist() == [1.0, 1.0]


def test_data_that_cannot_be_drawn_from_is_refused() -> None:
    with pytest.raises(UsageError, match=r"of type generator, which has no numbered samples"):
        source_of(i for i in range(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the training data is empty"):
        Order(size=0, seed=0)
