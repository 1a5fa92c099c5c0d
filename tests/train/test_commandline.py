"""The command line: generated from the configuration, and every mistake named at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from train.commandline import field_docs, parse, usage
from train.config import Config
from train.environment import Place
from train.errors import UsageError

ONE = Place()


def problems(*argv: str, place: Place = ONE) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(argv, {"TRAIN_RUN_DIR": "/runs/x"}, place)
    return str(caught.value).splitlines()


def ranks(count: int) -> Place:
    return Place(world_size=count, launched=True)


def test_flags_become_the_configuration() -> None:
    argv = [
        "--task",
        "chars",
        "--steps=7",
        "--global-batch",
        "96",
        "--micro-batch",
        "8",
        "--lr",
        "1e-3",
        "--seed",
        "3",
    ]
    argv += ["--run-dir", "/runs/a b", "--export=w.st", "--strategy", "ddp"]
    config = parse(argv, {"TRAIN_RUN_DIR": "/runs/x"}, ranks(4))
    assert config == Config(
        task="chars",
        strategy="ddp",
        steps=7,
        global_batch=96,
        micro_batch=8,
        lr=1e-3,
        seed=3,
        run_dir=Path("/runs/a b"),
        export=Path("w.st"),
    )


def test_run_directory_comes_from_the_environment_by_default() -> None:
    assert parse([], {"TRAIN_RUN_DIR": "/runs/x"}, ONE).directory == Path("/runs/x")
    with pytest.raises(UsageError, match=r"^no run directory: give --run-dir DIR or "):
        parse([], {}, ONE)


def test_every_field_has_a_flag_and_a_help_text() -> None:
    names = [field.name for field in dataclasses.fields(Config)]
    assert list(field_docs(Config)) == names
    flags = [line.split()[0] for line in usage().splitlines() if line.startswith("  --")]
    assert flags == [f"--{name.replace('_', '-')}" for name in names] + ["--help"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epoch", "3"], "unknown flag '--epoch'; did you mean '--epochs'?"),
        (["--frobnicate"], "unknown flag '--frobnicate'"),
        (
            ["--task=digit"],
            "--task: unknown task 'digit'; did you mean 'digits'? (known: digits, chars)",
        ),
        (
            ["--strategy=dpd"],
            "--strategy: unknown strategy 'dpd'; did you mean 'ddp'? (known: auto, single, ddp)",
        ),
        (["--steps=many"], "--steps 'many' is no whole number"),
        (["--steps=0"], "--steps 0 is too small: at least 1"),
        (["--lr=nan"], "--lr nan must be a positive, finite number"),
        (["--lr"], "--lr needs a value"),
        (["--export="], "--export needs a value"),
        (["3"], "unexpected argument '3': all flags have the form --flag value"),
        (
            ["--steps=3", "--epochs=2"],
            "--steps and --epochs both say when to end: give one of them",
        ),
    ],
)
def test_a_mistake_is_named_with_the_way_out(argv: list[str], message: str) -> None:
    assert problems(*argv) == [message]


def test_all_mistakes_are_named_at_once() -> None:
    assert problems("--epoch=3", "--lr=fast", "--task=dgits") == [
        "unknown flag '--epoch'; did you mean '--epochs'?",
        "--lr 'fast' is no number",
        "--task: unknown task 'dgits'; did you mean 'digits'? (known: digits, chars)",
    ]


def test_a_batch_that_does_not_fit_shows_the_arithmetic() -> None:
    assert problems("--global-batch=64", place=ranks(3)) == [
        "--global-batch 64 does not divide over 3 ranks: 64 = 3 x 21 + 1; "
        "nearest that do: 63 and 66"
    ]
    assert problems("--global-batch=64", "--micro-batch=5", place=ranks(2)) == [
        "--micro-batch 5 does not divide a rank's share of 32 samples "
        "(--global-batch 64 / 2 ranks): 32 = 5 x 6 + 2"
    ]
    assert problems("--global-batch=2", place=ranks(3)) == [
        "--global-batch 2 does not divide over 3 ranks: 2 = 3 x 0 + 2; nearest that do: 3"
    ]


def test_a_strategy_that_does_not_fit_the_ranks_is_refused() -> None:
    (single,) = problems("--strategy=single", place=ranks(2))
    assert single.startswith("--strategy single uses one process, but there are 2: ")
    (ddp,) = problems("--strategy=ddp")
    assert ddp.startswith("--strategy ddp needs a launcher that sets RANK and MASTER_ADDR: ")


def test_strategy_follows_the_number_of_ranks() -> None:
    assert Config().strategy_on(ONE) == "single"
    assert Config().strategy_on(ranks(2)) == "ddp"


def test_epochs_are_rounded_up_to_whole_steps() -> None:
    assert Config(epochs=10, global_batch=64).total_steps(1437) == 225
    assert Config(steps=3).total_steps(1437) == 3
    assert Config().total_steps(64) == 10


def test_environment_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="TRAIN_ATTEMPT='two' is no whole number"):
        Place.from_environ({"TRAIN_ATTEMPT": "two"})
