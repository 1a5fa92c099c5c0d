"""What `check` finds in the arguments of a job."""

import pytest

import toolkit
from toolkit.planning.arguments import argument_problems


def rules_of(*args: str, **entry: object) -> list[str | None]:
    job = toolkit.JobSpec.model_validate({"name": "a", **(entry or {"module": "m"}), "args": args})
    return [problem.rule for problem in argument_problems(job)]


@pytest.mark.parametrize(
    "args",
    [
        ("--ckpt-dir", "ckpts"),
        ("--output_dir=results/a",),
        ("--out", "model"),
        ("--save", "model.pt"),
        ("--checkpoint", "./x"),
        ("--default_root_dir", "logs"),
    ],
)
def test_a_relative_output_is_told(args: tuple[str, ...]) -> None:
    assert rules_of(*args) == ["output-outside-run-dir"]


@pytest.mark.parametrize(
    "args",
    [
        ("--ckpt-dir", "$TRAIN_RUN_DIR/ckpts"),
        ("--ckpt-dir", "/scratch/ckpts"),
        ("--output-dir", "s3://bucket/x"),
        ("--data-dir", "data"),
        ("--save-every", "100"),
        ("--save-strategy", "epoch"),
        ("--save", "--lr", "0.1"),
        ("--checkpoint-every=0.5",),
        ("--resume-dir", "old"),
        ("--cache_dir=x",),
        ("ckpts/a",),
    ],
)
def test_other_paths_are_fine(args: tuple[str, ...]) -> None:
    assert rules_of(*args) == []


@pytest.mark.parametrize("word", ["$HOME", "--x=${SLURM_JOB_ID}/a", "$TRAIN_RUN_DIRS"])
def test_a_variable_that_is_not_replaced_is_told(word: str) -> None:
    assert rules_of(word) == ["variable-in-args"]
    assert rules_of(word, command=["bash", "-c"]) == []


@pytest.mark.parametrize("word", ["$TRAIN_RUN_DIR", "${TRAIN_ATTEMPT}x", "$$HOME", "$x", "$", "$1"])
def test_other_dollars_are_fine(word: str) -> None:
    assert rules_of(word) == []
