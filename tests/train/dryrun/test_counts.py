"""`--dry-run` counts without ranks exactly the operations of real ranks."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.train.support import large, wide
from tests.train.support.ladder import trainer_of
from tests.train.support.ranks import on_ranks
from train import tasks
from train.cli.config import Config, ScheduleName
from train.data.order import Batch
from train.dryrun import examine, show, simulate
from train.dryrun.counters import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Exchange,
    Flops,
    Memory,
    Traffic,
)
from train.dryrun.report import Findings, Flow
from train.dryrun.simulate import _Step, bubble
from train.errors import EXIT_DONE, EXIT_USAGE, UsageError
from train.parallel.base import Parts
from train.parallel.layout import Layout
from train.rundir.console import Console
from train.runtime import devices
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.tasks import chars
from train.tasks.base import Task

HERE = Path(__file__).parents[1] / "support"
LARGE = f"{HERE / 'large.py'}:Large"
WIDE = f"{HERE / 'wide.py'}:Wide"
FLOAT = 4
WIDE_BYTES = 4 * (wide.WIDTH**2 + wide.WIDTH) * FLOAT
CHARS_BYTES = FLOAT * sum(p.numel() for p in chars.Transformer().parameters())
# What the loop agrees on in each step: five numbers in double precision.
AGREEMENT = 5 * 8


def flow(findings: Findings, axes: str, kind: str, rank: int = 0) -> Flow:
    (found,) = [f for f in findings.flows(findings.ranks[rank]) if (f.axes, f.kind) == (axes, kind)]
    return found


def test_ddp_reduces_as_many_bytes_as_there_are_parameters() -> None:
    found = examine(Config(task=WIDE, strategy="ddp", dp_replicate=4))
    reduced = flow(found, "dp_replicate", "all-reduce")
    assert reduced.payload == WIDE_BYTES + AGREEMENT
    # A ring sends everything but its own part, twice.
    assert reduced.sent == 2 * 3 / 4 * reduced.payload
    assert len(found.flows(found.ranks[0])) == 1


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all"])
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (2, 4), (4, 2), (8, 1), (8, 2), (16, 1)])
def test_what_leaves_a_node_is_what_its_ranks_send_to_other_nodes(
    kind: str, size: int, stride: int
) -> None:
    """All groups of 16 ranks on 4 nodes, message by message."""
    left = [0.0] * 4
    for first in range(16):
        ranks = tuple(range(first, first + size * stride, stride))
        if first // stride % size or ranks[-1] >= 16:
            continue  # another rank of the group is its first
        call = Exchange(kind=kind, ranks=ranks, payload=4800)
        for at, rank in enumerate(ranks):
            if kind == "all-to-all":
                to = {other: call.payload / size for other in ranks}
            else:
                to = {ranks[(at + 1) % size]: call.sent}
            left[rank // 4] += sum(n for other, n in to.items() if other // 4 != rank // 4)
        # The ranks that a dry run looks at are in the first group.
        assert call.leaves_a_node(4) == pytest.approx(
            Exchange(
                kind=kind, ranks=tuple(range(0, size * stride, stride)), payload=4800
            ).leaves_a_node(4)
        )
    assert left == pytest.approx([call.leaves_a_node(4)] * 4)


def test_accumulating_gradients_adds_no_traffic() -> None:
    config = Config(task="chars", strategy="ddp", dp_replicate=4)
    (at_once,) = examine(config).ranks
    (in_parts,) = examine(dataclasses.replace(config, micro_batch=2)).ranks
    assert in_parts.micro_batches == 8
    assert in_parts.traffic == at_once.traffic
    assert in_parts.flops == at_once.flops
    assert in_parts.memory[ACTIVATIONS] < at_once.memory[ACTIVATIONS] / 4


def test_fsdp_gathers_parameters_twice_and_shares_gradients_out_once() -> None:
    found = examine(Config(task="chars", strategy="fsdp", dp_shard=4))
    assert flow(found, "dp_shard", "all-gather").payload == 2 * CHARS_BYTES
    assert flow(found, "dp_shard", "reduce-scatter").payload == CHARS_BYTES


def test_each_rank_has_its_share_of_parameters_and_optimizer_state() -> None:
    for shards in (1, 4, 16):
        memory = examine(Config(task="chars", dp_shard=shards)).ranks[0].memory
        assert memory[PARAMETERS] == CHARS_BYTES / shards
        # Two moments, and a counter for each tensor.
        assert 0 <= memory[OPTIMIZER] - 2 * CHARS_BYTES / shards < 200


def test_tensor_parallel_exchanges_the_activations_of_each_layer() -> None:
    found = examine(Config(task="chars", tp=2, global_batch=8))
    hidden = 8 * chars.CONTEXT * chars.WIDTH * FLOAT
    calls: Counter[tuple[str, int]] = Counter()
    for exchange, count in found.ranks[0].traffic.items():
        calls[exchange.kind, exchange.payload] += int(count)
    # Forwards and backwards: two in each block, one in the embedding or head.
    each = 2 * (2 * chars.LAYERS + 1)
    assert calls["all-gather", hidden] == calls["reduce-scatter", hidden] == each
    assert calls["all-gather", hidden // chars.WIDTH * chars.VOCABULARY] == 1


def test_stages_send_activations_one_way_and_gradients_the_other() -> None:
    found = examine(Config(task="chars", pp=2, global_batch=16, micro_batch=4))
    hidden = 4 * chars.CONTEXT * chars.WIDTH * FLOAT
    for rank in found.ranks:
        for kind in ("send", "receive"):
            assert rank.traffic[Exchange(kind=kind, ranks=(0, 1), payload=hidden)] == 4
    assert sum(rank.memory[PARAMETERS] for rank in found.ranks) == CHARS_BYTES


def test_work_is_six_operations_per_weight_and_item_and_attention() -> None:
    found = examine(Config(task=LARGE, dp_shard=8, global_batch=8))
    tokens, width, layers = large.CONTEXT, large.WIDTH, large.LAYERS
    weights = large.MATRICES - large.VOCABULARY * width  # looking up a row takes none
    # Forwards two products of queries, keys and values, backwards five.
    attention = layers * 7 * 2 * tokens**2 * width
    assert found.ranks[0].flops == 6 * weights * tokens + attention


def test_bubbles_are_those_of_the_papers() -> None:
    for pp, count in ((2, 4), (4, 8), (4, 16)):
        one_stage = (pp - 1) / (count + pp - 1)
        assert bubble("GPipe", pp, count) == pytest.approx(one_stage)
        assert bubble("1F1B", pp, count) == pytest.approx(one_stage)
        # Half as long: each rank's second stage begins before its first has all.
        two_stages = (pp - 1) / (2 * count + pp - 1)
        assert bubble("Interleaved1F1B", pp, count) == pytest.approx(two_stages)
        assert bubble("ZBVZeroBubble", pp, count) < two_stages / 2


@pytest.mark.slow
def test_all_schedules_can_be_rehearsed() -> None:
    for schedule in get_args(ScheduleName):
        found = examine(Config(task="chars", pp=2, pp_schedule=schedule, global_batch=16))
        assert sum(rank.memory[PARAMETERS] for rank in found.ranks) == CHARS_BYTES, schedule
        assert set(found.bubbles) >= {"GPipe", schedule}


# What four ranks do, by the kind of axis; each kind starts ranks of its own.
REAL: dict[str, dict[str, dict[str, Any]]] = {
    "data": {
        "ddp with several buckets": {"task": WIDE, "strategy": "ddp", "micro_batch": 1},
        "fsdp, accumulating": {"task": "chars", "strategy": "fsdp", "micro_batch": 1},
        "hsdp and clipping": {"task": "chars", "dp_replicate": 2, "dp_shard": 2, "clip_norm": 1.0},
        "exact": {"task": "digits", "strategy": "ddp", "reduce": "exact"},
        "local sgd": {"task": "digits", "strategy": "local-sgd", "local_steps": 2},
    },
    "model": {
        "fsdp x tp": {"task": "chars", "dp_shard": 2, "tp": 2, "clip_norm": 1.0},
        "fsdp x cp": {"task": "chars", "dp_shard": 2, "cp": 2, "cp_method": "ulysses"},
        "pp x fsdp": {"task": "chars", "pp": 2, "dp_shard": 2, "clip_norm": 1.0},
        "pp x tp": {"task": "chars", "pp": 2, "tp": 2, "pp_schedule": "ZBVZeroBubble"},
    },
}
COUNTED_STEPS = 2


def sent_by(rank: int, kind: str) -> dict[str, dict[Exchange, float]]:
    """Make real steps of each case, and count the messages of those after the fourth.

    In the second, DDP sends its buckets to the other ranks; in the third at the latest, ranks
    compare for the first time what they hold.
    """
    rank_info = RankInfo(
        rank=rank, world_size=4, local_rank=rank, local_world_size=4, launched=True
    )
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    counted = {}
    for name, chosen in REAL[kind].items():
        config = Config(global_batch=8, **chosen)
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(config, config.layout_on(rank_info), group, Path(folder))
            for _ in range(4):
                trainer.train_step()
            with Traffic() as seen:
                for _ in range(COUNTED_STEPS):
                    trainer.train_step()
            # No rank removes its folder while another still writes its own.
            group.sum([0.0])
        counted[name] = {e: calls / COUNTED_STEPS for e, calls in seen.calls.items()}
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
def test_real_ranks_send_what_the_rehearsal_counts(kind: str) -> None:
    by_rank = on_ranks(4, sent_by, kind)
    for name, chosen in REAL[kind].items():
        sizes = {} if {"dp_shard", "pp"} & chosen.keys() else {axis_of(chosen): 4}
        found = examine(Config(global_batch=8, **{**chosen, **sizes}))
        for rank in found.ranks:
            real = by_rank[rank.rank][name]
            assert rank.traffic == real, f"{name}, rank {rank.rank}"


def axis_of(chosen: dict[str, Any]) -> str:
    return "dp_shard" if chosen["strategy"] == "fsdp" else "dp_replicate"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_real_tensors_need_the_memory_and_the_work_that_the_rehearsal_counts(
    checkpointing: bool,
) -> None:
    config = Config(
        task="chars", micro_batch=8, global_batch=32, activation_checkpointing=checkpointing
    )
    made, group = (
        tasks.load(config.task),
        RankGroup(rank_info=RankInfo(), device=torch.device("cpu")),
    )
    source = made.train()
    assert isinstance(source, Batch)
    with Memory() as memory:
        step = _Step(Parts(task=made, config=config, layout=Layout(), group=group), memory)
        batches = [source.take(torch.zeros(32, dtype=torch.int64)) for _ in range(2)]
        step.make(batches[0], 4, 1)
        memory.reset_peak()
        with Flops() as flops:
            step.make(batches[1], 4, 2)
    real, rehearsed = memory.peak(), examine(config).ranks[0]
    for kind in (PARAMETERS, GRADIENTS, OPTIMIZER, COMMUNICATION):
        assert real[kind] == rehearsed.memory[kind]
    # The batches of the whole share are real here.
    assert real[ACTIVATIONS] == pytest.approx(rehearsed.memory[ACTIVATIONS], rel=0.02)
    assert flops.total == rehearsed.flops


def test_checkpointing_activations_and_offloading_free_the_device() -> None:
    plain = examine(Config(task=LARGE, dp_shard=8, global_batch=8)).ranks[0]
    frugal = examine(
        Config(
            task=LARGE, dp_shard=8, global_batch=8, activation_checkpointing=True, cpu_offload=True
        )
    ).ranks[0]
    assert frugal.memory[ACTIVATIONS] < plain.memory[ACTIVATIONS] / 2
    assert frugal.flops > plain.flops
    assert PARAMETERS not in frugal.memory
    assert frugal.host_memory[PARAMETERS] == plain.memory[PARAMETERS]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_a_way_out_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(task=LARGE, dp_replicate=8, global_batch=8, device_memory="16GiB")
    console = Console(rank=0)
    assert show(config, console) == EXIT_USAGE
    text = capsys.readouterr().out
    assert "4.3 GiB parameters" in text
    assert "tried, and it fits: --dp-replicate 4 --dp-shard 2 (" in text
    mended = dataclasses.replace(config, dp_replicate=4, dp_shard=2)
    assert show(mended, console) == EXIT_DONE
    assert "\nfits: " in capsys.readouterr().out


def test_an_evaluation_that_does_not_fit_is_refused_with_a_smaller_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(task="chars", global_batch=16, eval_batch=240, device_memory="24MiB")
    assert show(config, Console(rank=0)) == EXIT_USAGE
    text = capsys.readouterr().out
    assert "  in evaluation\n" in text
    assert "--eval-batch 60 (" in text


def test_a_proof_that_takes_too_much_memory_is_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(task="chars", dp_replicate=2, device_memory="4MiB")
    show(config, Console(rank=0))
    line = r"\nno proof before training: [\d,]+ parameters take \S+ MiB per rank in the proof, of 4"
    assert re.search(line, capsys.readouterr().out)
    for changes in ({"device_memory": "80GiB"}, {"verify": False}, {"dp_replicate": None}):
        show(dataclasses.replace(config, **changes), Console(rank=0))
        assert "no proof" not in capsys.readouterr().out


@pytest.mark.slow
def test_thousands_of_ranks_need_no_launcher_and_little_memory() -> None:
    # The weights of one copy alone would need 4.3 GiB.
    program = (
        "import resource, sys; from train.__main__ import main; sys.argv[1:] = sys.argv[1:]\n"
        "status = main(); peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert peak < 2 * 2**20, peak\n"
        "sys.exit(status)"
    )
    flags = [
        *("--dry-run", "--task", LARGE, "--dp-shard", "4096", "--tp", "4", "--json"),
        *("--global-batch", "4096", "--device-memory", "80GB", "--nproc-per-node", "4"),
    ]
    ended = subprocess.run(
        [sys.executable, "-c", program, *flags],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["world_size"], found["nodes"], found["fits"]) == (16384, 4096, True)
    (rank,) = found["ranks"]
    crossing = {f["axes"] for f in rank["traffic"] if f["leaves_a_node"]}
    assert crossing == {"dp_shard", "dp_shard x tp"}


def test_too_few_pieces_for_a_schedule_are_refused_by_the_flags_that_were_given() -> None:
    config = Config(task="chars", pp=4, pp_schedule="Interleaved1F1B", micro_batch=4)
    with pytest.raises(UsageError, match=r"^--pp 4 with --pp-schedule Interleaved1F1B: .*8 parts"):
        examine(config)


class Choosy(Task):
    """Looks at values on its way, which a rehearsal does not have."""

    name = "choosy"

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def train(self) -> Batch:
        return Batch(inputs=torch.zeros(8, 4), targets=torch.zeros(8, 2))

    def test(self) -> Batch:
        return self.train()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs[targets > 0], targets[targets > 0], reduction="sum")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"strategy": "ps"}, "with one device per rank"),
        ({"strategy": "fsdp"}, "on how many ranks? Say so with --dp-shard 8"),
        ({"device_memory": "80"}, "write a number and a unit"),
        ({"task": "chars", "tp": 3}, "does not divide"),
        ({"task": f"{__file__}:Choosy"}, "depends on the values of a tensor"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        show(Config(**chosen), Console(rank=1))


@pytest.mark.parametrize("module", [simulate, devices])
def test_examples_are_right(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_nothing_stays_pretended() -> None:
    before = nn.Module.to, torch.UntypedStorage.resize_, dist.is_initialized()
    with pytest.raises(UsageError):
        examine(Config(task="chars", dp_shard=2, tp=3))
    examine(Config(task="digits"))
    assert (nn.Module.to, torch.UntypedStorage.resize_, dist.is_initialized()) == before
    assert torch.zeros(1).item() == 0
