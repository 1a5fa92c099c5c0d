"""However a batch is shared out, the same model is trained; and by default it learns well."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.train.reading import part

if TYPE_CHECKING:
    from torch import Tensor

    from tests.train.conftest import Running, Start

# Gradients, as AdamW's first moment remembers them, differ by the order in which floats are added.
GRADIENTS = 1e-6
# AdamW divides by the gradient's size, which makes more of that where a gradient is all but zero;
# and it hides a wrong scale of all gradients. So the weights alone would prove little.
WEIGHTS = 1e-5
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class End:
    """What a run ends with."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: dict[int, float]


def end_of(run: Running) -> End:
    run.finish()
    path = run.run_dir / f"checkpoints/attempt-0/step-{STEPS:08d}"
    moments = part(path, "optimizer.")
    return End(
        weights=part(path, "model."),
        gradients={name: t for name, t in moments.items() if name.endswith("/exp_avg")},
        losses=run.losses(),
    )


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


BATCH = "--global-batch=24"
COMMON = (f"--steps={STEPS}", "--lr=0.001")


@pytest.fixture(scope="module")
def alone(session_start: Start) -> dict[str, End]:
    """The reference: each task trained by one process, a batch in one piece."""
    return {
        task: end_of(
            session_start.single(
                f"--task={task}", BATCH, *COMMON, run_dir=session_start.home / f"alone-{task}"
            )
        )
        for task in ("chars", "digits")
    }


@pytest.mark.parametrize(
    ("task", "ranks", "micro_batch"), [("chars", 3, 2), ("digits", 4, 3), ("digits", 1, 8)]
)
def test_ddp_with_accumulation_equals_one_process(
    start: Start, alone: dict[str, End], tmp_path: Path, task: str, ranks: int, micro_batch: int
) -> None:
    flags = ("--strategy=ddp", f"--task={task}", BATCH, f"--micro-batch={micro_batch}", *COMMON)
    shared = end_of(start.ranks(ranks, *flags, run_dir=tmp_path / "ddp"))
    assert largest_difference(alone[task].gradients, shared.gradients) <= GRADIENTS
    assert largest_difference(alone[task].weights, shared.weights) <= WEIGHTS
    assert shared.losses == pytest.approx(alone[task].losses, rel=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        # DDP averages over the ranks: not undoing that makes the gradients too small.
        "DataParallel.scale_gradients = Single.scale_gradients",
        # Every rank draws the same slice, as with a sampler that knows no ranks.
        "DataParallel.shard = property(lambda self: 0, lambda self, value: None)",
    ],
    ids=["mean of ranks", "same slice"],
)
def test_wrong_forms_differ(
    start: Start, alone: dict[str, End], tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "wrong.py").write_text(
        "from train.__main__ import enter\n"
        "from train.strategies.ddp import DataParallel\n"
        "from train.strategies.single import Single\n"
        f"{wrong}\n"
        "enter()\n"
    )
    flags = ("--task=chars", BATCH, *COMMON)
    run = start.ranks(2, *flags, run_dir=tmp_path / "ddp", module=("wrong.py",))
    difference = largest_difference(alone["chars"].gradients, end_of(run).gradients)
    assert difference > 100 * GRADIENTS


def test_digits_are_learnt_by_default(start: Start, tmp_path: Path) -> None:
    run = start.ranks(2, "--epochs=10", run_dir=tmp_path / "run").finish()
    metrics = run.outcome()["metrics"]
    assert metrics["test_accuracy"] >= 0.97
    last_line = run.output().splitlines()[-1]
    assert last_line == (
        f"done: step 225/225, loss {metrics['loss']:.4f}, "
        f"test_accuracy {metrics['test_accuracy']:.4f}, test_loss {metrics['test_loss']:.4f} · "
        f"run directory {tmp_path / 'run'}"
    )


def test_chars_beat_the_most_frequent_character(start: Start, tmp_path: Path) -> None:
    run = start.single("--task=chars", "--steps=60", run_dir=tmp_path / "run").finish()
    # Always guessing a space is right for one character in three.
    assert run.outcome()["metrics"]["test_accuracy"] > 0.38
