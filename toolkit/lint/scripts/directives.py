"""The `#SBATCH` lines of a script, read as sbatch reads them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.lint.scripts.options import SBATCH, Option, read_options
from toolkit.lint.scripts.values import Argument, Piece

__all__ = ["Directive", "is_batch_script", "read_directives"]

_SUFFIXES = (".sbatch", ".sh", ".slurm", ".job")
_LINE = re.compile(r"#SBATCH(?=\s|$)")


@dataclass(frozen=True, kw_only=True)
class Directive:
    """One `#SBATCH` line."""

    line: int
    options: tuple[Option, ...]
    stray: tuple[str, ...]
    """Words that are no options."""

    late: bool
    """Whether a command stands above, so that sbatch does not read it."""


def is_batch_script(path: str, text: str) -> bool:
    """Whether a file is a batch script, rather than a job file."""
    if path.endswith(_SUFFIXES) or text.startswith("#!"):
        return True
    return re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None


def read_directives(text: str, hidden: range | None = None) -> Iterator[Directive]:
    """Yield the directives in order.

    Args:
        text: The script.
        hidden: Lines that are another script's.
    """
    late = False
    for number, row in enumerate(text.splitlines(), start=1):
        if hidden is not None and number in hidden:
            return
        if _LINE.match(row):
            words = [_argument(word, number) for word in _words(row[len("#SBATCH") :])]
            options, stray = _options(words)
            yield Directive(line=number, options=options, stray=stray, late=late)
        elif row.strip() and not row.lstrip().startswith("#"):
            late = True


def _options(words: list[Argument]) -> tuple[tuple[Option, ...], tuple[str, ...]]:
    collected: list[Option] = []
    stray: list[str] = []
    while words:
        # A hyphen alone is no option either.
        if not words[0].text.startswith("-") or words[0].text == "-":
            stray.append(words.pop(0).text)
            continue
        options, rest = read_options(words, SBATCH)
        collected += options.values()
        words = list(rest)
    return tuple(collected), tuple(stray)


def _argument(word: str, line: int) -> Argument:
    return Argument(pieces=(Piece(text=word, line=line),), line=line)


def _words(row: str) -> Iterator[str]:
    """Split as sbatch does: with quotes, and backslashes in both kinds; `$` is a character."""
    word, begun, quote, escaped = list[str](), False, "", False
    for char in row:
        if escaped:
            word.append(char)
            escaped = False
        elif char == "\\":
            begun = escaped = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word.append(char)
        elif char in "\"'":
            begun, quote = True, char
        elif char.isspace():
            if begun:
                yield "".join(word)
            word, begun = [], False
        elif char == "#" and not begun:
            return
        else:
            word.append(char)
            begun = True
    if begun:
        yield "".join(word)
