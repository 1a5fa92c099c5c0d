"""The command line, generated from `Config`: flags, help and checks."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from train.config import Config, layout_problems
from train.environment import Place
from train.errors import UsageError
from train.strategies import STRATEGIES
from train.tasks import TASKS

RUN_DIR = "TRAIN_RUN_DIR"
# Smallest value of each number; a field that is not here may be any.
_LEAST = {
    "steps": 1,
    "epochs": 1,
    "global_batch": 1,
    "micro_batch": 1,
    "seed": 0,
    "checkpoint_every": 0,
    "keep_checkpoints": 1,
    "timeout_s": 1,
}


def usage() -> str:
    """Make the help text from the fields of `Config` and the docstrings under them."""
    lines = [
        "usage: torchrun [torchrun's flags] -m train [flags]",
        "       python -m train [flags]            (one process)",
        "",
        "Train a model, with checkpoints and automatic resume. Send SIGTERM to stop: the run",
        "writes a checkpoint and exits with 75; start it again with the same flags to go on.",
        "",
    ]
    docs = field_docs(Config)
    for field in dataclasses.fields(Config):
        kind = _kind(field.name).__name__.replace("Path", "path").upper()
        default = "" if field.default is None else f" (default: {field.default})"
        lines += [f"  {_flag(field.name)} {kind}", f"      {docs[field.name]}{default}"]
    lines += ["  --help", "      Show this and exit."]
    return "\n".join(lines)


def parse(argv: Sequence[str], environ: Mapping[str, str], place: Place) -> Config:
    """Read the command line.

    Raises:
        UsageError: names every problem, one to a line.
    """
    problems: list[str] = []
    texts = _tokens(argv, problems)
    values: dict[str, object] = {}
    for name, text in texts.items():
        try:
            values[name] = _convert(name, text)
        except ValueError as error:
            problems.append(str(error))
    if "run_dir" not in texts:
        if environ.get(RUN_DIR):
            values["run_dir"] = Path(environ[RUN_DIR])
        else:
            problems.append(f"no run directory: give --run-dir DIR or set {RUN_DIR}")
    if "steps" in texts and "epochs" in texts:
        problems.append("--steps and --epochs both say when to end: give one of them")
    # The layout is worth checking only when the numbers themselves could be read.
    config = Config(**values)  # type: ignore[arg-type]  # _convert() makes each field's type
    if texts.keys() <= values.keys():
        problems += layout_problems(config, place)
    if problems:
        raise UsageError("\n".join(problems))
    return config


def nearest(word: str, words: Iterable[str]) -> str:
    """Say which word was probably meant: `; did you mean 'x'?`, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def field_docs(cls: type) -> dict[str, str]:
    """Read the docstring under each field of a class from its source."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs[name] = " ".join(doc.split())
    return docs


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind(name: str) -> type:
    """Type of a field, with `| None` taken off."""
    hint = typing.get_type_hints(Config)[name]
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    kind: type = kinds[0]
    return kind


def _tokens(argv: Sequence[str], problems: list[str]) -> dict[str, str]:
    """Split `--flag value` and `--flag=value`; a flag given twice takes the last value.

    Not argparse: it abbreviates, ends at the first problem, and names no nearest flag.
    """
    flags = {_flag(field.name): field.name for field in dataclasses.fields(Config)}
    texts: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, given, text = word.partition("=")
        if not word.startswith("--"):
            problems.append(f"unexpected argument {word!r}: all flags have the form --flag value")
            continue
        if flag not in flags:
            problems.append(f"unknown flag {flag!r}{nearest(flag, flags)}")
            if not given and words and not words[0].startswith("--"):
                words.pop(0)
            continue
        if not given:
            if not words or words[0].startswith("--"):
                problems.append(f"{flag} needs a value")
                continue
            text = words.pop(0)
        texts[flags[flag]] = text
    return texts


def _convert(name: str, text: str) -> object:
    """Make a field's value from its text.

    Raises:
        ValueError: the message names flag and value.
    """
    flag, kind = _flag(name), _kind(name)
    choices = {"task": list(TASKS), "strategy": ["auto", *STRATEGIES]}.get(name)
    if choices is not None and text not in choices:
        known = ", ".join(choices)
        hint = nearest(text, choices)
        raise ValueError(f"{flag}: unknown {name} {text!r}{hint} (known: {known})")
    if not text:
        raise ValueError(f"{flag} needs a value")
    if kind is int:
        try:
            whole = int(text)
        except ValueError:
            raise ValueError(f"{flag} {text!r} is no whole number") from None
        if whole < _LEAST[name]:
            raise ValueError(f"{flag} {whole} is too small: at least {_LEAST[name]}")
        return whole
    if kind is float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{flag} {text!r} is no number") from None
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{flag} {text} must be a positive, finite number")
        return number
    return kind(text)
