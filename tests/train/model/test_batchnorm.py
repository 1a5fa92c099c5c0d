"""Batch normalisation over all ranks is that of one process with the whole batch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.train.support.ladder import Case, climb, trainer_of
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.data.order import Batch
from train.model import batchnorm
from train.model.batchnorm import limit_to_group, synchronised
from train.model.prepare import prepare
from train.parallel.layout import Layout
from train.proof.draws import double_precision
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo
from train.tasks import load

PICTURES = f"{Path(__file__).parents[1] / 'support/pictures.py'}:Pictures"

# In single precision the reference itself is off by 2e-6; a fault makes 0.1.
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-12}
DTYPES = (torch.float32, torch.float64)
SIZES = [5, 0, 2]
"""Samples of each rank: uneven, and none at all."""


def network(dimensions: int) -> nn.Module:
    """A small model all of whose parts matter."""
    torch.manual_seed(1)
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
    model = nn.Sequential(
        convolution(2, 3, 2, bias=False),
        norm(3),
        nn.ReLU(),
        convolution(3, 2, 1, bias=False),
        norm(2, affine=False),
        # In place, which a norm must bear.
        nn.LeakyReLU(0.5, inplace=True),
    )
    with torch.no_grad():
        model.get_parameter("1.weight").copy_(torch.tensor([1.0, -2.0, 0.5]))
        model.get_parameter("1.bias").copy_(torch.tensor([0.1, 0.2, 0.3]))
    return model


def samples(dimensions: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sum(SIZES), 2, *[3] * dimensions, generator=generator)


def trained(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Two passes, so that running statistics have moved twice: gradients and all the state."""
    inputs = inputs.clone().requires_grad_()
    for _ in range(2):
        model.train()
        outputs = model(inputs)
        outputs.pow(3).sum().backward()
    assert inputs.grad is not None
    found = {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        evaluated = model(inputs)
    return {
        **found,
        **model.state_dict(),
        "outputs": outputs.detach(),
        "evaluated": evaluated,
        "inputs": inputs.grad,
    }


def shared(rank: int, wrong: bool) -> list[dict[str, Tensor]]:
    """Train on this rank's samples; sum the gradients of parameters over the ranks."""
    found = []
    for dimensions in (1, 2, 3):
        for dtype in DTYPES:
            model = network(dimensions).to(dtype)
            sizes = [4, 2, 1] if wrong else SIZES
            if not wrong:
                model = synchronised(model)
            result = trained(model, torch.split(samples(dimensions).to(dtype), sizes)[rank])
            for name, tensor in result.items():
                if name.startswith("gradient"):
                    dist.all_reduce(tensor)
            found.append(result)
    return found


BY_SAMPLE = ("outputs", "evaluated", "inputs")


def largest_difference(ranks: Sequence[dict[str, Tensor]], alone: dict[str, Tensor]) -> float:
    """Compare what belongs to samples in one piece, and all the rest on each rank."""
    joined = {name: torch.cat([rank[name] for rank in ranks]) for name in BY_SAMPLE}
    worst = 0.0
    for rank in ranks:
        assert rank.keys() == alone.keys()
        for name, tensor in {**rank, **joined}.items():
            scale = max(1.0, alone[name].abs().max().item())
            worst = max(worst, (tensor - alone[name]).abs().max().item() / scale)
    return worst


def differences(wrong: bool) -> dict[tuple[int, torch.dtype], float]:
    cases = [(dimensions, dtype) for dimensions in (1, 2, 3) for dtype in DTYPES]
    ranks = on_ranks(len(SIZES), shared, wrong)
    return {
        (dimensions, dtype): largest_difference(
            [rank[number] for rank in ranks],
            trained(network(dimensions).to(dtype), samples(dimensions).to(dtype)),
        )
        for number, (dimensions, dtype) in enumerate(cases)
    }


def test_uneven_and_empty_batches_equal_one_process_with_all_of_them() -> None:
    for (dimensions, dtype), difference in differences(False).items():
        assert difference <= CLOSE[dtype], (dimensions, dtype)


def test_wrong_form_each_rank_by_itself_differs() -> None:
    assert min(differences(True).values()) > 0.1


def far_from_zero(rank: int) -> Tensor:
    """Normalise samples whose mean is large and whose spread is small."""
    model = synchronised(nn.Sequential(nn.BatchNorm1d(1, affine=False)))
    outputs: Tensor = model(1000.0 + torch.arange(6.0).view(6, 1)[rank::2] / 100)
    return outputs


def test_a_small_spread_far_from_zero_survives() -> None:
    """Sums of squares in single precision would lose it."""
    found = torch.stack(on_ranks(2, far_from_zero), dim=1).flatten()
    values = 1000.0 + torch.arange(6.0) / 100
    exact = values.double()
    wanted = (exact - exact.mean()) / (exact.var(correction=0) + 1e-5).sqrt()
    assert (found.double() - wanted).abs().max() <= 5e-3
    wrong = values.square().mean() - values.mean().square()
    assert abs(wrong - exact.var(correction=0)) > 0.1 * exact.var(correction=0)


def in_ddp_among(rank: int) -> tuple[Tensor, list[str]]:
    """Ranks 0 and 1 have the same samples, and so have 2 and 3, as tensor-parallel ones do."""
    torch.set_default_dtype(torch.float64)
    model = synchronised(network(2))
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    limit_to_group(model, groups[rank % 2])
    wrapped = DistributedDataParallel(model)
    wrapped(samples(2)[:4] if rank < 2 else samples(2)[4:])
    return model.get_buffer("1.running_var"), list(model.state_dict())


@double_precision()
def test_ranks_of_the_same_samples_count_once_and_names_stay() -> None:
    model = network(2)
    model(samples(2))
    for variance, names in on_ranks(4, in_ddp_among):
        assert (variance - model.get_buffer("1.running_var")).abs().max() <= CLOSE[torch.float64]
        assert names == list(model.state_dict())


def test_one_process_needs_no_group() -> None:
    alone = trained(network(2), samples(2))
    assert largest_difference([trained(synchronised(network(2)), samples(2))], alone) == 0.0


@pytest.mark.parametrize("sync_batch_norm", [False, True])
def test_recomputed_activations_move_statistics_once(sync_batch_norm: bool) -> None:
    ends = []
    for again in (False, True):
        config = Config(activation_checkpointing=again, sync_batch_norm=sync_batch_norm)
        task = load(PICTURES)
        torch.manual_seed(1)
        model = prepare(task.model(), task, config)
        batch = task.train()
        assert isinstance(batch, Batch)
        for _ in range(2):
            torch.autograd.backward(task.loss(model(batch.inputs), batch.targets))
        gradients = {f"{n} gradient": p.grad for n, p in model.named_parameters()}
        ends.append(model.state_dict() | gradients)
    once, twice = ends
    assert once.keys() == twice.keys()
    assert once["0.1.num_batches_tracked"] == 2
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_strategies_with_it_equal_one_process() -> None:
    """Uneven shares of 2, 2, 2 and 3 samples, each at once: micro-batches are normalised apart."""
    layouts: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "fsdp, from meta": {"strategy": "fsdp", "meta_init": True},
        "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    }
    common: dict[str, Any] = {"task": PICTURES, "global_batch": 9, "optimizer": "sgd", "lr": 0.1}
    cases = [
        Case(name=name, world_size=4, config=Config(sync_batch_norm=True, **common, **layout))
        for name, layout in layouts.items()
    ]
    for name, far in climb(cases).items():
        assert max(far.loss, far.gradients, far.weights) <= CLOSE[torch.float64], name


def after_training(rank: int, wrong: bool) -> dict[str, tuple[list[Tensor], list[float]]]:
    """Train with each strategy that averages; give buffers and this rank's view of all test data.

    Wrong: running statistics are left as they are.
    """
    torch.set_default_dtype(torch.float64)
    if wrong:
        batchnorm.average_buffers = lambda *_: None
    rank_info = RankInfo(
        rank=rank, world_size=3, local_rank=rank, local_world_size=3, launched=True
    )
    group = RankGroup(rank_info=rank_info, device=torch.device("cpu"))
    found = {}
    for strategy, sizes in (("ddp", {"dp_replicate": 3}), ("fsdp", {"dp_shard": 3})):
        config = Config(strategy=strategy, task=PICTURES, global_batch=15)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(config, Layout(**sizes), group, Path(folder))
            if wrong:
                # It would see that.
                trainer.saver.watch.due = lambda step: False  # type: ignore[method-assign]
            for _ in range(5):
                trainer.train_step()
        test = trainer.task.test()
        assert isinstance(test, Batch)
        tally = trainer.strategy.evaluate(test)
        found[strategy] = (
            [tensor.clone() for name, tensor in trainer.strategy.model_state().items()
             if "running" in name],
            [tally.loss.item(), *tally.score.tolist()],
        )  # fmt: skip
    return found


def test_after_training_all_ranks_hold_the_same_statistics_and_evaluate_alike() -> None:
    first, *others = on_ranks(3, after_training, False)
    for strategy, (statistics, evaluation) in first.items():
        assert statistics[0].abs().max() > 0.01
        for other in others:
            assert all(map(torch.equal, other[strategy][0], statistics))
            assert other[strategy][1] == evaluation
        # However the model is sharded, the statistics are the same.
        for mine, ddp in zip(statistics, first["ddp"][0], strict=True):
            assert (mine - ddp).abs().max() <= CLOSE[torch.float64]


def test_wrong_form_each_rank_keeps_its_own_statistics() -> None:
    first, *others = on_ranks(3, after_training, True)
    for strategy, (statistics, evaluation) in first.items():
        for other in others:
            assert not any(map(torch.equal, other[strategy][0], statistics))
            assert other[strategy][1] != evaluation
