"""What introductions to distributed training get wrong, mostly in silence, beside our form.

Traps of sampling are in test_sampling, of evaluation in test_evaluation, of pipelines in
test_pipeline, of meeting in test_meeting, of checkpoints in test_checkpoint_async.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.train.support.making import group_of, trainer_for
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.parallel.base import local
from train.runtime.process_group import disconnect, limit_waiting, open_group
from train.runtime.rank import RankInfo

# Time limit for waits that are expected to fail; earlier waits have no limit.
BRIEF_S = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def samples(rank: int, count: int = 4) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(rank))


def backward(through: nn.Module, inputs: Tensor) -> None:
    torch.autograd.backward(through(inputs).square().sum())


def same_on_all(tensor: Tensor) -> bool:
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.detach())
    return all(torch.equal(one, both[0]) for one in both)


def gradient(module: nn.Module) -> Tensor:
    found = module.get_parameter("weight").grad
    assert found is not None
    return found


def wrapper_not_used(rank: int, folder: Path) -> Any:
    """`DDP(model)` without `model = `: nothing is exchanged."""
    plain = model()
    DistributedDataParallel(plain)
    backward(plain, samples(rank))
    return {"wrong": same_on_all(gradient(plain)), "ours": ours_exchanges(rank, folder)}


def ours_exchanges(rank: int, folder: Path) -> bool:
    trainer = trainer_for(rank, 2, folder, strategy="ddp", optimizer="sgd")
    trainer.train_step()
    return all(same_on_all(p) for _, p in trainer.strategy.named_parameters())


def optimizer_too_early(rank: int, folder: Path) -> Any:
    """An optimizer built before `fully_shard` holds parameters that nothing uses any more."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    fully_shard(plain)
    before = plain.state_dict()["weight"].full_tensor().clone()
    backward(plain, samples(rank))
    optimizer.step()
    wrong = not torch.equal(before, plain.state_dict()["weight"].full_tensor())
    trainer = trainer_for(rank, 2, folder, strategy="fsdp")
    first = next(tensor for tensor in trainer.strategy.model_state().values())
    before = first.full_tensor().clone()  # type: ignore[attr-defined]
    trainer.train_step()
    return {"wrong": wrong, "ours": not torch.equal(before, first.full_tensor())}  # type: ignore[attr-defined]


def forgotten_between(rank: int, folder: Path) -> Any:
    """`zero_grad()` in every micro-step: the gradient is the last one's alone."""
    whole, last, each = model(), model(), model()
    backward(whole, samples(rank))
    backward(last, samples(rank)[2:])
    for part in torch.split(samples(rank), 2):
        each.zero_grad()
        backward(each, part)
    assert torch.equal(gradient(each), gradient(last))
    ends = []
    for size in (8, 1):
        trainer = trainer_for(rank, 2, folder, strategy="ddp", micro_batch=size)
        parts = trainer.feed.batch(0).split_into(trainer.micro_batches)
        trainer.strategy.accumulate(parts)
        named = dict(trainer.strategy.named_parameters())
        found = named["0.weight"].grad
        assert found is not None
        ends.append(found)
    return {
        "wrong": torch.allclose(gradient(each), gradient(whole)),
        "ours": torch.allclose(ends[0], ends[1], rtol=0.0, atol=1e-12),
    }


def exchanged_each_time(rank: int, folder: Path) -> Any:
    """Accumulation without `no_sync()`: right, and as many exchanges as micro-batches."""
    wrapped = DistributedDataParallel(model())
    calls = counted(wrapped)
    for part in torch.split(samples(rank), 1):
        backward(wrapped, part)
    wrong = len(calls)
    trainer = trainer_for(rank, 2, folder, strategy="ddp", micro_batch=1)
    assert trainer.micro_batches == 4
    calls = counted(trainer.strategy.run)  # type: ignore[attr-defined]
    trainer.train_step()
    return {"wrong": wrong == 1, "ours": len(calls) == 1}


def counted(wrapped: DistributedDataParallel) -> list[int]:
    calls: list[int] = []

    def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

    # DDP compares these with types, and they are strings.
    hook.__annotations__.clear()
    wrapped.register_comm_hook(None, hook)
    return calls


def names_with_a_prefix(rank: int, folder: Path) -> Any:
    """`ddp.state_dict()`: no plain model can load it."""
    plain, names = model(), set(DistributedDataParallel(model()).state_dict())
    ours = trainer_for(rank, 2, folder, strategy="ddp").strategy.model_state().keys()
    alone = trainer_for(rank, 1, folder, strategy="single").strategy.model_state().keys()
    return {"wrong": names == plain.state_dict().keys(), "ours": ours == alone}


def own_loss_logged(rank: int, folder: Path) -> Any:
    """A rank's own loss is no other's; ours is the mean over the whole batch on all of them."""
    trainer = trainer_for(rank, 2, folder, strategy="ddp", global_batch=9)
    accumulate, own = trainer.strategy.accumulate, []

    def watched(parts: Any, factor: float = 1.0) -> Any:
        found = accumulate(parts, factor)
        own.append(found.loss / found.count)
        return found

    trainer.strategy.accumulate = watched  # type: ignore[assignment,method-assign]
    trainer.train_step()
    logged = torch.tensor(trainer.progress.metrics["loss"])
    return {"wrong": same_on_all(own[0]), "ours": same_on_all(logged)}


def barrier_for_one(rank: int, folder: Path) -> Any:
    """A barrier inside `if rank == 0` waits for ranks that never come."""
    group = dist.new_group()
    wrong = True
    if rank == 0:
        limit_waiting(group, timeout_s=BRIEF_S)
        try:
            dist.barrier(group)
        except RuntimeError:
            wrong = False
    done: list[int] = []
    group_of(rank, 2).on_rank_0(lambda: done.append(1))
    return {"wrong": wrong and rank == 0, "ours": len(done) == (rank == 0)}


def evaluated_by_one(rank: int, folder: Path) -> Any:
    """Evaluation through DDP on rank 0 alone: buffers are broadcast to ranks that do not listen."""
    group = dist.new_group()
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    wrapped = DistributedDataParallel(net, process_group=group)
    right = torch.full((1,), 2.0)
    limit_waiting(group, timeout_s=BRIEF_S)
    try:
        if rank == 0:
            wrapped.eval()
            with torch.no_grad():
                wrapped(samples(0))
        one = torch.ones(1)
        # The next exchange meets the wrong partner.
        dist.all_reduce(one, group=group)
        wrong = torch.equal(one, right)
    except RuntimeError:
        wrong = False
    dist.barrier()
    trainer = trainer_for(rank, 2, folder, strategy="ddp")
    trainer.evaluate()
    return {"wrong": wrong, "ours": "test_accuracy" in trainer.progress.metrics}


def uneven_numbers_of_batches(rank: int, folder: Path) -> Any:
    """Rank 0 has a batch more than rank 1: without torch's Join, it waits in its backward pass."""
    group = dist.new_group()
    wrapped = DistributedDataParallel(model(), process_group=group)
    backward(wrapped, samples(rank))
    wrong = True
    if rank == 0:
        limit_waiting(group, timeout_s=BRIEF_S)
        try:
            backward(wrapped, samples(rank))
        except RuntimeError:
            wrong = False
    dist.barrier()
    # Five samples in micro-batches of one: two for rank 0, three for rank 1, and three passes each.
    trainer = trainer_for(rank, 2, folder, strategy="ddp", global_batch=5, micro_batch=1)
    trainer.train_step()
    return {"wrong": wrong and rank == 0, "ours": trainer.micro_batches == 3}


def joined(rank: int, folder: Path) -> Any:
    """With torch's Join no rank waits, but a step for which one rank has samples is half a step."""
    ours, alone = model(), model()
    wrapped = DistributedDataParallel(ours)
    with Join([wrapped]):
        descend(wrapped, torch.split(samples(rank)[: 2 - rank], 1))
    descend(alone, [torch.cat([samples(0)[:1], samples(1)[:1]]), samples(0)[1:2]])
    states = []
    for ranks, strategy in ((2, "ddp"), (1, "single")):
        chosen = {"strategy": strategy, "optimizer": "sgd", "global_batch": 5, "micro_batch": 1}
        trainer = trainer_for(rank, ranks, folder / strategy, **chosen)
        trainer.train_step()
        states.append(trainer.strategy.model_state())
    several, one = states
    return {
        "wrong": torch.allclose(weight(ours), weight(alone), rtol=1e-3),
        "ours": all(torch.allclose(several[n], one[n], rtol=0.0, atol=1e-12) for n in one),
    }


def descend(through: nn.Module, batches: Iterable[Tensor]) -> None:
    """Make a step for each batch, along the gradient of its mean."""
    optimizer = torch.optim.SGD(through.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        torch.autograd.backward(through(batch).square().mean())
        optimizer.step()


def group_left_open(rank: int, folder: Path) -> Any:
    """Without `destroy_process_group()` a process has had its only run."""

    def connect(name: str) -> None:
        place = f"file://{folder}/{name}"
        dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)

    try:
        connect("wrong")
        wrong = True
    except ValueError:
        wrong = False
    disconnect()
    sums = []
    for number in range(2):
        config = Config(strategy="ddp", init_method=f"file://{folder}/{number}")
        with open_group(RankInfo(launched=True), config) as group:
            sums += group.sum([1.0])
    connect("as it was")
    return {"wrong": wrong, "ours": sums == [1.0, 1.0]}


def replicas_of_cut_layers(rank: int, folder: Path) -> Any:
    """`replicate` around tensor parallelism: split parameters are silently never trained."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    gathered = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net, mesh["tp"], {"0": gathered})
    cut, whole = local(weight(net[0])).clone(), weight(net[1]).clone()
    replicate(net, device_mesh=mesh["dp"])
    # With the first batch it puts other parameters in place; behind that batch they are hidden.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        backward(net, samples(rank // 2))
        optimizer.step()
    assert not torch.equal(whole, weight(net[1]))
    trainer = trainer_for(rank, 4, folder, dp_replicate=2, tp=2)
    states = []
    for _ in range(2):
        state = trainer.strategy.model_state()
        states.append({name: local(tensor).clone() for name, tensor in state.items()})
        trainer.train_step()
    before, after = states
    return {
        "wrong": not torch.equal(cut, local(weight(net[0]))),
        "ours": not any(torch.equal(before[name], after[name]) for name in before),
    }


def copies_of_stages(rank: int, folder: Path) -> Any:
    """DDP around the stages of GPipe: an internal assertion of torch's fails in the second step."""
    chosen = {"pp": 2, "dp_shard": 2, "pp_schedule": "GPipe", "micro_batch": 2}
    trainer = trainer_for(rank, 4, folder, **chosen)
    for _ in range(2):
        trainer.train_step()
    pipelines = [dist.new_group([copy, 2 + copy]) for copy in range(2)]
    copies = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in range(2)]
    stage, copy = divmod(rank, 2)
    wrapped = DistributedDataParallel(nn.Linear(3, 3), process_group=copies[stage])
    held = PipelineStage(wrapped, stage, 2, torch.device("cpu"), group=pipelines[copy])
    schedule = ScheduleGPipe(held, 2, lambda out, target: (out - target).square().sum())
    batch, steps = samples(copy), 0
    try:
        # The first stage makes the second step alone: it does not come so far as to need another.
        for _ in range(2 - stage):
            schedule.step(*([] if stage else [batch]), target=batch if stage else None)
            steps += 1
    except RuntimeError as error:
        assert "INTERNAL ASSERT FAILED" in str(error.__cause__)
    return {"wrong": steps != 1, "ours": trainer.progress.step == 2}


def weight(module: nn.Module) -> Tensor:
    """A parameter, or its replacement."""
    found = module.weight
    assert isinstance(found, Tensor)
    return found.detach()


# By the number of ranks that it takes.
TRAPS: dict[int, tuple[Callable[[int, Path], Any], ...]] = {
    1: (group_left_open,),
    2: (
        wrapper_not_used,
        optimizer_too_early,
        forgotten_between,
        exchanged_each_time,
        names_with_a_prefix,
        own_loss_logged,
        barrier_for_one,
        evaluated_by_one,
        uneven_numbers_of_batches,
        joined,
    ),
    4: (replicas_of_cut_layers, copies_of_stages),
}


def all_traps(rank: int, ranks: int) -> dict[str, dict[str, bool]]:
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        return {trap.__name__: trap(rank, Path(folder)) for trap in TRAPS[ranks]}


@pytest.fixture(scope="module")
def tried() -> Callable[[int], list[dict[str, dict[str, bool]]]]:
    """Whether each form behaves as it seems to, by rank and trap."""
    return cache(lambda ranks: on_ranks(ranks, all_traps, ranks))


@pytest.mark.parametrize(
    ("ranks", "trap"), [(ranks, trap.__name__) for ranks, traps in TRAPS.items() for trap in traps]
)
def test_wrong_form_fails_where_ours_does_not(
    ranks: int, trap: str, tried: Callable[[int], list[dict[str, dict[str, bool]]]]
) -> None:
    assert [rank[trap] for rank in tried(ranks)] == [{"wrong": False, "ours": True}] * ranks


def test_a_loader_handed_to_processes_is_copied_with_its_data() -> None:
    data = TensorDataset(torch.randn(1000, 100))
    loader = DataLoader(data, batch_size=10, shuffle=True)
    # Every process would be sent all of it, and shuffle all of it.
    assert len(pickle.dumps(loader)) > 4 * 1000 * 100
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(DataLoader(data, collate_fn=lambda samples: samples))
    # What `--spawn` hands over is the command line.
    assert len(pickle.dumps(Config())) < 4096


def test_a_sampler_built_before_the_process_group_knows_no_ranks() -> None:
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        DistributedSampler(TensorDataset(torch.zeros(4)))


def test_a_rank_that_is_missing_is_missed_sooner_than_by_default() -> None:
    assert timedelta(seconds=Config().timeout_s) < default_pg_timeout
