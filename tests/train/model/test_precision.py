"""Half precision learns like single precision; overflows cost a step, on all ranks alike."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.train.support import multiplied
from tests.train.support.ladder import Case, Differences, climb, whole
from tests.train.support.making import config_of, trainer_for
from tests.train.support.ranks import on_ranks
from train.checkpoints.store import read_state
from train.errors import NonFiniteLoss
from train.model import gradients
from train.model.gradients import FIRST_SCALE, GROW_AFTER, SMALLEST_SCALE, LossScaler
from train.parallel.base import full

if TYPE_CHECKING:
    from tests.train.conftest import Start
    from train.loop import Trainer

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}},
    4: {"fsdp x tp": {"dp_shard": 2, "tp": 2}},
}
STEPS = 25
LARGE = 2.0**40
# Ten classes guessed have a loss of 2.3; seen after these steps: 0.86 to 0.88.
LEARNT = 1.0


def learnt(rank: int, ranks: int, folder: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """The last five steps' mean loss, the last scale, the outputs' type; by layout, precision."""
    found = {}
    for (name, layout), precision in itertools.product(
        LAYOUTS[ranks].items(), ("fp32", "bf16", "fp16")
    ):
        trainer = trainer_for(
            rank, ranks, folder, **{"global_batch": 32, **layout, "precision": precision}
        )
        seen: list[torch.dtype] = []
        run: torch.nn.Module = trainer.strategy.run  # type: ignore[attr-defined]
        run.register_forward_hook(lambda _, __, outputs, seen=seen: seen.append(outputs.dtype))
        losses = losses_of(trainer, STEPS)
        types = {p.dtype for _, p in trainer.strategy.named_parameters()}
        # The optimizer's steps are too small for halves: weights stay in single precision.
        assert types == {torch.float32}
        found[name, precision] = sum(losses[-5:]) / 5, trainer.scaler.scale, seen[0]
    return found


# Their inputs are far from 0: rounding them before the model subtracts the mean loses the signal.
OFFSET = f"{Path(__file__).parents[1] / 'support/offset.py'}:Offset"
MULTIPLIED = f"{Path(__file__).parents[1] / 'support/multiplied.py'}:Multiplied"
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ARRANGED: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"strategy": "tp"},
    "cp": {"strategy": "cp"},
    "pp": {"strategy": "pp", "micro_batch": 4},
}
HSDP: dict[str, Any] = {"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 2}


def largest(far: Differences) -> float:
    return max(far.loss, far.gradients, far.weights)


def rounded(precision: str, ranks: int, ways: dict[str, dict[str, Any]]) -> list[Case]:
    """Ranks in some ways."""
    return [
        Case(
            name=f"{name}, {precision}",
            world_size=ranks,
            config=config_of(
                task=OFFSET,
                precision=precision,
                optimizer="sgd",
                lr=0.05,
                global_batch=16,
                **layout,
            ),
            # No overflow, so that no step is left out.
            sabotage="from train.model import gradients; gradients.FIRST_SCALE = 256.0",
        )
        for name, layout in ways.items()
    ]


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        pytest.param(2, ARRANGED, id="2 ranks"),
        pytest.param(4, {**ARRANGED, "hsdp": HSDP}, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_every_strategy_rounds_as_one_process_does(
    ranks: int, ways: dict[str, dict[str, Any]]
) -> None:
    cases = [case for precision in HALVES for case in rounded(precision, ranks, ways)]
    found = climb(cases, dtype=torch.float32)
    for precision, dtype in HALVES.items():
        # Sums over parts of a batch are rounded one by one.
        most = 2 * torch.finfo(dtype).eps
        here = {name: largest(far) for name, far in found.items() if name.endswith(precision)}
        assert {name: far for name, far in here.items() if far > most} == {}


def gathered(rank: int, ranks: int, folder: Path, precision: str) -> tuple[dict[str, Any], Any]:
    """Weights after a step of two micro-batches, by strategy; in which type each is gathered."""
    chosen = {"task": MULTIPLIED, "precision": precision, "optimizer": "sgd", "lr": 0.5}
    # No overflow, so that the step is not left out.
    gradients.FIRST_SCALE = 256.0
    types, weights = {}, {}
    for strategy in ("ddp", "fsdp"):
        trainer = trainer_for(rank, ranks, folder, strategy=strategy, micro_batch=2, **chosen)
        model: nn.Module = trainer.strategy.model  # type: ignore[attr-defined]
        before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
        trainer.train_step()
        weights[strategy] = {
            name.removeprefix("module."): (full(p.detach()) - before[name]).double()
            for name, p in model.named_parameters()
        }
        names = {id(p): name for name, p in model.named_parameters()}
        for module in model.modules() if strategy == "fsdp" else ():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        types[names[id(parameter.sharded_param)]] = parameter.param_dtype
    return weights, types


@pytest.mark.parametrize("precision", HALVES)
def test_what_is_cast_before_it_is_gathered_changes_no_number(
    precision: str, tmp_path: Path
) -> None:
    for weights, types in on_ranks(2, gathered, 2, tmp_path, precision):
        wide = {name.partition(".")[0] for name, dtype in types.items() if dtype is None}
        half = {name.partition(".")[0] for name, dtype in types.items() if dtype}
        assert half == multiplied.ONLY_MULTIPLIED
        assert {*types.values()} == {None, HALVES[precision]}
        assert wide == multiplied.OTHERS
        assert weights["fsdp"].keys() == weights["ddp"].keys()
        for name, ours in weights["fsdp"].items():
            # Nothing but the order of sums in fp32.
            assert (ours - weights["ddp"][name]).norm() <= 1e-5 * ours.norm(), name
            assert ours.norm() > 0, name


def losses_of(trainer: Trainer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        trainer.train_step()
        losses.append(trainer.progress.metrics["loss"])
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_half_precision_learns_on_several_ranks(ranks: int, tmp_path: Path) -> None:
    first, *others = on_ranks(ranks, learnt, ranks, tmp_path)
    assert all(other == first for other in others)
    for name in LAYOUTS[ranks]:
        full, _, dtype = first[name, "fp32"]
        assert dtype == torch.float32
        assert full < LEARNT, name
        # Were `--precision` ignored, it would learn just as well: hence the look at the outputs.
        assert first[name, "bf16"] == (pytest.approx(full, rel=0.05), 1.0, torch.bfloat16)
        half, scale, dtype = first[name, "fp16"]
        assert dtype == torch.float16
        # A step or two may be lost to overflows, until the scale is small enough.
        assert half == pytest.approx(full, rel=0.1)
        assert scale <= FIRST_SCALE


def times_infinity(gradient: Tensor) -> Tensor:
    return gradient * float("inf")


def overflowing(trainer: Trainer, *, step: int) -> None:
    """Let this rank's gradients overflow in one step, under a loss that is finite."""
    task = trainer.strategy.task
    loss = task.loss

    def planted(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = loss(outputs, targets)
        if trainer.progress.step == step - 1 and found.requires_grad:
            found.register_hook(times_infinity)  # type: ignore[no-untyped-call]
        return found

    task.loss = planted  # type: ignore[method-assign]


def scales_and_weights(
    rank: int, ranks: int, folder: Path, layouts: dict[str, dict[str, Any]]
) -> dict[str, list[tuple[float, float]]]:
    """The scale and the sum of all weights, step by step; the last rank overflows in step 3."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, layout in layouts.items():
        trainer = trainer_for(rank, ranks, folder, precision="fp16", lr=0.001, **layout)
        trainer.scaler.scale = 256.0
        if rank == ranks - 1:
            overflowing(trainer, step=3)
        found[name] = []
        for _ in range(5):
            trainer.train_step()
            found[name].append((trainer.scaler.scale, sum_of_weights(trainer)))
    return found


def sum_of_weights(trainer: Trainer) -> float:
    return sum(
        whole(t).double().abs().sum().item() for t in trainer.strategy.model_state().values()
    )


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    layouts: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "fsdp": {"strategy": "fsdp"},
        "pp": {"strategy": "pp", "micro_batch": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_ranks(2, scales_and_weights, 2, Path(folder), layouts)
    for name in layouts:
        steps = [rank[name] for rank in ranks]
        for rank in steps:
            assert [scale for scale, _ in rank] == [256, 256, 128, 128, 128]
            weights = [weight for _, weight in rank]
            # Step 3 changed nothing; training went on.
            assert weights[1] == weights[2]
            assert len(set(weights)) == 4
        # Stages hold different weights.
        assert name == "pp" or steps[0] == steps[1]


def each_by_itself(rank: int) -> tuple[float, float]:
    """torch's scaler with gradients as fully sharded ranks have them: each a part of its own."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    parameter.grad = torch.full((1,), float("inf") if rank == 1 else 1.0)
    # What makes it look at the gradients.
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return parameter.item(), scaler.get_scale()


def test_wrong_form_a_scaler_per_rank_parts_them() -> None:
    (first, first_scale), (second, second_scale) = map(each_by_itself, range(2))
    assert first != 1.0
    assert second == 1.0
    assert first_scale != second_scale


def test_the_scale_grows_after_long_peace_and_a_checkpoint_remembers_how_long() -> None:
    scaler = LossScaler(enabled=True)
    for _ in range(GROW_AFTER - 1):
        scaler.passed()
    assert scaler.scale == FIRST_SCALE
    resumed = LossScaler(enabled=True)
    resumed.load(scaler.state())
    resumed.passed()
    assert resumed.scale == 2 * FIRST_SCALE
    # An overflow starts the wait anew.
    assert resumed.overflowed()
    resumed.passed()
    assert resumed.state() == {"scale": FIRST_SCALE, "good_steps": 1}


def test_a_checkpoint_of_another_precision_leaves_the_scale_alone() -> None:
    half, full = LossScaler(enabled=True), LossScaler(enabled=False)
    full.load(half.state())
    half.load(full.state())
    assert (half.scale, full.scale) == (FIRST_SCALE, 1.0)


def test_a_gradient_that_no_scale_helps_is_given_up(tmp_path: Path) -> None:
    steps, scale, message = hopeless(tmp_path)
    # Once from each power of two, then no more.
    assert scale < SMALLEST_SCALE
    assert steps == round(math.log2(FIRST_SCALE / SMALLEST_SCALE))
    assert message.startswith(f"the gradient of step {steps + 1} is not finite")


def hopeless(folder: Path) -> tuple[int, float, str]:
    trainer = trainer_for(0, 1, folder, strategy="single", precision="fp16")
    task = trainer.strategy.task
    loss = task.loss
    # Finite forwards, infinite backwards: the derivative of a root at 0.
    task.loss = lambda outputs, targets: loss(outputs, targets) + (outputs * 0).abs().sum().sqrt()  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss) as caught:
        losses_of(trainer, 100)
    return trainer.progress.step, trainer.scaler.scale, str(caught.value)


# So large that the first steps overflow, as no test can wait for the scale to grow.
LARGE_START = f"""
from train.model import gradients
gradients.FIRST_SCALE = {LARGE}
from train.__main__ import enter
enter()
"""


def test_a_resumed_run_knows_its_scale_and_ends_in_the_same_bits(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "large.py").write_text(LARGE_START)

    def ran(name: str, *steps: int) -> bytes:
        run_dir, export = tmp_path / name, tmp_path / f"{name}.st"
        for attempt, last in enumerate(steps):
            start.single(
                "--precision=fp16",
                f"--steps={last}",
                f"--export={export}",
                run_dir=run_dir,
                attempt=attempt,
                script="large.py",
            ).finish()
        return export.read_bytes()

    whole_run = ran("whole", 60)
    assert ran("broken", 30, 60) == whole_run
    state = read_state(tmp_path / "broken/checkpoints/attempt-0/step-00000030")
    assert 1.0 < state.scaler["scale"] < LARGE
    assert 0 < state.scaler["good_steps"] < 30
