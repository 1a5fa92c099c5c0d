"""A checkpoint of one layout loads in any other: each rank's part, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.train.support.ranks import on_ranks
from tests.train.support.reading import same, whole
from train.checkpoints import recovery, store
from train.checkpoints.checkpointer import Checkpointer
from train.checkpoints.reader import Stored
from train.checkpoints.store import Position, State
from train.runtime.process_group import RankGroup
from train.runtime.rank import RankInfo

RANKS = 4
STATE = State(step=3, epoch=0, samples_seen=192, world_size=RANKS, identity={}, config={})
HERE = Position(attempt=0, step=3)


def group_of(rank: int) -> RankGroup:
    rank_info = RankInfo(rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS)
    return RankGroup(rank_info=rank_info, device=torch.device("cpu"))


class Odd(nn.Module):
    """Sizes that nothing divides, a scalar, a counter, and less rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.tensor(7))


def trained(change: Callable[[nn.Module], object]) -> dict[str, Tensor]:
    """The state of a model after it was cut and made two optimizer steps; the same for all cuts."""
    torch.manual_seed(0)
    model = Odd()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for number in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number / 10)
        optimizer.step()
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            found[f"optimizer.{name}/{slot}"] = value
    return found


def plain(model: nn.Module) -> None:
    """All of it on every rank (DDP)."""


def sharded(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))


def hybrid_sharded(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def cut(model: nn.Module, size: int = RANKS) -> None:
    mesh = init_device_mesh("cpu", (RANKS // size, size), mesh_dim_names=("data", "tp"))
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    if size < RANKS:
        fully_shard(model, mesh=mesh["data"])


def sharded_and_cut(model: nn.Module) -> None:
    cut(model, 2)


CUTS = (plain, sharded, hybrid_sharded, cut, sharded_and_cut)


def stages(rank: int) -> dict[str, Tensor]:
    """Other tensors on other ranks (pipeline); two ranks have each."""
    held = ("first", "last", "scale", "steps")[: RANKS // 2]
    mine = held[rank // 2]
    others = () if rank < 2 else ("scale", "steps")
    keep = (mine, *others)
    return {n: t for n, t in trained(plain).items() if n.split(".")[1].split("/")[0] in keep}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def save_and_load_everywhere(rank: int, root: Path) -> list[str]:
    """Every layout saves; every layout reads what every other has saved."""
    group, wrong = group_of(rank), []
    layouts = {change.__name__: trained(change) for change in CUTS}
    layouts["stages"] = stages(rank)
    expected = {name: whole_of(tensors) for name, tensors in layouts.items()}
    for apart in (False, True):
        for writer, tensors in layouts.items():
            run_dir = root / writer / (f"apart/{rank}" if apart else "together")
            run_dir.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            checkpointer = Checkpointer(run_dir, group)
            assert checkpointer.shared is not apart
            checkpointer.save(HERE, STATE, tensors)
            checkpointer.wait()
            seen, source = recovery.find(run_dir, group, shared=not apart)
            assert source == 0
            assert seen[0].best == HERE
            found = recovery.describe(run_dir, group, HERE, source=0, shared=not apart)
            for reader, before in layouts.items():
                live = {name: t.detach().clone() for name, t in before.items()}
                for tensor in live.values():
                    local(tensor).fill_(5)
                recovery.load(run_dir, group, found, live)
                if not same(whole_of(live), expected[reader]):
                    wrong.append(f"{writer} to {reader}, apart={apart}")
            dist.barrier()
    return wrong


@pytest.mark.slow
def test_what_one_layout_has_saved_any_other_loads(tmp_path: Path) -> None:
    wrong = on_ranks(RANKS, save_and_load_everywhere, tmp_path)
    assert wrong == [[]] * RANKS
    reference = whole_of(trained(plain))
    assert len(reference) == 6 + 3 * 5
    for writer in (*(change.__name__ for change in CUTS), "stages"):
        for folder in ("together", "apart/0"):
            path = HERE.path(tmp_path / writer / folder)
            store.verify(path)
            # By one process, and by libraries that know nothing of us.
            live = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
            Stored(path).load(live)
            assert same(live, reference), path
            assert same(whole(path), reference), path
        # Nothing is left of what the others have sent.
        assert not (tmp_path / writer / "apart/1/checkpoints").exists()
        assert not list((tmp_path / writer).rglob("*.tmp"))
        assert not list((tmp_path / writer).rglob(".shared-*"))
    live = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    with pytest.warns(UserWarning, match="single process"):
        torch_load(live, storage_reader=HuggingFaceStorageReader(str(path)))
    assert same(live, reference)
    shares = [p.stat().st_size for p in (HERE.path(tmp_path / "plain/together")).glob("rank-*")]
    assert len(shares) == RANKS
    assert max(shares) < 0.6 * sum(shares)
