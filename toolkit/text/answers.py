r"""What another program has answered, among what else is printed.

Prologs, login shells, modules and a site's own wrappers print banners, warnings and colours around
an answer. So an answer is recognised by what nothing else prints: columns between separators of
ours, marked values, a known heading. Without that, there is no answer, and never an empty one.
"""

import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

SEPARATOR = "|==|"
"""Stands between the columns of a table, where a program lets us choose it."""

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[0-Z^-~])|\x0f"
)
"""Colours, titles and other sequences of terminals (ECMA-48)."""

_OF_A_PROGRAM = re.compile(
    r"(?:\S*/)?(?:slurm\w*|s(?:batch|queue|acct|acctmgr|control\w*|cancel|info|run)|rsync)"
    r"(?::| error:)"
)
"""How messages of Slurm's commands and of rsync begin."""


_MOST_BEGINNINGS = 1000
"""In how many lines a JSON object may begin; each failure takes time in proportion to the text."""


def plain(printed: str) -> str:
    r"""Return text without sequences of terminals, and with plain ends of lines.

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
    r"""Return the rows of a table below its header; None where no whole table is printed.

    A row is a first column, which nobody reads (a banner without a newline ends there), and then
    those of the header, each followed by the separator.

    Args:
        printed: The output of a program.
        header: The names of the columns.
        separator: What stands between columns.
        folds: Whether the last column may hold newlines.

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
    r"""Return what `echo "==NAME|VALUE|=="` has printed, each time.

    >>> values("Hi==home|/home/me|==\r\n", "home")
    ['/home/me']
    """
    lines = [line for line in plain(printed).split("\n") if line.endswith("|==")]
    parts = (line.removesuffix("|==").partition(f"=={name}|") for line in lines)
    return [value for _, mark, value in parts if mark]


def settings(printed: str, heading: str) -> dict[str, str]:
    r"""Return the `key = value` lines below a heading, the first one of each key.

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
    r"""Return the name of the user from what `id` has printed; "" if it has no name.

    >>> user_of("Hi, 7!\nuid=1000(ada) gid=100(users)\n")
    'ada'
    """
    match = re.search(r"uid=\d{1,10}\(([^()\s]{1,256})\) gid=", plain(printed))
    return match[1] if match else ""


def first_line(text: str) -> str:
    """Return the first line that is not empty."""
    return plain(text).strip().partition("\n")[0]


def error_line(text: str) -> str:
    r"""Return the line of an error message: the first of Slurm or rsync, else the first of all.

    >>> error_line("Lmod: cuda is loaded\nsqueue: error: Invalid user: x\n")
    'squeue: error: Invalid user: x'
    """
    lines = plain(text).split("\n")
    return next((line.strip() for line in lines if _OF_A_PROGRAM.match(line)), first_line(text))
