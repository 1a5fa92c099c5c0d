"""Pipelines: what the ladder of test_ladder.py does not show of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

from tests.train.support.ladder import Case, climb
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import Batch
from train.errors import UsageError
from train.parallel.base import Parts, Sums, Tally
from train.parallel.layout import Layout
from train.parallel.one_process import Single
from train.parallel.pipeline import split
from train.parallel.pipeline.schedule import Pipelined
from train.parallel.pipeline.stages import plan
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.tasks.base import Classifier

ALL = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip
MICRO_BATCHES = 4


class Across(nn.Module):
    """Mixes features by groups; its gradient is not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        by_group = hidden.view(-1, 4, 4).transpose(1, 2)
        mixed: Tensor = self.mix(by_group).transpose(1, 2).flatten(1)
        return mixed


class Awkward(Classifier):
    """Running statistics, pieces without parameters, activations that lie across."""

    name = "awkward"

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), Across(), nn.ReLU(), Across(),
            nn.BatchNorm1d(16), nn.Linear(16, 3),
        )  # fmt: skip

    def train(self) -> Batch:
        generator = torch.Generator().manual_seed(1)
        return Batch(
            inputs=torch.randn(29, 8, generator=generator),
            targets=torch.randint(3, (29,), generator=generator),
        )

    def test(self) -> Batch:
        return self.train()


def parts_of(schedule: str, rank: int, task: Classifier, **config: Any) -> Parts:
    """A pipeline of two ranks."""
    rank_info = RankInfo(
        rank=rank, world_size=2, local_rank=rank, local_world_size=2, launched=True
    )
    return Parts(
        task=task,
        config=Config(pp_schedule=schedule, global_batch=16, **config),  # type: ignore[arg-type]
        layout=Layout(pp=2),
        group=RankGroup(rank_info=rank_info, device=torch.device("cpu")),
    )


def single_of(parts: Parts) -> Single:
    alone = RankGroup(rank_info=RankInfo(), device=torch.device("cpu"))
    return Single(dataclasses.replace(parts, layout=Layout(), group=alone))


def gradients(strategy: Single | Pipelined) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in strategy.named_parameters() if p.grad is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    """What a strategy made of some batches."""

    names: list[str]
    gradients: dict[str, Tensor]
    sums: Sums
    state: dict[str, Tensor]
    tally: Tally
    after: dict[str, Tensor]
    """State and gradients after an evaluation."""
    random: int
    """What the generator gives next."""
    loaded: dict[str, Tensor]


def passage(strategy: Single | Pipelined) -> Passage:
    samples = Awkward().train()
    torch.manual_seed(5)
    sums = strategy.accumulate(samples.part(0, 16).split_into(MICRO_BATCHES), factor=4.0)
    random = int(torch.randint(2**31, ()))
    state = {name: tensor.clone() for name, tensor in strategy.model_state().items()}
    passed = gradients(strategy)
    # 13: no multiple of anything.
    tally = strategy.evaluate(samples.part(16, 29))
    after = strategy.model_state() | {f"{n} grad": g for n, g in gradients(strategy).items()}
    after = {name: tensor.clone() for name, tensor in after.items()}
    strategy.load_model_state({name: torch.full_like(t, 7) for name, t in state.items()})
    return Passage(
        names=[name for name, _ in strategy.named_parameters()],
        gradients=passed,
        sums=sums,
        state=state,
        tally=tally,
        after=after,
        random=random,
        loaded={name: tensor.clone() for name, tensor in strategy.model_state().items()},
    )


def passages(rank: int) -> dict[str, tuple[Passage, Passage]]:
    """On each of two ranks: of every schedule, the pipeline's and one process's."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for schedule in ALL:
        parts = parts_of(schedule, rank, Awkward())
        found[schedule] = passage(Pipelined(parts)), passage(single_of(parts))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Passage, Passage]]]:
    return on_ranks(2, passages)


@pytest.mark.parametrize("schedule", ALL)
def test_each_parameter_is_on_one_rank_under_its_plain_name(
    ranks: list[dict[str, tuple[Passage, Passage]]], schedule: str
) -> None:
    (first, one), (second, _) = (rank[schedule] for rank in ranks)
    assert sorted(first.names + second.names) == sorted(one.names)
    assert first.names and second.names
    assert sorted([*first.state, *second.state]) == sorted(one.state)


@pytest.mark.parametrize("schedule", ALL)
def test_a_step_and_an_evaluation_equal_those_of_one_process(
    ranks: list[dict[str, tuple[Passage, Passage]]], schedule: str
) -> None:
    (first, one), (second, _) = (rank[schedule] for rank in ranks)
    # Times the factor; running statistics have moved once per micro-batch, not more often.
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(first.gradients | second.gradients, one.gradients)
    close(first.state | second.state, one.state)
    # Without the factor; only the rank of the last stage reports it.
    told, silent = (first, second) if schedule in split.V_SHAPED else (second, first)
    close(told.sums.loss, one.sums.loss)
    assert (told.sums.count, silent.sums.count, silent.sums.loss.item()) == (16, 0, 0.0)
    close(told.tally.loss, one.tally.loss)
    assert torch.equal(told.tally.score, one.tally.score)
    assert (told.tally.count, silent.tally.count, silent.tally.loss.item()) == (13, 0, 0.0)
    assert silent.tally.score.numel() == 0


@pytest.mark.parametrize("schedule", ALL)
def test_evaluation_and_preparations_leave_no_trace(
    ranks: list[dict[str, tuple[Passage, Passage]]], schedule: str
) -> None:
    for pipelined, one in (rank[schedule] for rank in ranks):
        before = pipelined.state | {f"{n} grad": g for n, g in pipelined.gradients.items()}
        assert before.keys() == pipelined.after.keys()
        assert all(torch.equal(before[name], pipelined.after[name]) for name in before)
        assert pipelined.random == one.random
        assert all((tensor == 7).all() for tensor in pipelined.loaded.values())


def trained_without_metadata(rank: int) -> int | None:
    """Let torch infer the shapes in and out of a stage with batch normalisation."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    made = PipelineStage(own, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(made, 2, lambda out, target: (out - target).square().sum())
    batch = torch.randn(8, 4)
    schedule.step(*([batch] if rank == 0 else []), target=batch if rank else None)
    return int(own[1].num_batches_tracked)  # type: ignore[arg-type]


def test_wrong_form_torchs_own_shape_inference_moves_running_statistics() -> None:
    # Two micro-batches, and one that never was.
    assert on_ranks(2, trained_without_metadata) == [3, 3]


def wrapped_in_ddp(rank: int) -> dict[str, float]:
    """Two stages times two copies: how far apart the copies' gradients are, by schedule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return {schedule: _apart(schedule, rank // 2, rank % 2, mesh) for schedule in ALL}


def _apart(schedule: str, stage_rank: int, copy: int, mesh: DeviceMesh) -> float:
    group, copies = mesh.get_group("pp"), mesh.get_group("dp")
    torch.manual_seed(0)
    pieces = [DistributedDataParallel(nn.Linear(4, 4), process_group=copies) for _ in range(4)]
    held, count = split.stages_of(stage_rank, schedule, 2), split.stage_count(schedule, 2)
    made = [PipelineStage(pieces[n], n, count, torch.device("cpu"), group=group) for n in held]
    run = get_schedule_class(schedule)(
        made[0] if len(made) == 1 else made,
        n_microbatches=4,
        loss_fn=lambda out, target: (out - target).square().sum(),
        scale_grads=False,
    )
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(copy))
    inputs = [batch] if 0 in held else []
    run.step(*inputs, target=batch if count - 1 in held else None)
    apart = 0.0
    for parameter in itertools.chain(*(pieces[number].parameters() for number in held)):
        assert parameter.grad is not None
        both = [torch.empty_like(parameter.grad) for _ in range(2)]
        dist.all_gather(both, parameter.grad, group=copies)
        apart = max(apart, (both[0] - both[1]).abs().max().item())
    return apart


def test_wrong_form_ddp_around_stages_leaves_copies_apart() -> None:
    ranks = on_ranks(4, wrapped_in_ddp)
    apart = {schedule for rank in ranks for schedule in ALL if rank[schedule] > 1e-3}
    # Silently: each copy has the gradients of its own samples only.
    assert apart == set(split.TWO_PASSES)


RESHARDING = """
from torch.distributed.fsdp import FSDPModule
FSDPModule.set_reshard_after_forward = lambda self, wanted: None
"""


def test_wrong_form_sharding_again_between_passes_loses_gradients() -> None:
    config = Config(
        task="chars", global_batch=8, lr=1e-4, pp=2, dp_shard=2, micro_batch=1,
        pp_schedule="DualPipeV",
    )  # fmt: skip
    wrong = Case(name="wrong", world_size=4, config=config, sabotage=RESHARDING)
    (found,) = climb([wrong]).values()
    # Silently: no error, other gradients. The right form is on the ladder.
    assert found.gradients > 0.01


def constructible(rank: int) -> dict[tuple[str, int, int], bool]:
    """Whether torch makes a schedule for so many ranks and micro-batches."""
    found = {}
    for pp in (2, 3, 4):
        group = dist.new_group(list(range(pp)))
        # Else a rank may be gone while another still connects to it.
        dist.barrier()
        # Building a schedule sends no message.
        if rank > 0:
            continue
        for schedule, count in itertools.product(ALL, range(1, 14)):
            total = split.stage_count(schedule, pp)
            made = [
                PipelineStage(nn.Linear(1, 1), n, total, torch.device("cpu"), group=group)
                for n in split.stages_of(rank, schedule, pp)
            ]
            try:
                get_schedule_class(schedule)(
                    made[0] if len(made) == 1 else made, n_microbatches=count
                )
            except ValueError:
                found[schedule, pp, count] = False
            else:
                found[schedule, pp, count] = True
    return found


def test_torch_makes_the_schedules_that_we_say_it_makes() -> None:
    found = on_ranks(4, constructible)[0]
    assert len(found) == 3 * 13 * len(ALL)
    assert found == {case: split.accepts(*case) for case in found}


@pytest.mark.parametrize(
    ("schedule", "pp", "shards", "batch", "count"),
    [
        ("1F1B", 2, 1, 64, 4),
        ("1F1B", 4, 2, 64, 8),
        ("Interleaved1F1B", 4, 1, 64, 16),
        ("ZBVZeroBubble", 2, 1, 12, 6),
        # A prime share: all, or one by one.
        ("GPipe", 4, 1, 7, 7),
        ("GPipe", 2, 1, 7, 1),
        ("1F1B", 2, 1, 7, 7),
    ],
)
def test_default_is_two_micro_batches_per_stage_where_that_divides(
    schedule: str, pp: int, shards: int, batch: int, count: int
) -> None:
    config = Config(pp_schedule=schedule, global_batch=batch)  # type: ignore[arg-type]
    assert split.micro_batches(config, Layout(pp=pp, dp_shard=shards)) == count


@pytest.mark.parametrize(
    ("layout", "config", "says"),
    [
        (Layout(), {"strategy": "pp"}, "at least 2 ranks"),
        (
            Layout(pp=2, dp_shard=3),
            {"global_batch": 64},
            "64 samples for 3 ranks are 3 x 21 + 1; use --global-batch 63 or 66",
        ),
        (
            Layout(pp=2),
            {"micro_batch": 7},
            "share of 64 samples is 9 x 7 + 1; use --micro-batch 32, 16, 8, 4, 2 or 1",
        ),
        (
            Layout(pp=4),
            {"micro_batch": 32},
            "64 samples makes 2 micro-batches, but schedule 1F1B needs at least one for each of 4 "
            "stages; use --micro-batch 16, 8, 4, 2 or 1",
        ),
        (
            Layout(pp=4),
            {"global_batch": 3},
            "a rank's share of 3 samples makes at most 3 micro-batches, but schedule 1F1B needs at "
            "least one for each of 4 stages; use --global-batch 4 or more, or --pp-schedule GPipe",
        ),
        (
            Layout(pp=2),
            {"pp_schedule": "DualPipeV", "compile": True},
            "use --pp-schedule Interleaved1F1B, or leave out --compile",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_arithmetic(
    layout: Layout, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        split.check(Config(**config), layout)


class Tied(Awkward):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model


class Outside(Awkward):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.bias = nn.Parameter(torch.zeros(4))
        return model


@pytest.mark.parametrize(
    ("task", "schedule", "says"),
    [
        (Awkward, "1F1B", None),
        (Tied, "1F1B", None),
        (Outside, "1F1B", "no stage would hold parameter 'bias'"),
        (Tied, "Interleaved1F1B", "4 parts, but only 2 of its pieces ('0', '1') have parameters"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    task: Callable[[], Classifier], schedule: str, says: str | None
) -> None:
    parts = parts_of(schedule, 0, task())
    if says is None:
        assert [len(names) > 0 for names in plan(parts.task.model(), parts)] == [True, True]
        return
    with pytest.raises(UsageError, match=re.escape(says)):
        plan(parts.task.model(), parts)
