"""Models in the style of other people train as in one process, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.support import strange
from tests.train.support.ladder import Case, climb
from tests.train.support.making import refusal
from tests.train.support.ranks import on_ranks
from tests.train.support.whole_runs import run
from train.cli.config import Config

# Double precision has 2.2e-16; a fault is six orders and more above this.
MOST = 1e-12
TASK = f"{strange.__file__}:"


def case(name: str, world_size: int, task: str, **config: object) -> Case:
    # Decay changes every parameter with a gradient; momentum, every one that has had a gradient.
    chosen = {"lr": 1e-3, "weight_decay": 0.1, "global_batch": 8, **config}
    # Which way a batch takes depends on how the global one is cut: alike here and there.
    branching = "Branch" in task or task == "Whole"
    micro_batch = config.get("micro_batch") or 8 // world_size
    return Case(
        name=f"{task}, {name}",
        world_size=world_size,
        config=Config(task=TASK + task, **chosen),  # type: ignore[arg-type]
        reference={"micro_batch": micro_batch} if branching else {},
    )


LANGUAGE = ["Tied", "SharedBlocks", "FrozenNorms"]
TWO = [
    one
    for task in LANGUAGE
    for one in (
        case("ddp", 2, task, strategy="ddp"),
        case("fsdp", 2, task, strategy="fsdp", clip_norm=0.1),
        case("fsdp from meta", 2, task, strategy="fsdp", meta_init=True),
        case("fsdp, offloaded", 2, task, strategy="fsdp", cpu_offload=True),
        case("hsdp", 2, task, strategy="hsdp"),
        case("tp", 2, task, strategy="tp", clip_norm=0.1),
        case("tp, loss parallel", 2, task, strategy="tp", loss_parallel=True),
        case("cp", 2, task, strategy="cp"),
        case("pp", 2, task, strategy="pp", micro_batch=2, clip_norm=0.1),
        case("exact", 2, task, reduce="exact"),
    )
]
TWO += [
    one
    for task in LANGUAGE[:2]
    for one in (
        case("pp from meta", 2, task, strategy="pp", micro_batch=2, meta_init=True),
        case("pp, V", 2, task, strategy="pp", pp_schedule="ZBVZeroBubble", micro_batch=2),
    )
]
TWO += [
    one
    for task in ("Branching", "BranchFirst", "Whole", "Twice")
    for one in (
        case("ddp", 2, task, strategy="ddp"),
        case("ddp, accumulation", 2, task, strategy="ddp", micro_batch=2),
        case("fsdp", 2, task, strategy="fsdp"),
        case("fsdp, accumulation", 2, task, strategy="fsdp", micro_batch=2, clip_norm=0.1),
        case("hsdp", 2, task, strategy="hsdp", micro_batch=2),
        case("exact", 2, task, reduce="exact", micro_batch=2),
    )
]
TWO += [
    case("pp", 2, task, strategy="pp", micro_batch=2)
    for task in ("Branching", "BranchFirst", "Twice")
]
FOUR = [
    one
    for task in LANGUAGE[:2]
    for one in (
        case("pp x fsdp", 4, task, pp=2, dp_shard=2, micro_batch=2, clip_norm=0.1),
        case("pp x fsdp from meta", 4, task, pp=2, dp_shard=2, micro_batch=2, meta_init=True),
        case("pp x tp", 4, task, pp=2, tp=2, micro_batch=2, clip_norm=0.1),
        case("pp x cp", 4, task, pp=2, cp=2, micro_batch=2),
        case("pp of 4", 4, task, pp=4, micro_batch=2, clip_norm=0.1),
        case("fsdp x tp", 4, task, dp_shard=2, tp=2, clip_norm=0.1),
        case("cp x tp", 4, task, cp=2, tp=2, clip_norm=0.1),
    )
]
FOUR += [
    case("fsdp", 4, "Branching", strategy="fsdp", micro_batch=2),
    case("hsdp", 4, "Branching", strategy="hsdp", micro_batch=2, clip_norm=0.1),
    case("ddp", 4, "Branching", strategy="ddp", micro_batch=2),
    case("pp x fsdp", 4, "Branching", pp=2, dp_shard=2, micro_batch=2, clip_norm=0.1),
    case("pp x copies", 4, "Branching", pp=2, dp_replicate=2, micro_batch=2),
]


# One test per number of ranks, so that the ranks start once for all of its cases.
@pytest.mark.slow
@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_ties_branches_and_frozen_parts_train_as_in_one_process(cases: list[Case]) -> None:
    differences = climb(cases, dtype=torch.float64)
    assert differences.keys() == {one.name for one in cases}
    wrong = {
        name: far
        for name, far in differences.items()
        if far.initial_weights or max(far.loss, far.gradients, far.weights) > MOST
    }
    assert wrong == {}


FSDP, TP, CP = {"strategy": "fsdp"}, {"tp": 2}, {"cp": 2}
PP = {"pp": 2, "micro_batch": 2}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Skipping", FSDP, "'first' is left out: ranks that take another branch"),
    (
        "Skipping", PP,
        "do not compute what its model does: for the same sample other numbers come out",
    ),
    ("Beside", PP, "do not compute what its model does: aten.mul.Tensor"),
    ("ByHand", FSDP, f"'first.weight' of task '{TASK}ByHand' is used outside of piece 'first'"),
    ("Scalar", FSDP, "parameter '1.factor' is a single number"),
    ("Unseeded", FSDP, "different initial values of 0.weight;"),
    (
        "OtherData", {"strategy": "ddp"},
        "the ranks were given different data: the training data (tensor 0)",
    ),
    ("HiddenTie", FSDP, "head.project.weight are different parameters in the same memory"),
    (
        "TiedAcrossCuts", TP,
        "embed.symbols.weight is cut along dimension 0; head.project.weight is cut along "
        "dimension 1",
    ),
    ("LeftOut", TP, "tensor_plan() of task 'chars' leaves out 'blocks.0.attention.factor'"),
    (
        "Uneven", TP,
        "--tp 2 cannot share parameter blocks.0.feed.0.weight [11, 16] evenly along dimension 0: "
        "11 = 5 x 2 + 1",
    ),
    ("LookingTied", CP, "reads a value of its data (item(), or an if on a"),
    (
        "CountsSamples", CP,
        "count() of task 'chars' gives 8 for whole sequences, but 8 + 8 for their parts",
    ),
]  # fmt: skip
REFUSED_ON_FOUR: list[tuple[str, dict[str, Any], str]] = [
    (
        "Tied", {"pp": 2, "dp_shard": 2, "pp_schedule": "DualPipeV", "micro_batch": 1},
        "parameter 'embed.symbols.weight' (also 'head.project.weight') is shared by stages 0 and 3",
    ),
]  # fmt: skip


def refusals(rank: int, ranks: int, folder: Path, cases: Sequence[tuple[Any, ...]]) -> list[str]:
    """What each case says before its first step is made."""
    return [
        refusal(rank, ranks, folder / str(number), steps=1, task=TASK + task, **chosen)
        for number, (task, chosen, _) in enumerate(cases)
    ]


@pytest.mark.parametrize(("ranks", "cases"), [(2, REFUSED), (4, REFUSED_ON_FOUR)])
def test_no_step_is_made(ranks: int, cases: Sequence[tuple[Any, ...]], tmp_path: Path) -> None:
    for said in on_ranks(ranks, refusals, ranks, tmp_path, cases):
        wrong = [(task, text) for (task, _, words), text in zip(cases, said, strict=True)
                 if words not in text]  # fmt: skip
        assert wrong == []


def test_what_nothing_trains_is_told_once_and_left_alone(tmp_path: Path) -> None:
    ended = run(
        2, "--task", TASK + "Branching", "--run-dir", str(tmp_path / "run"), "--steps", "12",
        "--global-batch", "8", "--strategy", "ddp", environ={},
    )  # fmt: skip
    assert ended.status == 0, ended.output
    assert ended.output.count("nothing gives a gradient to") == 1
    assert "0.never.bias, 0.never.weight" in ended.output
