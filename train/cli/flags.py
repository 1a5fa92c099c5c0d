"""The command line and the TOML file that it may name, generated from the fields of `Config`.

Both use the same names; the file is one flat table. Without torch, so that an answer is quick.
"""

import json
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..runtime.rank import RankInfo
from . import compatibility
from .config import Config, ConfigField, field_docs, fields, nearest

RUN_DIR = "TRAIN_RUN_DIR"
FILES = {
    "--config": ("PATH", "Read the configuration from this TOML file; flags override it."),
    "--write-config": ("PATH", "Write the whole configuration to this file, and train nothing."),
}
"""Flags that are not fields of `Config`, with their values and meanings."""
HELP = ("--help", "Show this and exit.")
ONLY_LOOKING = ("--dry-run", "--write-config")
"""Flags that prevent training: they need no ranks and no run directory."""
INFERRING = ("--evaluate-only", "--predict", "--verify-only")
"""Flags that at most read a run directory, and never change it."""
_HEAD = "# A configuration of `python -m train`, for its --config; flags override these values."
_MOST_BYTES = 1 << 20
_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The result of parsing a command line."""

    config: Config
    """The configuration from the file and the flags."""
    write_config: Path | None
    """File to write the configuration to, instead of training."""

    @property
    def only_looking(self) -> bool:
        """Whether nothing is to be trained."""
        return self.write_config is not None or self.config.dry_run


def trains(argv: Sequence[str]) -> bool:
    """Whether a command line, right or wrong, requests training."""
    return not any(word.partition("=")[0] in (*ONLY_LOOKING, *INFERRING) for word in argv)


def usage() -> str:
    """Make the help text from the fields of `Config` and the docstrings under them."""
    lines = [
        "usage: torchrun [torchrun's flags] -m train [flags]",
        "       python -m train --spawn N [flags]  (N processes on this machine)",
        "       python -m train [flags]            (one process)",
        "",
        "Train a model, with checkpoints and automatic resume. Send SIGTERM to stop: the run",
        "writes a checkpoint and exits with 75; start it again with the same flags to continue.",
        "With --evaluate-only or --predict, use what a run has trained, and leave its directory",
        "as it is.",
        "",
        "Switches are turned off by --no-NAME. Times are in seconds.",
    ]
    section = ""
    for field, text in documented():
        if field.section != section:
            section = field.section
            lines += ["", f"{section}:"]
        lines += _entry(f"{field.flag} {field.takes}".rstrip(), text)
    lines += ["", "The command line itself:"]
    for flag, (takes, text) in FILES.items():
        lines += _entry(f"{flag} {takes}", text)
    lines += _entry(*HELP)
    return "\n".join(lines)


def documented(*, inline: bool = True) -> Iterator[tuple[ConfigField, str]]:
    """Yield each field with its description; `inline`: and with its choices and its default."""
    docs = field_docs(Config)
    for name, field in fields().items():
        text = docs[name]
        if inline and field.choices and field.kind is str:
            text += f" One of: {', '.join(field.choices)}."
        if inline and field.default is not None and field.kind is not bool:
            text += f" (default: {field.default})"
        yield field, text


def _entry(head: str, text: str) -> list[str]:
    indent = " " * 6
    return [f"  {head}", *textwrap.wrap(text, 92, initial_indent=indent, subsequent_indent=indent)]


def parse(argv: Sequence[str], environ: Mapping[str, str], rank_info: RankInfo) -> Request:
    """Read the command line, and its `--config` file, into a configuration and a request.

    Raises:
        UsageError: lists every problem, one per line.
    """
    problems: list[str] = []
    switches, texts = tokens(argv, problems)
    files = {flag: Path(text) for flag in FILES if (text := texts.pop(flag, ""))}
    values: dict[str, object] = {}
    if "--config" in files:
        values, lines = read_file(files["--config"])
        problems += lines
        if {"steps", "epochs"} & {fields_by_flag()[flag].name for flag in texts}:
            # Both set the length of the run: one on the command line replaces either in the file.
            values = {n: v for n, v in values.items() if n not in ("steps", "epochs")}
    values |= switches
    for flag, text in texts.items():
        field = fields_by_flag()[flag]
        # Even if it cannot be read, it replaces the file's value.
        values.pop(field.name, None)
        try:
            values[field.name] = field.parse(text)
        except ValueError as error:
            problems.append(str(error))
    write_config = files.get("--write-config")
    only_looking = write_config is not None or values.get("dry_run") is True
    if "run_dir" not in values and "--run-dir" not in texts:
        if environ.get(RUN_DIR):
            values["run_dir"] = Path(environ[RUN_DIR])
        elif not only_looking and values.get("verify_only") is not True:
            problems.append(f"no run directory: give --run-dir DIR or set {RUN_DIR}")
    config = Config(**values)  # type: ignore[arg-type]  # each field's type was seen to
    # Checks of several values make sense only when all could be read.
    if not problems:
        problems += compatibility.problems(config, rank_info, only_looking=only_looking)
    if problems:
        raise UsageError("\n".join(problems))
    return Request(config=config, write_config=write_config)


def fields_by_flag() -> dict[str, ConfigField]:
    """Find a field by its flag."""
    return {field.flag: field for field in fields().values()}


def tokens(argv: Sequence[str], problems: list[str]) -> tuple[dict[str, object], dict[str, str]]:
    """Split a command line into switches, by field, and texts, by flag; the last one counts.

    argparse would accept abbreviations, stop at the first problem, and suggest no similar flag.
    """
    by_flag = fields_by_flag()
    by_switch = {flag: (field.name, True) for flag, field in by_flag.items() if field.kind is bool}
    by_switch |= {
        flag.replace("--", "--no-", 1): (name, False) for flag, (name, _) in by_switch.items()
    }
    flags = {*by_flag, *by_switch, *FILES, HELP[0]}
    switches: dict[str, object] = {}
    texts: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, has_text, text = word.partition("=")
        if not word.startswith("--"):
            problems.append(f"unexpected argument {word!r}: all flags have the form --flag value")
        elif flag not in flags:
            problems.append(f"unknown flag {flag!r}{nearest(flag, sorted(flags))}")
            if not has_text and words and not words[0].startswith("--"):
                words.pop(0)
        elif flag in by_switch:
            name, value = by_switch[flag]
            switches[name] = value
            if has_text:
                off = f"--no-{flag.removeprefix('--no-').removeprefix('--')}"
                problems.append(f"{word}: a switch takes no value; to turn it off, {off}")
        elif has_text:
            texts[flag] = text
            if not text and flag in FILES:
                problems.append(f"{flag} needs a value")
        elif not words or words[0].startswith("--"):
            problems.append(f"{flag} needs a value")
        else:
            texts[flag] = words.pop(0)
    return switches, texts


def read_file(path: Path) -> tuple[dict[str, object], list[str]]:
    """Read the fields of a file, and its errors with line numbers."""
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
        if value is None:
            setting = f"# {name} ="
        elif isinstance(value, (bool, int, float)):
            setting = f"{name} = {str(value).lower()}"
        else:
            # JSON strings are valid TOML, except one character that TOML escapes.
            literal = json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
            setting = f"{name} = {literal}"
        lines += ["", f"# {docs[name]}", setting]
    return "\n".join(lines) + "\n"


def write_file(path: Path, config: Config) -> None:
    """Write a file from which `read_file()` makes the same configuration.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(dumps(config), encoding="utf-8")
    except (OSError, UnicodeEncodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{error.object!r} is not Unicode"
        raise UsageError(f"cannot write the configuration to {path}: {why}") from error


def _convert(field: ConfigField, value: object) -> object:
    """Make a field's value from TOML's.

    Raises:
        ValueError: the message is to be written after the key.
    """
    # Not isinstance(): in Python, a bool is also an int.
    if field.kind is float and type(value) is int:
        value = float(value)
    kind = str if field.kind is Path else field.kind
    if type(value) is not kind and value not in field.choices:
        shown = json.dumps(value, default=str, ensure_ascii=False)
        way_out = " without quotes" if type(value) is str else ""
        what = _WORDS.get(kind)
        expected = f"write {what}{way_out}" if what else 'write a text in "quotes"'
        if what:
            expected += "".join(f' or "{word}"' for word in field.choices)
        raise ValueError(f" = {shown} is of the wrong type: {expected}")
    if value == "":
        raise ValueError(' = "" is empty: leave it out')
    if problem := field.problem_of(value):
        raise ValueError(problem)
    return Path(str(value)) if field.kind is Path else value


def _line(text: str, key: str) -> int:
    """Find the line of a key or a table; tomllib does not report lines."""
    pattern = re.compile(rf"^[\s\[]*[\"']?{re.escape(key)}[\"']?\s*[=.\]]", re.MULTILINE)
    match = pattern.search(text)
    if match is None:
        return 1
    start = match.start() + len(match.group()) - len(match.group().lstrip())
    return text.count("\n", 0, start) + 1
