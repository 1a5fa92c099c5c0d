"""What each field of `Config` is, read from its type and the docstring under it.

Flags, help, configuration file and reference page are all made from this.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from train.cli.config import SECTIONS, AtLeast, Config
from train.tasks import problem_of


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One field of `Config`."""

    name: str
    """As Python and the configuration file call it."""
    section: str
    """Title of the section that it stands in."""
    kind: type
    """`bool`, `int`, `float`, `str` or `Path`, whether or not it may be None."""
    choices: tuple[str, ...]
    """What a text may be; empty: anything."""
    least: float | None
    """The smallest value; None: a number must be positive."""
    default: object
    """The value when nothing was given."""

    @property
    def flag(self) -> str:
        """As the command line calls it."""
        return "--" + self.name.replace("_", "-")

    @property
    def takes(self) -> str:
        """What stands behind the flag, in the help: nothing for a switch."""
        names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: ""}
        return "NAME" if self.choices else names[self.kind]

    def parse(self, text: str) -> object:
        """Make the field's value from a text of the command line.

        Raises:
            ValueError: the message names flag and value.
        """
        if not text:
            raise ValueError(f"{self.flag} needs a value")
        try:
            value = self.kind(text)
        except ValueError:
            what = "whole number" if self.kind is int else "number"
            raise ValueError(f"{self.flag} {text!r} is no {what}") from None
        if problem := self.problem_of(value):
            raise ValueError(f"{self.flag}{problem}")
        return value

    def problem_of(self, value: object) -> str | None:
        """Return the fault of a value of the right type; begins where the name ends."""
        if self.name == "task":
            problem = problem_of(str(value))
            return f": {problem}" if problem else None
        if self.choices:
            if value in self.choices:
                return None
            word = self.name.replace("_", " ")
            choices = ", ".join(self.choices)
            return (
                f": unknown {word} {value!r}{nearest(str(value), self.choices)} (known: {choices})"
            )
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if not math.isfinite(value) or (self.least is None and value <= 0):
            return f" {value} must be a positive, finite number"
        if self.least is not None and value < self.least:
            return f" {value} is too small: at least {self.least:g}"
        return None


@cache
def fields() -> dict[str, ConfigField]:
    """Describe the fields of `Config`, by name and in its order."""
    hints = typing.get_type_hints(Config, include_extras=True)
    by_name, section = {}, ""
    for field in dataclasses.fields(Config):
        section = SECTIONS.get(field.name, section)
        kind, choices, least = _read(hints[field.name])
        by_name[field.name] = ConfigField(
            name=field.name,
            section=section,
            kind=kind,
            choices=choices,
            least=least,
            default=field.default,
        )
    return by_name


# What other trainers call it.
SYNONYMS = {
    "learning-rate": "--lr",
    "batch-size": "--global-batch",
    "train-batch-size": "--global-batch",
    "per-device-train-batch-size": "--micro-batch",
    "micro-batch-size": "--micro-batch",
    "output-dir": "--run-dir",
    "max-steps": "--steps",
    "num-train-epochs": "--epochs",
    "max-grad-norm": "--clip-norm",
    "nproc": "--spawn",
}


def nearest(word: str, words: Iterable[str]) -> str:
    """Say which word was probably meant: `; did you mean 'x'?`, or nothing."""
    words = list(words)
    if (synonym := SYNONYMS.get(word.removeprefix("--").replace("_", "-"))) in words:
        return f"; did you mean {synonym!r}?"
    # Without the dashes, which make all flags look alike.
    bare = {word.removeprefix("--"): word for word in words}
    close = difflib.get_close_matches(word.removeprefix("--"), list(bare), n=1)
    return f"; did you mean {bare[close[0]]!r}?" if close else ""


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


def _read(hint: object) -> tuple[type, tuple[str, ...], float | None]:
    """Take a type hint apart: the plain type, its choices, its smallest value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kind, choices, least = _read(arguments[0])
        limits = [limit.least for limit in arguments[1:] if isinstance(limit, AtLeast)]
        return kind, choices, limits[0] if limits else least
    if origin is typing.Literal:
        return str, arguments, None
    if origin is not None:  # X | None
        return _read(next(one for one in arguments if one is not type(None)))
    assert isinstance(hint, type), f"fields are of plain types, not {hint}"
    return hint, (), None
