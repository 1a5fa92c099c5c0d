"""The configuration as a TOML file: the same names as the flags, in one flat table."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from train.cli.config import Config
from train.cli.fields import ConfigField, field_docs, fields, nearest
from train.errors import UsageError

_HEAD = "# A configuration of `python -m train`, for its --config; flags override what stands here."
_MOST_BYTES = 1 << 20
_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


def read(path: Path) -> tuple[dict[str, object], list[str]]:
    """Read the fields of a file, and its faults, each with its line."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            return {}, [f"--config {path}: more than {_MOST_BYTES} bytes, is that a configuration?"]
        text = content.decode()
        document = tomllib.loads(text)
    except OSError as error:
        return {}, [f"--config {path}: {error.strerror}"]
    except UnicodeDecodeError as error:
        return {}, [f"--config {path}: not UTF-8: {error.reason} at byte {error.start}"]
    except RecursionError:
        return {}, [f"--config {path}: nested too deeply; a configuration is one flat table"]
    except ValueError as error:  # also of a number with thousands of digits
        return {}, [f"--config {path}: not TOML: {error}"]
    values: dict[str, object] = {}
    problems = []
    for key, value in document.items():
        name, where = key.replace("-", "_"), f"{path}:{_line(text, key)}: "
        field = fields().get(name)
        if field is None:
            problems.append(f"{where}unknown key {key!r}{nearest(name, fields())}")
            continue
        if name in values:
            problems.append(f"{where}{key} is given a second time: leave out one of the two")
            continue
        try:
            values[name] = _convert(field, value)
        except ValueError as error:
            problems.append(f"{where}{key}{error}")
    return values, problems


def dumps(config: Config) -> str:
    """Write every field with its description; unset fields are commented out."""
    docs = field_docs(Config)
    lines, section = [_HEAD], ""
    for name, field in fields().items():
        if field.section != section:
            section = field.section
            lines += ["", "", f"# {section.upper()}"]
        value = getattr(config, name)
        setting = f"# {name} =" if value is None else f"{name} = {_literal(value)}"
        lines += ["", f"# {docs[name]}", setting]
    return "\n".join(lines) + "\n"


def write(path: Path, config: Config) -> None:
    """Write a file that `read()` makes the same configuration of.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(dumps(config), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the configuration to {path}: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise UsageError(
            f"cannot write the configuration to {path}: {error.object!r} is not Unicode"
        ) from error


def _convert(field: ConfigField, value: object) -> object:
    """Make a field's value from TOML's.

    Raises:
        ValueError: the message begins where the key ends.
    """
    # Not isinstance: to Python, true is a whole number.
    if field.kind is float and type(value) is int:
        value = float(value)
    wanted = str if field.kind is Path else field.kind
    if type(value) is not wanted:
        shown = json.dumps(value, default=str, ensure_ascii=False)
        way_out = " without quotes" if type(value) is str else ""
        what = _WORDS.get(wanted)
        expected = f"write {what}{way_out}" if what else 'write a text in "quotes"'
        raise ValueError(f" = {shown} is of the wrong type: {expected}")
    if value == "":
        raise ValueError(' = "" is empty: leave it out')
    if problem := field.problem_of(value):
        raise ValueError(problem)
    return Path(str(value)) if field.kind is Path else value


def _literal(value: object) -> str:
    """Write a value as TOML does."""
    if isinstance(value, (bool, int, float)):
        return str(value).lower()
    # JSON's strings are TOML's, but for one character that TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _line(text: str, key: str) -> int:
    """Find the line of a key or a table; TOML's own reader forgets them."""
    pattern = re.compile(rf"^[\s\[]*[\"']?{re.escape(key)}[\"']?\s*[=.\]]", re.MULTILINE)
    match = pattern.search(text)
    if match is None:
        return 1
    start = match.start() + len(match.group()) - len(match.group().lstrip())
    return text.count("\n", 0, start) + 1
