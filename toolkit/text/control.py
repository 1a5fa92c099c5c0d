"""Escapes characters that a terminal interprets or hides."""

import re
from collections.abc import Callable

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Terminal control characters, characters that reverse text, break lines or are invisible
(Unicode's categories Cc, Cf, Zl, Zp), and unpaired surrogates. The joiners U+200C and U+200D are
kept: scripts and emoji need them."""

_HARMLESS = re.compile(r"(\x1b\[[0-9;:]{0,32}m|\r)", re.ASCII)
"""Colours, and carriage return."""


def printable(text: str) -> str:
    r"""Return text with control characters as `\xNN`, so that a terminal does not interpret them.

    Line breaks and tabs are kept.

    >>> print(printable("\x1b]0;title\x07 ok"))
    \x1b]0;title\x07 ok
    """
    return text if text.isprintable() else without_control(text, lambda one: ascii(one)[1:-1])


def without_control(text: str, escaped: Callable[[str], str]) -> str:
    """Return text; `escaped` replaces each character that a terminal would interpret or hide."""
    return CONTROL.sub(lambda found: escaped(found[0]), text)


def for_terminal(line: str) -> str:
    """Return a log line for a terminal, with its colours and progress bars.

    Other control characters are escaped as by `printable()`.
    """
    if CONTROL.search(line) is None:
        return line
    parts = _HARMLESS.split(line)
    shown = "".join(part if n % 2 else printable(part) for n, part in enumerate(parts))
    return f"{shown}\x1b[0m" if "\x1b" in shown else shown
