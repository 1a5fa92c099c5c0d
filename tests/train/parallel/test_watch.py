"""Ranks that no longer hold the same end the run before a checkpoint holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.support import kinds
from tests.train.support.making import trainer_for
from tests.train.support.ranks import on_ranks
from train.errors import ReplicaError, UsageError
from train.loop import Trainer
from train.parallel.base import local
from train.parallel.checksum import FACTORS, SMALL_BYTES, Summands, checksum, checksums

FILE = Path(kinds.__file__)
RANKS = 4
COMMON: dict[str, Any] = {"task": f"{FILE}:Moved", "global_batch": 8, "lr": 0.01}
# By name: options, and a tensor of which some ranks hold the same part.
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({"strategy": "ddp"}, "last.weight"),
    "exact": ({"reduce": "exact", "virtual_shards": 4}, "last.bias"),
    "hsdp": ({"strategy": "hsdp", "dp_shard": 2, "dp_replicate": 2}, "first.0.weight"),
    "fsdp, a buffer": ({"strategy": "fsdp"}, "middle.0.mean"),
    "pp x dp": ({"pp": 2, "dp_replicate": 2, "micro_batch": 2}, "last.weight"),
    "dp x tp": ({"dp_replicate": 2, "tp": 2}, "first.0.weight"),
    "local-sgd": ({"strategy": "local-sgd", "local_steps": 2}, "last.weight"),
}


def flip_a_bit(trainer: Trainer, name: str) -> None:
    """The last of a number's mantissa."""
    tensor = trainer.strategy.model_state().get(name)
    if tensor is not None:
        local(tensor).detach().view(torch.uint8).reshape(-1)[0] ^= 1


def caught(trainer: Trainer, *, save: bool) -> str:
    watch = trainer.saver.watch
    try:
        if save:
            trainer.saver.save(trainer.progress, epoch=0)
            trainer.saver.wait()
        else:
            watch.check(trainer.group.sum(watch.numbers(trainer.progress)))
    except ReplicaError as error:
        return str(error)
    return ""


def watched(rank: int, root: Path) -> dict[str, list[str]]:
    found = {}
    for name, (chosen, tensor) in LAYOUTS.items():
        trainer = trainer_for(rank, RANKS, root / name, **{**COMMON, **chosen})
        trainer.resume()
        for _ in range(2):
            trainer.train_step()
        found[name] = [caught(trainer, save=save) for save in (False, True)]
        # As a start that finds its last checkpoint would.
        trainer.progress.step += 1
        if rank == 3:
            flip_a_bit(trainer, tensor)
        found[name] += [caught(trainer, save=save) for save in (False, True)]
        found[name].append(" ".join(sorted(p.name for p in (root / name).rglob("step-*"))))
    return found


def test_a_flipped_bit_on_one_rank_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(RANKS, watched, tmp_path)):
        for name, (sound, saved, flipped, unsaved, checkpoints) in found.items():
            assert (sound, saved) == ("", ""), (rank, name)
            assert flipped == unsaved, (rank, name)
            assert f"no longer do: {LAYOUTS[name][1]} on rank" in flipped, (rank, name)
            assert "3" in flipped.partition("on rank")[2].partition(";")[0], (rank, name)
            assert checkpoints.count("step") == 1, (rank, name)


def part(rank: int, root: Path) -> list[str]:
    """A moment of the optimizer, which only checkpoints hold, and steps that do not agree."""
    trainer = trainer_for(rank, 2, root, **{**COMMON, "strategy": "ddp"})
    trainer.resume()
    trainer.train_step()
    found = []
    if rank == 1:
        state = trainer.optimizer.tensors()
        state["last.weight/exp_avg"].view(torch.int64)[0, 0] ^= 1
    found += [caught(trainer, save=save) for save in (False, True)]
    if rank == 1:
        trainer.progress.samples_seen += 1
    return [*found, caught(trainer, save=False)]


def test_the_state_of_the_optimizer_and_the_position_are_compared_too(tmp_path: Path) -> None:
    for between, saved, position in on_ranks(2, part, tmp_path):
        assert between == ""
        assert "optimizer state last.weight/exp_avg on rank 0, 1;" in saved
        assert "the position in the run, or the scale of losses on rank 0, 1;" in position


def compared_seldom(rank: int, root: Path) -> list[str]:
    """Checkpoints of a moment that is off, soon after one that was sound, and later."""
    trainer = trainer_for(rank, 2, root, **{**COMMON, "strategy": "ddp"})
    trainer.resume()
    trainer.train_step()
    found = [caught(trainer, save=True)]
    if rank == 1:
        trainer.optimizer.tensors()["last.weight/exp_avg"].view(torch.int64)[0, 0] ^= 1
    for step in (2, trainer.saver.watch._next_moments):
        trainer.progress.step = int(step)
        found.append(caught(trainer, save=True))
    return found


def test_the_state_of_the_optimizer_is_compared_as_seldom_as_its_cost_asks(tmp_path: Path) -> None:
    for sound, soon, later in on_ranks(2, compared_seldom, tmp_path):
        assert (sound, soon) == ("", "")
        assert "optimizer state last.weight/exp_avg on rank 0, 1;" in later


def compared_in_steps(rank: int, root: Path) -> list[object]:
    """A bit that flips while a run trains, and a state that one stage alone has from then on."""
    trainer = trainer_for(rank, 2, root / "ddp", **{**COMMON, "strategy": "ddp"})
    trainer.resume()
    for _ in range(3):
        trainer.train_step()
    trainer.saver.watch._next = 3
    if rank == 1:
        flip_a_bit(trainer, "last.bias")
    found: list[object] = []
    try:
        trainer.train_step()
    except ReplicaError as error:
        found.append(str(error))
    staged = trainer_for(rank, 2, root / "pp", **{**COMMON, "pp": 2, "micro_batch": 2})
    staged.resume()
    staged.train_step()
    found.append(caught(staged, save=True))
    if rank == 1:
        *_, parameter = staged.strategy.named_parameters()
        staged.optimizer._optimizer.state[parameter[1]]["later"] = torch.ones(1)
    staged.train_step()
    staged.saver.watch._next_moments = 0
    return [*found, caught(staged, save=True), caught(staged, save=False)]


def test_the_next_step_compares_what_the_last_one_has_left(tmp_path: Path) -> None:
    for error, *sound in on_ranks(2, compared_in_steps, tmp_path):
        assert "after step 3" in str(error) and "last.bias on rank 0, 1;" in str(error)
        assert sound == ["", "", ""]


@pytest.mark.parametrize("by_crc", [True, False], ids=["in host memory", "as on a device"])
def test_tensors_are_summed_up_again_and_again(by_crc: bool) -> None:
    tensors = [
        torch.arange(5), torch.ones(0), torch.randn(3, 4), torch.randn(SMALL_BYTES),
        torch.ones(SMALL_BYTES + 1, dtype=torch.int8), torch.ones(3)[1:2], torch.randn(4, 3).t(),
        torch.randn(2, dtype=torch.complex128).conj(), torch.tensor(True), torch.randn(9000),
    ]  # fmt: skip
    summands = Summands(by_crc=by_crc)
    seen = [summands.sum(tensors)]
    for number in (0, 2, 3, 4, 5, 6, 7, 9, None, 0):
        if number is None:
            # Another tensor of the same name.
            tensors[1] = torch.ones(3)
        else:
            tensors[number].select(0, -1).mul_(2)
        assert summands.sum(tensors) == summands.sum(tensors)
        assert summands.sum(tensors) == Summands(by_crc=by_crc).sum(tensors)
        seen.append(summands.sum(tensors))
        if not by_crc:
            assert summands.each() == checksums(tensors, torch.device("cpu")).tolist()
    assert len({*seen}) == len(seen)


def test_another_order_gives_another_checksum() -> None:
    one = torch.arange(20.0)
    assert checksum(one) != checksum(one.flip(0))
    for summands in (Summands(), Summands(by_crc=False)):
        assert summands.sum([one, one + 1]) != summands.sum([one + 1, one])


def test_a_parameter_that_comes_later_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    trainer = trainer_for(0, 1, tmp_path, **{**COMMON, "task": f"{FILE}:Grown"})
    trainer.resume()
    trainer.train_step()
    trainer.saver.watch.check_names(trainer.progress.step)
    trainer.train_step()
    with pytest.raises(UsageError, match=r"after step 2 .* such as 'middle\.0\.extra'"):
        trainer.saver.save(trainer.progress, epoch=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (0,), (FACTORS + 1,)])
def test_a_checksum_sees_each_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(*shape, 2).to(dtype)[..., 1]
    before = checksum(tensor)
    plain = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    assert checksum(plain) == before
    content = plain.view(torch.uint8)
    for number in [*range(min(content.numel(), 64)), *range(content.numel())[-9:]]:
        for bit in (1, 128):
            content[number] ^= bit
            assert checksum(content.view(dtype)) != before
            content[number] ^= bit
