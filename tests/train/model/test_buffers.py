"""Buffers of any type: kept by checkpoints bit by bit, alike on all ranks, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.train.support.buffer_types import TYPES, filled
from tests.train.support.making import trainer_for
from tests.train.support.ranks import on_ranks
from train.checkpoints.checkpointer import Checkpointer
from train.checkpoints.reader import MODEL, Stored, export
from train.checkpoints.store import Position, State
from train.errors import UsageError
from train.model import batchnorm
from train.runtime.process_group import RankGroup, bytes_of
from train.runtime.rank import RankInfo

FILE = Path(__file__).parents[1] / "support/buffer_types.py"
RANKS, STEPS = 3, 3
CHOSEN = {
    "task": f"{FILE}:Buffers", "global_batch": 12, "optimizer": "sgd", "lr": 0.01, "steps": STEPS,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "exact": {"strategy": "ddp", "reduce": "exact", "virtual_shards": RANKS},
    "local-sgd": {"strategy": "local-sgd", "local_steps": 1},
}
SAVED = Position(attempt=0, step=STEPS)


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    plain = {n: t.detach().resolve_conj().resolve_neg().contiguous() for n, t in tensors.items()}
    return {name: bytes_of(tensor).numpy().tobytes() for name, tensor in plain.items()}


def model_of(rank: int, folder: Path, name: str, *, steps: int = 0) -> dict[str, Tensor]:
    """What a layout goes on with, and makes of it; saved at the end."""
    ranks = 1 if name == "single" else RANKS
    trainer = trainer_for(rank, ranks, folder, **{**CHOSEN, **LAYOUTS[name]})
    trainer.resume()
    for _ in range(steps):
        trainer.train_step()
    if steps:
        trainer.saver.save(trainer.progress, epoch=trainer.epoch)
        trainer.saver.wait()
    state = trainer.strategy.model_state()
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}


def trained_and_read(rank: int, root: Path) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """What each layout trains; and what another layout reads otherwise than it was."""
    models, differing = {}, []
    for name in LAYOUTS:
        if name == "single" and rank:
            continue
        models[name] = {
            n: t.clone() for n, t in model_of(rank, root / name, name, steps=STEPS).items()
        }
    dist.barrier()
    for name in LAYOUTS:
        # Once all ranks see it; once only rank 0 does, which sends it to the others.
        for folder in (root / name, root / name if rank == 0 else root / f"{name}-{rank}"):
            read = model_of(rank, folder, "fsdp")
            stored = Stored(SAVED.path(root / name))
            if bits(read) != bits({n: stored.whole(MODEL + n) for n in read}):
                differing.append(f"{name} from {folder.name}")
    return models, differing


@pytest.mark.slow
def test_each_strategy_trains_and_restores_buffers_of_every_type(tmp_path: Path) -> None:
    ranks = on_ranks(RANKS, trained_and_read, tmp_path)
    assert [differing for _, differing in ranks] == [[]] * RANKS
    reference = ranks[0][0]["single"]
    assert {f"0.of_{name}" for name in TYPES} < reference.keys()
    assert reference["0.mean"].abs().min() > 0
    for rank, (models, _) in enumerate(ranks):
        for layout, model in models.items():
            for name, tensor in model.items():
                if name.startswith("0.of_"):
                    # They never change, to the last bit.
                    expected = filled(name.removeprefix("0.of_"))
                    assert bits({name: tensor}) == bits({name: expected}), (rank, layout, name)
                else:
                    error = (tensor - reference[name]).abs().max()
                    assert error < 1e-12, (rank, layout, name)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_checkpoint_and_an_export_hold_every_type_and_any_reader_reads_them(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 120, (3, 4, 16), generator=generator, dtype=torch.uint8)
    tensors = {name: drawn.view(getattr(torch, name)) for name in TYPES if name != "bool"}
    tensors["complex32"] = drawn.view(torch.complex32)
    tensors |= {f"{name}, a number": tensor[0, 0, 0] for name, tensor in tensors.items()}
    tensors["turned"] = tensors["complex64"].transpose(0, 1)
    tensors["conjugate"] = tensors["complex128"].conj()
    tensors["negative"] = tensors["conjugate"].imag
    named = {MODEL + name: tensor for name, tensor in tensors.items()}
    writer = Checkpointer(tmp_path, RankGroup(rank_info=RankInfo(), device=torch.device("cpu")))
    state = State(step=STEPS, epoch=0, samples_seen=9, world_size=1, identity={}, config={})
    writer.save(SAVED, state, named)
    writer.wait()
    stored = Stored(SAVED.path(tmp_path))
    assert stored.listing == {n: (t.shape, t.dtype) for n, t in sorted(named.items())}
    live = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    live[MODEL + "conjugate"] = torch.zeros(3, 4, 1, dtype=torch.complex128).conj()
    stored.load(live)
    assert bits(live) == bits(named)
    export(tmp_path / "w.st", stored.listing, stored.whole)
    foreign = load_file(tmp_path / "w.st")
    assert foreign.keys() == tensors.keys()
    # Complex numbers as pairs, what few know as bytes, and all else as it is.
    assert foreign["complex64"].equal(torch.view_as_real(tensors["complex64"]))
    assert foreign["float8_e8m0fnu"].equal(tensors["float8_e8m0fnu"].view(torch.uint8))
    assert foreign["uint16"].equal(tensors["uint16"])


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        trainer_for(0, 1, tmp_path, **{**CHOSEN, "task": f"{FILE}:Unstorable"})
    assert str(caught.value) == (
        "checkpoints cannot hold all of the model: register what can be computed anew with "
        "persistent=False, or give it another type:\n"
        "  1.levels is of type bits8, which safetensors cannot hold\n"
        "  1.sparse has layout sparse_coo, not strided\n"
        "  1.spread has elements that share memory, as expand() makes them: give it a clone()"
    )


def test_infinities_that_stay_have_not_changed() -> None:
    before = torch.tensor([0.0, -torch.inf, torch.inf, 1.0])
    now = torch.tensor([0.5, -torch.inf, -torch.inf, 1.0])
    assert batchnorm.change(now, before).tolist() == [0.5, 0.0, -torch.inf, 0.0]
