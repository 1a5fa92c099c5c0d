"""The command line, generated from `Config`: flags, help and checks. No torch: it must be quick."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.cli import compatibility, config_file
from train.cli.config import Config
from train.cli.fields import ConfigField, field_docs, fields, nearest
from train.errors import UsageError
from train.runtime.rank import RankInfo

RUN_DIR = "TRAIN_RUN_DIR"
# Flags that are not fields of `Config`, with their values and meanings.
FILES = {
    "--config": ("PATH", "Read the configuration from this TOML file; flags override it."),
    "--write-config": ("PATH", "Write the whole configuration to this file, and train nothing."),
}
HELP = ("--help", "Show this and exit.")
# Nothing is trained then: there need be no ranks, and no run directory.
ONLY_LOOKING = ("--dry-run", "--write-config")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The result of parsing a command line."""

    config: Config
    """The configuration, of the file and the flags."""
    write_config: Path | None
    """Where to write it instead of training."""

    @property
    def only_looking(self) -> bool:
        """Whether nothing is to be trained."""
        return self.write_config is not None or self.config.dry_run


def only_looks(argv: Sequence[str]) -> bool:
    """Return whether a command line, right or wrong, requests no training."""
    return any(word.partition("=")[0] in ONLY_LOOKING for word in argv)


def usage() -> str:
    """Make the help text from the fields of `Config` and the docstrings under them."""
    lines = [
        "usage: torchrun [torchrun's flags] -m train [flags]",
        "       python -m train --spawn N [flags]  (N processes on this machine)",
        "       python -m train [flags]            (one process)",
        "",
        "Train a model, with checkpoints and automatic resume. Send SIGTERM to stop: the run",
        "writes a checkpoint and exits with 75; start it again with the same flags to go on.",
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
        if inline and field.choices:
            text += f" One of: {', '.join(field.choices)}."
        if inline and field.default is not None and field.kind is not bool:
            text += f" (default: {field.default})"
        yield field, text


def _entry(head: str, text: str) -> list[str]:
    indent = " " * 6
    return [f"  {head}", *textwrap.wrap(text, 92, initial_indent=indent, subsequent_indent=indent)]


def parse(argv: Sequence[str], environ: Mapping[str, str], rank_info: RankInfo) -> Config:
    """Read the command line, and the file that it names.

    Raises:
        UsageError: names every problem, one to a line.
    """
    return read(argv, environ, rank_info).config


def read(argv: Sequence[str], environ: Mapping[str, str], rank_info: RankInfo) -> Request:
    """Read the command line, and the file that it names, and what to do with them.

    Raises:
        UsageError: names every problem, one to a line.
    """
    problems: list[str] = []
    given, texts = _tokens(argv, problems)
    named = {flag: texts.pop(flag, "") for flag in FILES}
    files = {flag: Path(text) for flag, text in named.items() if text}
    values: dict[str, object] = {}
    if "--config" in files:
        values, lines = config_file.read(files["--config"])
        problems += lines
        if {"steps", "epochs"} & {fields_by_flag()[flag].name for flag in texts}:
            # They are two words for one thing, which the command line says anew.
            values = {n: v for n, v in values.items() if n not in ("steps", "epochs")}
    values |= given
    for flag, text in texts.items():
        field = fields_by_flag()[flag]
        # Even if it cannot be read, it has taken the place of the file's.
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
        elif not only_looking:
            problems.append(f"no run directory: give --run-dir DIR or set {RUN_DIR}")
    config = Config(**values)  # type: ignore[arg-type]  # each field's type was seen to
    # What depends on several values is worth checking only when all could be read.
    if not problems:
        problems += compatibility.problems(config, rank_info, only_looking=only_looking)
    if problems:
        raise UsageError("\n".join(problems))
    return Request(config=config, write_config=write_config)


def fields_by_flag() -> dict[str, ConfigField]:
    """Find a field by its flag."""
    return {field.flag: field for field in fields().values()}


def _tokens(argv: Sequence[str], problems: list[str]) -> tuple[dict[str, object], dict[str, str]]:
    """Split a command line in switches, by field, and texts, by flag; of two, the last counts.

    Not argparse: it abbreviates, ends at the first problem, and names no nearest flag.
    """
    by_flag = fields_by_flag()
    switches = {field.flag: (field.name, True) for field in by_flag.values() if field.kind is bool}
    switches |= {
        flag.replace("--", "--no-", 1): (name, False) for flag, (name, _) in switches.items()
    }
    flags = {*by_flag, *switches, *FILES, HELP[0]}
    given: dict[str, object] = {}
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
        elif flag in switches:
            name, value = switches[flag]
            given[name] = value
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
    return given, texts
