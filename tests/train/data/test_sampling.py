"""Imbalanced classes: sampled over all ranks as by one; and the forms that do it wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from tests.train.support.datasets import SHUTTLE, there
from train.data.loader import Feed
from train.data.order import SampleOrder, weighted_draws
from train.errors import UsageError
from train.tasks.base import class_weights
from train.tasks.shuttle import Shuttle

WEIGHTS = torch.tensor([1.0, 0.0, 4.0, 2.0, 1.0])
PINNED = ([2, 2, 0, 3, 4], [2, 2, 3, 2, 3])


def drawn(order: SampleOrder, seen: int, batch: int, shards: int) -> list[int]:
    """One global batch as its ranks draw it, one after the other."""
    parts = [order.share(seen, batch, shard=shard, shards=shards) for shard in range(shards)]
    return [int(number) for part in parts for number in part]


@given(batch=st.integers(1, 12), data=st.data())
def test_weighted_draws_are_one_stream_however_the_ranks_change(
    batch: int, data: st.DataObject
) -> None:
    stream: list[int] = []
    while len(stream) < 15:
        # A restart at every step: a new order object, another number of ranks.
        order = SampleOrder(size=5, seed=7, weights=WEIGHTS)
        stream += drawn(order, len(stream), batch, data.draw(st.integers(1, 6)))
    expected = torch.cat([weighted_draws(WEIGHTS, 7, epoch) for epoch in range(3)])
    assert stream[:15] == expected.tolist()


def test_weighted_draws_are_pinned() -> None:
    """A change of this would silently continue old runs with other samples."""
    assert weighted_draws(WEIGHTS.double(), 0, 0).tolist() == PINNED[0]
    assert weighted_draws(WEIGHTS.double(), 0, 1).tolist() == PINNED[1]


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    size = 40_000
    draws = weighted_draws(WEIGHTS.repeat(size // 5).double(), seed=0, epoch=0)
    shares = torch.bincount(draws % 5, minlength=5) / size
    # Eight standard deviations of a share of 1/2.
    assert (shares - WEIGHTS / 8).abs().max() < 8 * 0.5 / size**0.5
    assert shares[1] == 0


def test_balancing_gives_every_class_the_same_chance() -> None:
    targets = torch.tensor([0] * 90 + [2] * 9 + [1])
    weights = class_weights(targets)
    assert [weights[targets == c].sum().item() for c in range(3)] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (torch.ones(4), r"\[4\] weights for 5 samples"),
        (torch.ones(5, 1), r"\[5, 1\] weights for 5 samples"),
        (torch.zeros(5), "not all 0"),
        (torch.tensor([1.0, 1, 1, 1, -1]), "0 or more"),
        (torch.tensor([1.0, 1, 1, 1, float("nan")]), "finite"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: Tensor, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        SampleOrder(size=5, seed=0, weights=weights)


def test_a_weighted_sampler_per_rank_draws_the_same_on_every_rank() -> None:
    """The wrong form: two ranks, seeded alike as for equal initial weights, do half the work."""
    by_rank = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        by_rank.append(list(WeightedRandomSampler(WEIGHTS.tolist(), 20, generator=generator)))
    assert by_rank[0] == by_rank[1]
    order = SampleOrder(size=5, seed=0, weights=WEIGHTS)
    ours = [order.share(0, 40, shard=shard, shards=2).tolist() for shard in range(2)]
    assert ours[0] != ours[1]


def sampled(size: int, *, ranks: int, epoch: int | None) -> list[int]:
    """What the ranks of torch's own sampler draw in an epoch, one rank after the other."""
    numbers: list[int] = []
    for rank in range(ranks):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(size),  # type: ignore[arg-type]  # only needs the length
            num_replicas=ranks,
            rank=rank,
        )
        if epoch is not None:
            sampler.set_epoch(epoch)
        numbers += list(sampler)
    return numbers


def test_the_distributed_sampler_pads_and_ours_does_not() -> None:
    padded = sampled(101, ranks=2, epoch=0)
    assert len(padded) == 102
    assert len(set(padded)) == 101
    assert sorted(drawn(SampleOrder(size=101, seed=0), 0, 101, shards=2)) == list(range(101))


def test_without_set_epoch_every_epoch_has_the_same_order_and_ours_needs_no_call() -> None:
    assert sampled(10, ranks=2, epoch=None) == sampled(10, ranks=2, epoch=None)
    assert sampled(10, ranks=2, epoch=0) != sampled(10, ranks=2, epoch=1)
    order = SampleOrder(size=10, seed=0)
    assert drawn(order, 0, 10, shards=2) != drawn(order, 10, 10, shards=2)


@pytest.mark.parametrize("seed", [0, 1])
def test_balanced_sampling_finds_the_rare_classes_of_shuttle(seed: int) -> None:
    task = Shuttle(there(SHUTTLE))
    uniform = learnt(task, seed, None)
    balanced = learnt(task, seed, task.weights())
    # Seen with seeds 0 to 3: 0.48 to 0.59, and 0.996 to 0.998.
    assert uniform["balanced_accuracy"] < 0.8
    assert balanced["balanced_accuracy"] > 0.98
    assert balanced["rarest_class_recall"] == 1.0
    assert min(uniform["accuracy"], balanced["accuracy"]) > 0.97


def learnt(task: Shuttle, seed: int, weights: Tensor | None) -> dict[str, float]:
    """Train 300 steps of 128 samples, and measure."""
    # Matrices this small only wait for a second thread.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, train, test = task.model(), task.train(), task.test()
    order = SampleOrder(size=len(train), seed=seed, weights=weights)
    feed = Feed(train, order, global_batch=128, shard=0, shards=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for step in range(300):
        batch = feed.batch(step * 128)
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model(batch.inputs), batch.targets) / 128)
        optimizer.step()
    with torch.no_grad():
        score = task.score(model(test.inputs), test.targets)
    return dict(task.metrics(score.double(), len(test)))


@pytest.mark.parametrize(
    "targets", [torch.zeros(3, 2, dtype=torch.int64), torch.tensor([1, -100]), torch.rand(3)]
)
def test_targets_without_one_class_per_sample_are_refused(targets: Tensor) -> None:
    with pytest.raises(UsageError, match="leave out --sampling balanced"):
        class_weights(targets)
