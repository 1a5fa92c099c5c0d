"""Two ranks: what a strategy trains otherwise than one process is refused before training."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.train.support import proved
from tests.train.support.making import config_of, group_of
from tests.train.support.ranks import on_ranks
from train import parallel, tasks
from train.errors import StrategyError, UsageError
from train.parallel.base import Parts
from train.proof import prove
from train.proof.session import refusing_failures

COMMON: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "global_batch": 12}
DDP = {"strategy": "ddp"}
FSDP = {"strategy": "fsdp"}
EXACT = {"strategy": "ddp", "reduce": "exact", "virtual_shards": 4}
TP = {"strategy": "tp"}
PP = {"strategy": "pp", "micro_batch": 3}
PS = {"strategy": "ps"}
LOCAL = {"strategy": "local-sgd"}
SYNC = {"strategy": "ddp", "sync_batch_norm": True}

Case = tuple[str, dict[str, Any]]
HOLDS, PROBLEM, MISSING, CHECK = "holds", "problem: ", "missing: ", "check: "


FOUR: list[Case] = [
    ("chars", chosen)
    for chosen in (
        {"strategy": "hsdp"},
        {"dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "tp": 2, "meta_init": True},
        {"dp_replicate": 2, "tp": 2, "loss_parallel": True},
        {"pp": 2, "dp_shard": 2, "micro_batch": 2},
        {"pp": 2, "tp": 2, "pp_schedule": "GPipe", "micro_batch": 2},
        {"dp_shard": 2, "cp": 2},
        {"cp": 2, "tp": 2, "cp_method": "ulysses"},
        {"strategy": "ddp", "clip_norm": 0.1, "comm_hook": "powersgd", "precision": "bf16"},
        {"strategy": "fsdp", "cpu_offload": True},
        {"strategy": "ps", "ps_mode": "async"},
        {"strategy": "local-sgd"},
    )
]


def judged(rank: int, ranks: int, cases: list[Case]) -> list[str]:
    """What a first start would say to each case."""
    found = []
    for name, chosen in cases:
        config, group = config_of(**{**COMMON, **chosen}), group_of(rank, ranks)
        parts = Parts(
            task=tasks.load(name) if name == "chars" else getattr(proved, name)(),
            config=config,
            layout=config.layout_on(group.rank_info),
            group=group,
        )
        try:
            # As a start does before it.
            with refusing_failures(parts):
                parallel.build(config.strategy_on(group.rank_info), parts).verify()
                verdict = prove(parts)
        except (UsageError, StrategyError) as error:
            found.append(f"{CHECK}{error}")
            continue
        if verdict.holds:
            found.append(HOLDS)
        else:
            found.append(f"{PROBLEM}{verdict.problem}" * bool(verdict.problem))
            found[-1] = found[-1] or f"{MISSING}{verdict.missing}"
    return found


RIGHT: list[Case] = [
    *((name, DDP) for name in ("Plain", "Recurrent", "Parametrized", "Moving", "Single")),
    *((name, FSDP) for name in ("Tied", "Experts", "Meant", "Moving")),
    *(("Dropped", how) for how in (DDP, FSDP, EXACT, TP, PP, PS, LOCAL)),
    *(("MeantByToken", how) for how in (DDP, EXACT, PP, PS)),
    ("PenalisedBySample", DDP),
    ("Normed", SYNC),
    ("Normed", {**DDP, "accept": "batch-norm"}),
    ("Contrastive", {**DDP, "accept": "loss-mixes-samples"}),
    ("Contrastive", {**PP, "accept": "loss-mixes-samples"}),
    ("Centred", {**FSDP, "accept": "layer-mixes-samples"}),
    ("Normed", {**SYNC, "micro_batch": 3, "accept": "batch-norm"}),
    ("Branching", {**DDP, "accept": "layer-mixes-samples"}),
    *((name, {**PS, "ps_mode": "async"}) for name in ("Plain", "Counted")),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("Mean", DDP, r"problem: the batch is split into 2 passes \(2 shards\), and loss\(\) gave .*"),
    ("Normed", DDP, r"problem: the batch is split into 2 passes \(2 shards\), and layer '1' .*"),
    ("Normed", {**SYNC, "micro_batch": 3}, r"problem: .* \(2 shards x 2 micro-batches\), .*"),
    (
        "Contrastive",
        PP,
        r"problem: .* split into 4 passes \(1 shard x 4 micro-batches\).*",
    ),
    ("Penalised", DDP, r"problem: .*which do not add up; .*"),
    ("Mean", TP, r"holds"),
    ("CutByRank", DDP, r"problem: ranks 0 and 1 have read different training samples .*"),
    ("Shuffled", DDP, r"missing: .*randperm.*"),
    ("Hooked", DDP, r"problem: after step 1 .*'0\.weight' .* hook on its gradient, .*"),
    ("Branching", DDP, r"problem: .*(layer '1' \(Branch\)|a branch on a sum).*--accept layer-.*"),
    ("Followed", PS, r"problem: .* writes parameter '1\.teacher\.weight'.*"),
    ("Clamped", DDP, r"problem: .*layer '1' \(Clamp\) gives other outputs.*"),
    ("Drifting", DDP, r"problem: the loss of step 2 .* moves buffer '1\.ema', which is reg.*"),
    ("Passing", {**DDP, "micro_batch": 3}, r"problem: .* buffer '1\.ema' in each pass and .*"),
    ("Counted", DDP, r"problem: after step 1 buffer '1\.seen' differs by 2, .*own samples.*"),
    (
        "Shaped",
        TP,
        r"check: --strategy tp \(tp 2\) fails with task '', which one process trains: the forward "
        r"pass at layer '2' \(Squares\): RuntimeError: shape '\[2, 2, 2\]' is invalid for input of "
        r"size 4; use another --strategy or other options, or --no-verify to see the traceback",
    ),
]


def test_what_trains_otherwise_is_refused_and_nothing_else() -> None:
    cases = [*RIGHT, *((name, chosen) for name, chosen, _ in WRONG)]
    every = on_ranks(2, judged, 2, cases)
    # All ranks refuse alike: else some would wait for the others.
    assert every[0] == every[1]
    right, wrong = every[0][: len(RIGHT)], every[0][len(RIGHT) :]
    assert [(case, one) for case, one in zip(RIGHT, right, strict=True) if one != HOLDS] == []
    for (name, chosen, text), one in zip(WRONG, wrong, strict=True):
        assert re.fullmatch(text, one), (name, chosen, one)


@pytest.mark.slow
def test_a_language_model_is_proved_under_each_product_of_axes() -> None:
    every = on_ranks(4, judged, 4, FOUR)
    assert every == [[HOLDS] * len(FOUR)] * 4
