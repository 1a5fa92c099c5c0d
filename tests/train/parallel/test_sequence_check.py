"""Sequences are split only for models that compute for a part what they compute for the whole."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.train.support import rotary
from tests.train.support.ladder import Case, climb
from tests.train.support.making import trainer_for
from tests.train.support.ranks import on_ranks
from train.cli.config import Config
from train.errors import UsageError
from train.layers import CausalAttention, Places, Positions
from train.parallel.cp import GatheredKeys, differs
from train.tasks.chars import Transformer

TIME, WIDTH = 8, 6
FILE = Path(__file__).parents[1] / "support/rotary.py"


class Small(nn.Module):
    """Attention and a matrix, before them something to be judged."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.attention = first, CausalAttention()
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.first(hidden).unsqueeze(1)
        return self.last(self.attention(heads, heads, heads).squeeze(1))  # type: ignore[no-any-return]


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


class Learned(nn.Module):
    """Positions, from `train.layers` or hand-written; small beside the tokens' vectors."""

    def __init__(self, *, ours: bool) -> None:
        super().__init__()
        self.table = Positions(TIME, WIDTH) if ours else nn.Embedding(TIME, WIDTH)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        time = hidden.shape[1]
        places = time if isinstance(self.table, Positions) else torch.arange(time)
        return hidden + self.table(places)  # type: ignore[no-any-return]


def itself(hidden: Tensor) -> Tensor:
    return hidden


SOUND: dict[str, Callable[[], nn.Module]] = {
    "no positions": lambda: Small(Applied(itself)),
    "our positions": lambda: Small(Learned(ours=True)),
    "classes before the time": lambda: nn.Sequential(
        Small(Applied(itself)), Applied(lambda scores: scores.transpose(1, 2))
    ),
    "all in one row": lambda: nn.Sequential(Small(Applied(itself)), nn.Flatten(0, 1)),
    "dropout": lambda: Small(nn.Dropout(0.5)),
}
UNSOUND: dict[str, Callable[[], nn.Module]] = {
    "positions of their own": lambda: Small(Learned(ours=False)),
    "attention of their own": lambda: Small(
        Applied(lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True))
    ),
    "a sum over the past": lambda: Small(Applied(lambda x: x.cumsum(dim=1))),
    "the position before": lambda: Small(Applied(lambda x: functional.pad(x, (0, 0, 1, -1)))),
    "the number of positions": lambda: Small(Applied(lambda x: x * x.shape[1] ** 0.5)),
}


def judged(model: nn.Module, inputs: Tensor | None = None, *, halves: bool = False) -> bool:
    if inputs is None:
        inputs = torch.randn(1, TIME, WIDTH, generator=torch.Generator().manual_seed(1))

    def run(inputs: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu") if halves else nullcontext():
            return model(inputs)  # type: ignore[no-any-return]

    return differs(run, model, inputs, halves=halves)


@pytest.mark.parametrize("name", [*SOUND, *UNSOUND])
def test_layers_that_begin_anew_in_each_part_are_found_and_no_others(name: str) -> None:
    torch.manual_seed(0)
    assert judged((SOUND | UNSOUND)[name]()) == (name in UNSOUND)


@pytest.mark.parametrize("halves", [False, True])
def test_whole_transformers_are_judged(halves: bool) -> None:
    torch.manual_seed(0)
    text = torch.randint(128, (1, 32))
    assert not judged(Transformer(), text, halves=halves)
    assert not judged(rotary.transformer(Places()), text, halves=halves)
    # The effect of the angles alone, which attention would barely show before training.
    assert judged(rotary.transformer(rotary.FromZero()), text, halves=halves)


def test_what_gives_nothing_to_compare_passes() -> None:
    pooled = nn.Sequential(Small(Applied(itself)), Applied(lambda scores: scores.mean(dim=1)))
    assert not judged(pooled)
    with torch.no_grad():
        broken = Small(Applied(lambda x: x * float("nan")))
    # That is another problem, which the first step will name.
    assert not judged(broken)


def test_a_judged_model_is_as_before() -> None:
    torch.manual_seed(0)
    model = Small(Learned(ours=True))
    context = model.attention.context = GatheredKeys.__new__(GatheredKeys)
    positions = model.first.get_submodule("table")
    judged(model)
    assert model.attention.context is context
    assert not positions._forward_pre_hooks


def answered(rank: int) -> dict[str, str]:
    """What trainers of several layouts say when they are about to begin."""
    found = {}
    layouts = {"cp": {"cp": 2, "dp_shard": 2}, "pp": {"cp": 2, "pp": 2, "micro_batch": 2}}
    for layout, sizes in layouts.items():
        for task in ("Rotary", "RotaryFromZero"):
            with tempfile.TemporaryDirectory() as folder:
                trainer = trainer_for(rank, 4, Path(folder), task=f"{FILE}:{task}", **sizes)
                try:
                    trainer.resume()
                    found[f"{task}, {layout}"] = ""
                except UsageError as error:
                    found[f"{task}, {layout}"] = str(error)
                    continue
                trainer.train_step()
    for chosen in ({"cp": 2, "tp": 2, "loss_parallel": True}, {"cp": 4, "meta_init": True}):
        with tempfile.TemporaryDirectory() as folder:
            trainer_for(rank, 4, Path(folder), task="chars", **chosen).resume()
    return found


@pytest.mark.slow
def test_all_ranks_refuse_a_model_that_counts_for_itself() -> None:
    refusal = (
        "--cp 2: for a part of a sequence the model of task 'rotary' computes something else than "
        "for all of it: a layer counts positions from where its input begins, or looks beyond one; "
        "use train.layers.Positions or Places, and no other layer than CausalAttention that looks "
        "beyond one, or leave out --cp"
    )
    expected = {
        "Rotary, cp": "",
        "RotaryFromZero, cp": refusal,
        "Rotary, pp": "",
        "RotaryFromZero, pp": refusal,
    }
    # Also those in a pipeline that have never seen its outputs.
    assert on_ranks(4, answered) == [expected] * 4


def case(name: str, task: str, **config: object) -> Case:
    chosen = {"task": f"{FILE}:{task}", "global_batch": 4, "optimizer": "sgd", "lr": 0.1}
    return Case(name=name, world_size=2, config=Config(cp=2, **chosen, **config))  # type: ignore[arg-type]


def test_numbered_places_train_what_one_process_trains_and_the_refused_form_does_not() -> None:
    ours = [case("gather", "Rotary"), case("heads", "Rotary", cp_method="ulysses")]
    found = climb([*ours, case("wrong", "RotaryFromZero")])
    assert found.pop("wrong").gradients > 1e-3
    assert max(max(far.loss, far.gradients, far.weights) for far in found.values()) <= 1e-12
