"""Options of every strategy: clipping, recomputation, dropout, compiling, compression."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from tests.train.support.ladder import Case, climb, whole
from tests.train.support.making import config_of, trainer_for
from tests.train.support.ranks import on_ranks
from train import tasks
from train.data.loader import source_of
from train.loop import Trainer
from train.model.gradients import total_norm
from train.model.prepare import prepare

WIDE = Path(__file__).parents[1] / "support/wide.py"
"""Its gradients fill several of DDP's buckets."""

MESHES: dict[str, dict[str, Any]] = {
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
    "ddp x tp": {"dp_replicate": 2, "tp": 2},
    "fsdp x cp": {"dp_shard": 2, "cp": 2},
}


def accumulated(trainer: Trainer) -> Trainer:
    """Make the gradients of the first step."""
    parts = trainer.feed.batch(0).split_into(trainer.micro_batches)
    trainer.strategy.accumulate(parts)
    return trainer


def norms(rank: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Each mesh's norm and that of this rank's parts, relative to one process's."""
    torch.set_default_dtype(torch.float64)
    right = total_norm(
        accumulated(trainer_for(rank, 1, folder, strategy="single", task="chars")).strategy
    )
    found = {}
    for name, layout in MESHES.items():
        strategy = accumulated(trainer_for(rank, 4, folder, task="chars", **layout)).strategy
        own = [p.grad for _, p in strategy.named_parameters()]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in own if g is not None]
        by_itself = torch.stack([part.norm() for part in parts]).norm().item()
        found[name] = total_norm(strategy) / right, by_itself / right
    return found


@pytest.mark.slow
def test_the_norm_over_any_mesh_is_that_of_one_process(tmp_path: Path) -> None:
    for rank in on_ranks(4, norms, tmp_path):
        for name, (ours, by_itself) in rank.items():
            assert ours == pytest.approx(1.0, abs=1e-12), name
            # The wrong form: ranks would clip by different factors.
            assert by_itself < 0.95, name


def clipped_by_torch(rank: int) -> str:
    """Torch's error about parameters on two meshes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    parameters = []
    for name in ("a", "b"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        parameters.append(parameter)
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.ones(4)
    try:
        norm = clip_grad_norm_([*parameters, plain], 0.1)
    except (RuntimeError, ValueError, AssertionError) as error:
        return type(error).__name__
    return f"{norm}"


def test_wrong_form_torch_clips_only_what_lies_on_one_mesh() -> None:
    assert on_ranks(2, clipped_by_torch) == ["RuntimeError"] * 2


def test_recomputation_keeps_less_and_gives_the_same_gradients_under_dropout() -> None:
    task = tasks.load("chars")
    batch = source_of(task.train()).take(torch.arange(4))
    kept, gradients = [], []
    for again in (False, True):
        config = config_of(task="chars", dropout=0.3, activation_checkpointing=again)
        torch.manual_seed(0)
        model = prepare(task.model(), task, config)
        names = [name for name, _ in model.named_parameters()]
        saved = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = task.loss(model(batch.inputs), batch.targets)
        kept.append(saved)
        torch.autograd.backward(loss)
        gradients.append([p.grad for p in model.parameters()])
        assert names == [name for name, _ in task.model().named_parameters()]
    assert kept[1] < kept[0] / 4
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def masks_of(trainer: Trainer) -> list[Tensor]:
    """What each dropout layer of this rank keeps, in one step."""
    found: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        # A pipeline first passes shapes along, in evaluation mode.
        if module.training:
            found.append(output != 0)

    strategy: Any = trainer.strategy
    models = strategy._stages.values() if hasattr(strategy, "_stages") else [strategy.model]
    hooks = [
        module.register_forward_hook(note)
        for model in models
        for module in model.modules()
        if isinstance(module, nn.Dropout)
    ]
    trainer.train_step()
    for hook in hooks:
        hook.remove()
    return found


def dropped(rank: int, folder: Path) -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """The masks of two steps, and of the second one again in a run that begins there."""
    found = {}
    for name, layout in AXES.items():
        chosen = {"task": "chars", "dropout": 0.5, **layout}
        trainer, resumed = (trainer_for(rank, 2, folder, **chosen) for _ in range(2))
        resumed.progress.step, resumed.progress.samples_seen = 1, 8
        found[name] = masks_of(trainer), masks_of(trainer), masks_of(resumed)
    return found


AXES: dict[str, dict[str, Any]] = {
    "tp": {"strategy": "tp"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "cp": {"strategy": "cp"},
    "pp": {"strategy": "pp", "micro_batch": 4},
}


def test_no_two_ranks_drop_alike(tmp_path: Path) -> None:
    first, second = on_ranks(2, dropped, tmp_path)
    for name in AXES:
        for rank in (first, second):
            one, two, again = rank[name]
            assert one
            assert all(0.4 < mask.float().mean() < 0.6 for mask in one), name
            assert not any(torch.equal(a, b) for a, b in zip(one, two, strict=True)), name
            assert all(torch.equal(a, b) for a, b in zip(two, again, strict=True)), name
        same = [torch.equal(a, b) for a, b in zip(first[name][0], second[name][0], strict=False)]
        assert same == [False] * len(same), name


RECOMPUTED = ("ddp", "fsdp", "tp", "cp")


def recomputed(rank: int, folder: Path) -> dict[str, float]:
    """How far recomputation moves the gradients, under dropout."""
    found = {}
    for name in RECOMPUTED:
        ends = []
        for again in (False, True):
            torch.manual_seed(0)
            trainer = trainer_for(
                rank, 2, folder, strategy=name, task="chars", dropout=0.3,
                activation_checkpointing=again,
            )  # fmt: skip
            torch.manual_seed(1)
            named = accumulated(trainer).strategy.named_parameters()
            ends.append([whole(p.grad) for _, p in named if p.grad is not None])
        found[name] = max((a - b).abs().max().item() for a, b in zip(*ends, strict=True))
    return found


def test_recomputation_changes_no_gradient_on_several_ranks(tmp_path: Path) -> None:
    nowhere = dict.fromkeys(RECOMPUTED, 0.0)
    assert on_ranks(2, recomputed, tmp_path) == [nowhere] * 2


def compressed(rank: int, folder: Path) -> dict[str, float]:
    found = {}
    for hook in ("none", "fp16", "powersgd"):
        trainer = trainer_for(rank, 2, folder, strategy="ddp", comm_hook=hook, global_batch=32)
        for _ in range(30):
            trainer.train_step()
        found[hook] = trainer.progress.metrics["loss"]
    return found


def test_compressed_gradients_learn(tmp_path: Path) -> None:
    first, second = on_ranks(2, compressed, tmp_path)
    assert first == second
    assert first["none"] < 1.0
    assert first["fp16"] == pytest.approx(first["none"], rel=0.02)
    assert first["powersgd"] == pytest.approx(first["none"], rel=0.5)
    assert len(set(first.values())) == 3


def compressed_in_buckets(rank: int, folder: Path) -> tuple[int, int]:
    """Return how many steps were made with PowerSGD, and how many buckets DDP has."""
    chosen = {"strategy": "ddp", "comm_hook": "powersgd", "optimizer": "sgd"}
    trainer = trainer_for(rank, 2, folder, task=f"{WIDE}:Wide", **chosen)
    for _ in range(30):
        trainer.train_step()
    facts = trainer.strategy.run._get_ddp_logging_data()  # type: ignore[attr-defined]
    return trainer.progress.step, len(facts["rebuilt_bucket_sizes"].split(","))


def test_exchanges_of_powersgd_do_not_meet_out_of_order(tmp_path: Path) -> None:
    assert on_ranks(2, compressed_in_buckets, tmp_path) == [(30, 1)] * 2


# In one start of the ranks: what the ladder does not climb.
EXTRA = [
    Case(
        name=schedule,
        world_size=2,
        config=config_of(
            task="chars",
            strategy="pp",
            pp_schedule=schedule,
            micro_batch=4,
            lr=1e-4,
            activation_checkpointing=True,
        ),
    )
    for schedule in ("1F1B", "ZBVZeroBubble")
]
COMPILED = [
    Case(name=name, world_size=2, config=config_of(strategy=name, lr=1e-4, compile=True))
    for name in ("ddp", "fsdp")
]


@pytest.mark.slow
def test_recomputing_stages_and_compiled_models_train_the_same_under_the_same_names() -> None:
    # Inductor needs a compiler, which not every machine has.
    cases = EXTRA + (COMPILED if shutil.which("g++") else [])
    for name, far in climb(cases).items():
        assert max(far.initial_weights, far.loss, far.gradients, far.weights) < 1e-12, name
