"""A number that is not one stops all ranks at the same step, and reaches no checkpoint."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.train.support.making import trainer_for
from tests.train.support.ranks import on_ranks
from train.checkpoints.store import Position, list_committed, verify
from train.errors import NonFiniteLoss
from train.model.gradients import not_finite

if TYPE_CHECKING:
    from tests.train.conftest import Start
    from train.loop import Trainer

STEP = 3


def poisoned(trainer: Trainer, change: Callable[[Tensor], Tensor]) -> None:
    """Change this rank's loss in one step."""
    task = trainer.strategy.task
    loss = task.loss

    def planted(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = loss(outputs, targets)
        now = trainer.progress.step == STEP - 1 and found.requires_grad
        return change(found) if now else found

    task.loss = planted  # type: ignore[method-assign]


def times_nothing(gradient: Tensor) -> Tensor:
    return gradient * float("nan")


def unlike_its_gradient(loss: Tensor) -> Tensor:
    """A finite loss whose gradient is not."""
    loss.register_hook(times_nothing)  # type: ignore[no-untyped-call]
    return loss


def ends(rank: int, folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    """Where each layout's run ends, with what words; the last rank's loss is poisoned."""
    found: dict[str, Any] = {}
    for (name, (chosen, poison)), number in zip(layouts.items(), itertools.count()):
        trainer = trainer_for(rank, 2, folder / str(number), steps=9, **chosen)
        if rank == 1:
            poisoned(trainer, POISONS[poison])
        numbers = trainer.feed.numbers((STEP - 1) * trainer.config.global_batch).tolist()
        message = ""
        try:
            while trainer.progress.step < STEP + 2:
                trainer.train_step()
        except NonFiniteLoss as error:
            message = str(error)
        finite = all(p.isfinite().all() for _, p in trainer.strategy.named_parameters())
        found[name] = trainer.progress.step, finite, message, numbers
    return found


POISONS: dict[str, Callable[[Tensor], Tensor]] = {
    "loss": lambda loss: loss * float("nan"),
    "gradient": unlike_its_gradient,
}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({"strategy": "ddp"}, "loss"),
    "fsdp": ({"strategy": "fsdp"}, "loss"),
    "exact": ({"strategy": "ddp", "reduce": "exact"}, "loss"),
    "ddp, clipped": ({"strategy": "ddp", "clip_norm": 1.0}, "gradient"),
    "fsdp, clipped": ({"strategy": "fsdp", "clip_norm": 1.0}, "gradient"),
    "pp, clipped": ({"strategy": "pp", "clip_norm": 1.0, "micro_batch": 4}, "gradient"),
}


def test_all_ranks_stop_before_the_step_that_one_rank_would_spoil() -> None:
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_ranks(2, ends, Path(folder), LAYOUTS)
    for name, (_, poison) in LAYOUTS.items():
        steps, finite, messages, numbers = zip(*(rank[name] for rank in by_rank), strict=True)
        assert steps == (STEP - 1, STEP - 1), name
        assert finite == (True, True), name
        assert messages[0] == messages[1], name
        if poison == "loss":
            guilty = ", ".join(map(str, sorted(numbers[1])))
            assert messages[0].startswith(
                f"the loss of step {STEP} is not finite on 1 of 2 ranks, for a batch of samples "
                f"{guilty}; checkpoints are from before it"
            ), name
        else:
            assert messages[0].startswith(f"the gradient of step {STEP} is not finite"), name


# Without clipping gradients are not checked, and the loss of the step was finite.
SPOILT = """
import os
import torch
from train.__main__ import enter
from train.tasks import digits

class Poisoned(digits.Digits):
    calls = 0

    def loss(self, outputs, targets):
        found = super().loss(outputs, targets)
        if found.requires_grad:
            self.calls += 1
            if self.calls == 4 and os.environ["RANK"] == "1":
                found.register_hook(lambda gradient: gradient * float("nan"))
        return found

digits.Digits = Poisoned
enter()
"""


@pytest.mark.slow
def test_weights_that_are_not_finite_replace_no_good_checkpoint(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "spoilt.py").write_text(SPOILT)
    flags = ("--checkpoint-every=2", "--keep-checkpoints=1", "--global-batch=8", "--steps=9")
    run = start.ranks(2, *flags, run_dir=tmp_path / "run", module=("spoilt.py",))
    assert run.wait() == 1
    outcome = run.outcome()
    assert (outcome["status"], outcome["step"], outcome["rank"]) == ("fatal", 4, None)
    assert outcome["reason"].startswith("6 parameters are not finite after step 4, such as 0.bias")
    (left,) = list_committed(run.run_dir, up_to_attempt=0)
    assert left == Position(attempt=0, step=2)
    verify(left.path(run.run_dir))


def test_a_part_that_is_not_finite_is_found_wherever_it_lies() -> None:
    assert on_ranks(2, searched) == [
        {"ddp": (["0.weight"], 1), "fsdp": ([], 1)},
        {"ddp": ([], 1), "fsdp": (["0.weight"], 1)},
    ]


def searched(rank: int) -> dict[str, tuple[list[str], int]]:
    from train.model.gradients import not_finite

    found = {}
    for name, guilty in (("ddp", 0), ("fsdp", 1)):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_for(rank, 2, Path(folder), strategy=name)
            parameter = dict(trainer.strategy.named_parameters())["0.weight"]
            part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if rank == guilty:
                with torch.no_grad():
                    part[-1, -1] = float("inf")
            with pytest.raises(
                NonFiniteLoss, match=r"^1 parameters .* such as 0\.weight"
            ) as caught:
                trainer.saver.save(trainer.progress, epoch=0)
            assert not list(Path(folder).rglob("step-*"))
            found[name] = not_finite(trainer.strategy), str(caught.value).count("0.weight")
    return found


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_frozen_codes_of_a_quantised_model_are_finite(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 2)
    model.codes = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)

    class Holding:
        norm_device = torch.device("cpu")
        named_parameters = model.named_parameters

    assert not_finite(cast(Any, Holding())) == []
    model.bias.data[0] = torch.inf
    assert not_finite(cast(Any, Holding())) == ["bias"]


def test_a_frozen_mask_of_infinities_is_no_spoilt_weight() -> None:
    model = nn.Linear(4, 2)
    model.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)

    class Holding:
        norm_device = torch.device("cpu")
        named_parameters = model.named_parameters

    assert not_finite(cast(Any, Holding())) == []
    model.weight.data[0, 0] = torch.inf
    assert not_finite(cast(Any, Holding())) == ["weight"]
