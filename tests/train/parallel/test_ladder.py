"""Every arrangement of ranks trains what one process trains: weights, losses, gradients, steps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.train.support.ladder import Case, Differences, climb
from train.cli.config import Config
from train.tasks.chars import CONTEXT

# Double precision has 2.2e-16: rounding makes 1e-15 of it, and the least fault 1e-4.
MOST = 1e-12
# Single precision has 1.2e-7. Sums over a batch of 8 x 64 positions are cut where the batch is and
# added in the order of the processor's vectors; the errors of their terms are as likely up as down,
# so they grow with the root of the number of terms, on both sides of the comparison.
MOST_SINGLE = 2 * math.sqrt(8 * CONTEXT) * torch.finfo(torch.float32).eps
# Where a gradient is all but zero, AdamW makes a step of up to the learning rate from its sign,
# hence from rounding: in double precision only, and at a small rate.
ADAMW = {"optimizer": "adamw", "lr": 1e-4}
SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}


def case(name: str, world_size: int, **config: object) -> Case:
    chosen = {"task": "chars", "global_batch": 8, **ADAMW, **config}
    return Case(name=name, world_size=world_size, config=Config(**chosen))  # type: ignore[arg-type]


def both(name: str, world_size: int, **config: object) -> list[Case]:
    """The same arrangement with either optimizer."""
    return [
        case(f"{name}, adamw", world_size, **ADAMW, **config),
        case(f"{name}, sgd", world_size, **SGD, **config),
    ]


SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip

# In the precision that training has by default.
SINGLE = [
    case("ddp", 2, strategy="ddp", micro_batch=2, **SGD),
    case("fsdp", 2, strategy="fsdp", clip_norm=0.1, **SGD),
    case("tp", 2, strategy="tp", **SGD),
    case("cp", 2, strategy="cp", cp_method="ulysses", **SGD),
    case("pp", 2, strategy="pp", micro_batch=2, **SGD),
]
# One rank that is cut all the same, see forced.py.
ONE = [
    dataclasses.replace(one, sabotage="import tests.train.support.forced")
    for one in (
        *both("ddp", 1, strategy="ddp"),
        case("ddp, accumulation", 1, strategy="ddp", global_batch=9, micro_batch=2),
        *both("fsdp", 1, strategy="fsdp"),
        case("fsdp, clipped", 1, strategy="fsdp", global_batch=9, micro_batch=2, clip_norm=0.1),
        case("fsdp, recomputed", 1, strategy="fsdp", activation_checkpointing=True),
        case("fsdp, from meta", 1, strategy="fsdp", meta_init=True),
        case("fsdp, offloaded", 1, strategy="fsdp", cpu_offload=True, clip_norm=0.1),
        case("hsdp", 1, strategy="hsdp"),
        *both("tp", 1, strategy="tp", clip_norm=0.1),
        *both("cp, all-gather", 1, strategy="cp"),
        *both("cp, ulysses", 1, strategy="cp", cp_method="ulysses"),
        *both("fsdp x tp, clipped", 1, strategy="hybrid", clip_norm=0.1),
        *(case(f"pp {s}", 1, strategy="pp", pp_schedule=s, micro_batch=2) for s in SCHEDULES),
    )
]
# Each with one optimizer in the gate, and with the other in the slow tests.
EITHER = [
    both("tp", 2, strategy="tp"),
    both("cp, all-gather", 2, strategy="cp"),
    both("cp, ulysses", 2, strategy="cp", cp_method="ulysses"),
    *(
        both(f"pp {schedule}", 2, strategy="pp", pp_schedule=schedule, micro_batch=2)
        for schedule in SCHEDULES
    ),
]
TWO = [
    *both("ddp", 2, strategy="ddp"),
    case("ddp, accumulation", 2, strategy="ddp", micro_batch=2),
    case("ddp, uneven shares", 2, strategy="ddp", global_batch=9, micro_batch=2),
    case("ddp, clipped", 2, strategy="ddp", clip_norm=0.1),
    *both("fsdp", 2, strategy="fsdp"),
    case("fsdp, accumulation", 2, strategy="fsdp", micro_batch=2),
    case("fsdp, uneven shares", 2, strategy="fsdp", global_batch=9, micro_batch=2),
    case("fsdp, clipped", 2, strategy="fsdp", clip_norm=0.1),
    case("fsdp, recomputed", 2, strategy="fsdp", activation_checkpointing=True),
    case("fsdp, from meta", 2, strategy="fsdp", meta_init=True),
    case("fsdp, offloaded", 2, strategy="fsdp", cpu_offload=True),
    case("tp, loss parallel", 2, strategy="tp", loss_parallel=True),
    case("tp, clipped", 2, strategy="tp", clip_norm=0.1),
    case("tp, digits", 2, strategy="tp", task="digits"),
    *(one for one, _ in EITHER),
    case("pp, clipped", 2, strategy="pp", clip_norm=0.1, micro_batch=2),
]
MORE = [other for _, other in EITHER]
FOUR = [
    *both("ddp", 4, strategy="ddp"),
    *both("hsdp", 4, strategy="hsdp"),
    *both("fsdp x tp", 4, dp_shard=2, tp=2),
    case("fsdp x tp, clipped", 4, dp_shard=2, tp=2, clip_norm=0.1),
    case("fsdp x tp, from meta", 4, dp_shard=2, tp=2, meta_init=True),
    *both("ddp x tp", 4, dp_replicate=2, tp=2),
    case("tp 4", 4, strategy="tp"),
    *both("cp x tp", 4, cp=2, tp=2),
    case("cp x tp, ulysses", 4, cp=2, tp=2, cp_method="ulysses"),
    *both("fsdp x cp", 4, dp_shard=2, cp=2),
    *both("pp x fsdp", 4, pp=2, dp_shard=2, micro_batch=2),
    case("pp x ddp", 4, pp=2, dp_replicate=2, micro_batch=2),
    case("pp x tp", 4, pp=2, tp=2, micro_batch=2),
    case("pp x cp", 4, pp=2, cp=2, micro_batch=2),
    case("pp 4", 4, strategy="pp", micro_batch=2),
    case("pp x tp, loss parallel", 4, pp=2, tp=2, micro_batch=2, loss_parallel=True),
    case("pp x fsdp, from meta", 4, pp=2, dp_shard=2, micro_batch=2, meta_init=True),
    case("pp x fsdp, DualPipeV", 4, pp=2, dp_shard=2, pp_schedule="DualPipeV", micro_batch=1),
    case("pp x fsdp, V", 4, pp=2, dp_shard=2, pp_schedule="ZBVZeroBubble", micro_batch=1),
]
EIGHT = [
    *both("pp x fsdp x tp", 8, pp=2, dp_shard=2, tp=2, micro_batch=2),
    case("pp x fsdp x tp, clipped", 8, pp=2, dp_shard=2, tp=2, micro_batch=2, clip_norm=0.1),
    case("hsdp x tp", 8, dp_replicate=2, dp_shard=2, tp=2),
    case("fsdp x cp x tp", 8, dp_shard=2, cp=2, tp=2),
]


# One test per number of ranks, so that the ranks start once for all of its cases.
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TWO, id="2 ranks"),
        pytest.param(MORE, id="2 ranks, the other optimizer", marks=pytest.mark.slow),
        pytest.param(FOUR, id="4 ranks", marks=pytest.mark.slow),
        pytest.param(EIGHT, id="8 ranks", marks=pytest.mark.slow),
    ],
)
def test_every_arrangement_equals_one_process(cases: list[Case]) -> None:
    found = climb(cases)
    assert found.keys() == {one.name for one in cases}
    assert {name: far for name, far in found.items() if not close(far)} == {}


@pytest.mark.slow
def test_single_precision_differs_by_rounding_alone() -> None:
    found = climb(SINGLE, dtype=torch.float32)
    assert found.keys() == {one.name for one in SINGLE}
    assert {name: far for name, far in found.items() if not close(far, MOST_SINGLE)} == {}
    # It was single precision.
    assert max(far.weights for far in found.values()) > MOST


@pytest.mark.slow
def test_a_lone_rank_that_is_cut_equals_one_that_is_not() -> None:
    """As on a machine with one GPU."""
    found = climb(ONE)
    assert {name: far for name, far in found.items() if not close(far)} == {}


FAULTS = {
    "ddp's mean over ranks is not turned into a sum": (
        "from train.parallel import base, ddp\n"
        "plain = base.WholeModel.backward\n"
        "ddp.DataParallel.backward = lambda self, b, f: plain(self, b, f / self.shards)",
        case("ddp", 2, strategy="ddp"),
    ),
    "all ranks draw the same slice": (
        "from train.parallel.layout import Layout\nLayout.shard = lambda self, rank: 0",
        case("ddp", 2, strategy="ddp"),
    ),
    "only the last micro-batch counts": (
        "from train.parallel.hybrid import Composed\n"
        "whole = Composed.accumulate\n"
        "Composed.accumulate = lambda self, parts, factor=1.0: whole(self, parts[-1:], factor)",
        case("fsdp", 2, strategy="fsdp", micro_batch=2),
    ),
    "fsdp divides by the ranks": (
        "from torch.distributed.fsdp import FSDPModule\n"
        "FSDPModule.set_gradient_divide_factor = lambda self, factor: None",
        case("fsdp", 2, strategy="fsdp"),
    ),
    "each rank clips by the norm of its own parts": (
        "from train.model import gradients\ngradients._groups = lambda gradient: ()",
        case("fsdp", 2, strategy="fsdp", clip_norm=0.1),
    ),
    "losses are averaged within micro-batches": (
        "from train.tasks.base import Classifier\n"
        "whole = Classifier.loss\n"
        "Classifier.loss = lambda self, o, t: whole(self, o, t) / (1 + 0.01 * len(t))",
        case("ddp", 2, strategy="ddp", global_batch=9),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_ladder_sees(fault: str) -> None:
    sabotage, one = FAULTS[fault]
    (differences,) = climb([dataclasses.replace(one, sabotage=sabotage)]).values()
    assert differences.gradients > 1e8 * MOST


def close(differences: Differences, most: float = MOST) -> bool:
    parts = (
        differences.initial_weights == 0,
        differences.loss <= most,
        differences.gradients <= most,
        differences.weights <= most,
    )
    return all(parts)
