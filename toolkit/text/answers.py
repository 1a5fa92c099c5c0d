r"""Extracts the answer of another program from its output.

Prologs, login shells, modules and site-specific wrappers print banners, warnings and colours around
an answer. So an answer is recognised by unique text: columns between the toolkit's separators,
marked values, a known heading. Without such text, the answer is missing, which is not the same as
an empty answer.
"""

import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

SEPARATOR = "|==|"
"""The column separator of a table, for programs that let the caller choose it."""

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[0-Z^-~])|\x0f"
)
"""Colours, titles and other terminal sequences (ECMA-48)."""

_OF_A_PROGRAM = re.compile(
    r"(?:\S*/)?(?:slurm\w*|s(?:batch|queue|acct|acctmgr|control\w*|cancel|info|run)|rsync)"
    r"(?::| error:)"
)
"""The beginning of messages from Slurm's commands and rsync."""


_MOST_BEGINNINGS = 1000
"""Limit of lines tried as the start of a JSON object; each try takes time linear in the text."""


def plain(printed: str) -> str:
    r"""Return text without terminal sequences, and with `\n` line ends.

    >>> plain("\x1b[1;32mok\x1b[0m\r\n7\r\n")
    'ok\n7\n'
    """
    return re.sub(r"\r+\n?", "\n", _ESCAPES.sub("", printed))


def row_format(*fields: str) -> str:
    """Return the format of a row for `table()`, as squeue and sinfo take it.

    >>> row_format("%i", "%T")
    'row|==|%i|==|%T|==|'
    """
    return SEPARATOR.join(["row", *fields, ""])


def table(
    printed: str, header: Sequence[str], *, separator: str = SEPARATOR, folds: bool = False
) -> list[list[str]] | None:
    r"""Return the rows of a table below its header; None without a complete table.

    A row has an ignored first column (a banner without a newline ends there), then the columns of
    the header, each followed by the separator.

    Args:
        printed: The output of a program.
        header: The names of the columns.
        separator: The text between columns.
        folds: Whether the last column may contain newlines.

    >>> table("Hi! row|==|ID|==|\nbye\nrow|==|7|==|\n", ["ID"])
    [['7']]
    >>> table("Welcome\n", ["ID"])
    """
    rows: list[list[str]] | None = None
    lines: list[str] = []  # of a row that has begun
    for line in plain(printed).split("\n"):
        is_whole = line.endswith(separator)
        if not lines:
            count = line.count(separator)
            is_whole = is_whole and count > len(header)
            if not is_whole and not (folds and rows is not None and count >= len(header)):
                continue
        lines.append(line)
        if is_whole:
            text = "\n".join(lines).removesuffix(separator)
            cells, lines = text.split(separator, len(header))[1:], []
            if rows is not None:
                rows.append(cells)
            elif cells == list(header):
                rows = []
    return None if lines else rows


def values(printed: str, name: str) -> list[str]:
    r"""Return each VALUE that `echo "==NAME|VALUE|=="` has printed.

    >>> values("Hi==home|/home/me|==\r\n", "home")
    ['/home/me']
    """
    lines = [line for line in plain(printed).split("\n") if line.endswith("|==")]
    parts = (line.removesuffix("|==").partition(f"=={name}|") for line in lines)
    return [value for _, mark, value in parts if mark]


def settings(printed: str, heading: str) -> dict[str, str]:
    r"""Return the `key = value` lines below a heading; the first line of each key counts.

    >>> settings("a = 1\nConfiguration data as of now\nb   = x y\nb = 2\n", "Configuration data")
    {'b': 'x y'}
    """
    found: dict[str, str] = {}
    for key, value in re.findall(
        r"^(\w+) *= *(.*)$", plain(printed).partition(heading)[2], re.MULTILINE
    ):
        found.setdefault(key, value.strip())
    return found


def json_object(printed: str, key: str) -> dict[str, Any]:
    r"""Return the first JSON object with a key; else an empty one.

    >>> json_object('{"warning": 1}\nHi {"kind": "List"}\nbye\n', "kind")
    {'kind': 'List'}
    """
    text = plain(printed)
    braces = re.finditer(r"^[^{\n]*\{", text, re.MULTILINE)
    for brace in islice(braces, _MOST_BEGINNINGS):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, brace.end() - 1)
        except (ValueError, RecursionError):
            continue
        if key in found:
            return dict(found)
    return {}


def user_of(printed: str) -> str:
    r"""Return the user name from the output of `id`; "" if it has no name.

    >>> user_of("Hi, 7!\nuid=1000(ada) gid=100(users)\n")
    'ada'
    """
    match = re.search(r"uid=\d{1,10}\(([^()\s]{1,256})\) gid=", plain(printed))
    return match[1] if match else ""


def first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return plain(text).strip().partition("\n")[0]


def error_line(text: str) -> str:
    r"""Return the line with the error message: the first from Slurm or rsync, else the first line.

    >>> error_line("Lmod: cuda is loaded\nsqueue: error: Invalid user: x\n")
    'squeue: error: Invalid user: x'
    """
    lines = plain(text).split("\n")
    return next((line.strip() for line in lines if _OF_A_PROGRAM.match(line)), first_line(text))
