"""Attention over parts of a sequence on several ranks is attention over the whole sequence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import Batch
from train.errors import UsageError
from train.layers import CausalAttention, Positions
from train.parallel import cp
from train.parallel.base import Parts
from train.parallel.cp import GatheredKeys, HeadsForTime, SequenceSlice
from train.parallel.layout import Layout
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.tasks import Classifier, load

RANKS = 4
CLOSE = 1e-12
BATCH, HEADS, TIME, HEAD_DIM = 2, 4, 12, 3


def whole_sequences() -> list[Tensor]:
    """Query, key, value, and what the loss weighs the output with."""
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, HEADS, TIME, HEAD_DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]


def attended(attention: CausalAttention, tensors: list[Tensor]) -> list[Tensor]:
    """Output, and the gradients of query, key and value."""
    *inputs, weight = tensors
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = attention(*inputs)
    torch.autograd.backward((outputs * weight).sum())
    return [outputs.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


class Alone:
    """The wrong form: each part attends to itself."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def parts_of(rank: int) -> dict[str, list[Tensor]]:
    """Attend from this rank's part, with each method."""
    group = dist.group.WORLD
    assert group is not None
    mine = [tensor.chunk(RANKS, dim=2)[rank] for tensor in whole_sequences()]
    methods: dict[str, Any] = {
        "allgather": GatheredKeys(group, rank),
        "ulysses": HeadsForTime(group, Layout(cp=RANKS)),
        "alone": Alone(),
    }
    found = {}
    for name, method in methods.items():
        attention = CausalAttention()
        attention.context = method
        found[name] = attended(attention, mine)
    return found


@pytest.mark.slow
def test_parts_together_are_the_whole_and_so_are_their_gradients() -> None:
    ranks = on_ranks(RANKS, parts_of)
    whole = attended(CausalAttention(), whole_sequences())
    assert len(whole) == 4
    for name in ("allgather", "ulysses", "alone"):
        joined = [torch.cat(parts, dim=2) for parts in zip(*(r[name] for r in ranks), strict=True)]
        far = max((a - b).abs().max().item() for a, b in zip(joined, whole, strict=True))
        assert (far > 0.1) if name == "alone" else (far <= CLOSE)


class Own(Classifier):
    """A task whose model is given."""

    name = "own"

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def model(self) -> nn.Module:
        return self._model

    def train(self) -> Batch:
        raise AssertionError("only the model is looked at")

    test = train


def told(rank: int) -> dict[str, Any]:
    """Apply context parallelism to models of several kinds, on cp 2 x tp 2."""
    rank_info = RankInfo(rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS)
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    layout = Layout(cp=2, tp=2)

    def tell(model: nn.Module, method: str) -> SequenceSlice:
        config = Config(cp=2, tp=2, cp_method=method)  # type: ignore[arg-type]
        parts = Parts(task=Own(model), config=config, layout=layout, group=group)
        return cp.apply(model, parts)

    found: dict[str, Any] = {}
    positions = Positions(8, 2)
    sequence = tell(nn.ModuleList([positions, CausalAttention()]), "allgather")
    found["places"] = [
        torch.equal(positions(4), positions.weight[2 * a : 2 * a + 4]) for a in (0, 2)
    ]
    tokens = torch.arange(16).view(2, 8)
    found["part"] = sequence.of(Batch(inputs=tokens, targets=tokens + 1))
    uneven = HeadsForTime(dist.group.WORLD, Layout(cp=4, tp=2))  # type: ignore[arg-type]
    refused: dict[str, Callable[[], object]] = {
        "no attention": lambda: tell(nn.Linear(2, 2), "ulysses"),
        "other attention": lambda: tell(
            nn.ModuleList([CausalAttention(), nn.MultiheadAttention(2, 1)]), "ulysses"
        ),
        "heads": lambda: uneven.attend(*[torch.zeros(1, 6, 2, 2)] * 3),
    }
    for name, act in refused.items():
        try:
            act()
        except UsageError as error:
            found[name] = str(error)
    return found


def test_a_model_is_told_where_its_part_begins_or_is_refused() -> None:
    tokens = torch.arange(16).view(2, 8)
    for rank, found in enumerate(on_ranks(RANKS, told)):
        # tp is innermost: ranks 0 and 1 have the first half.
        part = rank // 2
        assert found["places"] == [part == 0, part == 1]
        assert torch.equal(found["part"].inputs, tokens[:, 4 * part : 4 * part + 4])
        assert torch.equal(found["part"].targets, tokens[:, 4 * part : 4 * part + 4] + 1)
        assert found["no attention"] == (
            "--cp 2: the model of task 'own' has no train.layers.CausalAttention, the layer that "
            "can attend to other ranks' parts of a sequence; build the model with it (and with "
            "train.layers.Positions), or leave out --cp"
        )
        assert found["other attention"] == (
            "--cp 2: the model of task 'own' has a MultiheadAttention, which would see only this "
            "rank's part of a sequence; use train.layers.CausalAttention, or leave out --cp"
        )
        assert found["heads"] == (
            "--cp 4 --cp-method ulysses shares heads, but 12 heads / tp 2 = 6, which 4 does not "
            "divide: 6 = 1 x 4 + 2; use --cp-method allgather"
        )


SEQUENCES = {
    "length": (
        Layout(cp=3),
        Batch(inputs=torch.zeros(2, 64), targets=torch.zeros(2, 64)),
        "--cp 3 does not fit sequences of 64: 64 = 21 x 3 + 1; the sequence must be a multiple of "
        "3",
    ),
    "with tp": (
        Layout(cp=4, tp=3),
        Batch(inputs=torch.zeros(2, 64), targets=torch.zeros(2, 64)),
        "--cp 4 does not fit sequences of 64: 64 = 5 x 12 + 4 (cp 4 x tp 3 = 12); the sequence "
        "must be a multiple of 12",
    ),
    "no sequence": (
        Layout(cp=2),
        Batch(inputs=torch.zeros(2, 64), targets=torch.zeros(2)),
        "--cp 2 cuts dimension 1 of inputs and targets, the sequence, but this task's are [2, 64] "
        "and [2]; leave out --cp",
    ),
}


@pytest.mark.parametrize("reason", SEQUENCES)
def test_sequences_that_cannot_be_cut_are_refused(reason: str) -> None:
    layout, batch, message = SEQUENCES[reason]
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        SequenceSlice(part=0, layout=layout).of(batch)


def test_one_part_is_the_whole() -> None:
    batch = load("digits").train()
    assert isinstance(batch, Batch)
    assert SequenceSlice().of(batch) is batch
