"""The configuration file: the flags' names, the flags' checks, and a round trip."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from train.cli import flags
from train.cli.config import Config, ConfigField, fields
from train.cli.flags import parse
from train.errors import UsageError
from train.runtime.rank import RankInfo

ONE = RankInfo()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def read(file: Path, *argv: str, environ: dict[str, str] | None = None) -> Config:
    return parse([f"--config={file}", *argv], environ or {"TRAIN_RUN_DIR": "/runs/x"}, ONE).config


def problems(file: Path, text: str, *argv: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(file, *argv)
    return [line.replace(f"{file}:", "run.toml:") for line in str(caught.value).splitlines()]


def other_value(field: ConfigField) -> Any:
    """A value that is not the default, and that the field may have."""
    if field.name == "task":
        return "chars"
    if field.choices:
        return next(choice for choice in field.choices if choice != field.default)
    return {bool: not field.default, int: 7, float: 1e-05, str: 'a "b" \\ ü', Path: Path("/ä b")}[
        field.kind
    ]


def read_back(config: Config, file: Path) -> Config:
    flags.write_file(file, config)
    values, wrong = flags.read_file(file)
    assert not wrong
    return Config(**values)  # type: ignore[arg-type]


def test_what_is_written_reads_back_field_by_field(file: Path) -> None:
    assert read_back(Config(), file) == Config()
    for field in fields().values():
        config = dataclasses.replace(Config(), **{field.name: other_value(field)})
        assert config != Config()
        assert read_back(config, file) == config, field.name
    everything = Config(**{name: other_value(field) for name, field in fields().items()})
    assert read_back(everything, file) == everything


# Any text that a path or a list of devices may be; a lone surrogate is none.
texts = some.text(some.characters(exclude_categories=["Cs"]), min_size=1)
numbers = some.floats(min_value=0, exclude_min=True, allow_infinity=False)


@given(text=texts, lr=numbers, seed=some.integers(min_value=0))
def test_any_text_and_number_survives(
    tmp_path_factory: pytest.TempPathFactory, text: str, lr: float, seed: int
) -> None:
    config = Config(devices=text, lr=lr, seed=seed)
    assert read_back(config, tmp_path_factory.getbasetemp() / "any.toml") == config


def test_flags_override_the_file(file: Path) -> None:
    file.write_text(
        'task = "chars"\nglobal-batch = 32\nmicro_batch = 4\nlr = 1\ncompile = true\nepochs = 3\n'
        'run-dir = "runs/of the file"\n'
    )
    assert read(file) == Config(
        task="chars",
        global_batch=32,
        micro_batch=4,
        lr=1.0,
        compile=True,
        epochs=3,
        run_dir=Path("runs/of the file"),
    )
    # Steps instead of the file's epochs: they are two words for one thing.
    config = read(file, "--steps=5", "--no-compile", "--global-batch", "8", "--run-dir=y")
    assert config == Config(
        task="chars", global_batch=8, micro_batch=4, lr=1.0, steps=5, run_dir=Path("y")
    )


def test_mistakes_are_named_with_file_and_line_all_at_once(file: Path) -> None:
    text = (
        "# a run\n"
        "globl_batch = 64\n"
        'lr = "fast"\n'
        "\n"
        "seed = -1\n"
        "steps = true\n"
        "compile = 1\n"
        'strategy = "fspd"\n'
        'export = ""\n'
        "micro-batch = 2\n"
        "micro_batch = 2\n"
        "task = 3\n"
        'checkpoint_every = "soon"\n'
        "[mesh]\n"
        "tp = 2\n"
    )
    assert problems(file, text, "--no-such") == [
        "unknown flag '--no-such'",
        "run.toml:2: unknown key 'globl_batch'; did you mean 'global_batch'?",
        'run.toml:3: lr = "fast" is of the wrong type: write a number without quotes',
        "run.toml:5: seed -1 is too small: at least 0",
        "run.toml:6: steps = true is of the wrong type: write a whole number",
        "run.toml:7: compile = 1 is of the wrong type: write true or false",
        "run.toml:8: strategy: unknown strategy 'fspd'; did you mean 'fsdp'? (known: auto, single, "
        "dataparallel, ddp, fsdp, hsdp, manual, pp, tp, cp, hybrid, ps, local-sgd)",
        'run.toml:9: export = "" is empty: leave it out',
        "run.toml:11: micro_batch is given a second time: leave out one of the two",
        'run.toml:12: task = 3 is of the wrong type: write a text in "quotes"',
        'run.toml:13: checkpoint_every = "soon" is of the wrong type: write a whole number without '
        'quotes or "auto"',
        "run.toml:14: unknown key 'mesh'",
    ]


def test_a_file_that_is_none_is_named(file: Path) -> None:
    with pytest.raises(UsageError, match=r"^--config .*run.toml: No such file or directory$"):
        read(file)
    (broken,) = problems(file, "lr = \n")
    assert broken.endswith("run.toml: not TOML: Invalid value (at line 1, column 6)")
    file.write_bytes(b'task = "\xff"')
    with pytest.raises(UsageError, match=r"not UTF-8: invalid start byte at byte 8$"):
        read(file)


def test_a_file_passes_the_checks_that_flags_pass(file: Path) -> None:
    assert problems(file, "steps = 3\nepochs = 2\n") == [
        "--steps and --epochs both say when to end: give one of them"
    ]
    (sizes,) = problems(file, "tp = 2\n")
    assert sizes.startswith("the sizes of the mesh do not fit 1 rank: tp 2 = 2; ")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^cannot write the configuration to .*/file/x.toml: "):
        flags.write_file(tmp_path / "file/x.toml", Config())
    with pytest.raises(UsageError, match=r"is not Unicode$"):
        flags.write_file(tmp_path / "x.toml", Config(devices="\udc80"))
