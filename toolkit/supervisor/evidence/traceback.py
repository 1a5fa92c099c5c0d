"""The traceback in a rank's stderr."""

import re
from itertools import takewhile
from typing import List, NamedTuple, Optional, Sequence, Tuple


class Trace(NamedTuple):
    """A traceback in a rank's output."""

    lines: Tuple[str, ...]
    """The traceback, including chained exceptions."""

    message: str
    """Its last line: the exception and its message."""

    rank: Optional[int]
    """The rank, if torch prefixes lines with it, as it does once a process group exists."""

    at_end: bool
    """Whether nothing else follows."""


_PREFIX = re.compile(r"\[rank(\d{1,9})\]: ?")
_START = re.compile(r"Traceback \(most recent call last\):$|Fatal Python error: |  \+ Exception G")
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct")
_FOREIGN = re.compile(
    r"\[rank\d+\]:\[[WIE]|\[[WIE]\d{3,4} |[WIE]\d{4} |Exception ignored in|/\S+\.py:\d+: "
)
"""Lines after a traceback that do not belong to it: logs of C++ and Python at exit."""

_IGNORED = "Exception ignored in"
"""Precedes the traceback of a harmless error, usually at the exit of Python."""

_SYNTAX_ERROR = re.compile(r"(Syntax|Indentation|Tab)Error: ")
_SYNTAX_ERROR_FILE = re.compile(r' +File ".*", line \d+$')

_HEADLINE = "Traceback (most recent call last):"

_DUMP = "object address  : "
_DUMPED = re.compile(r"object repr +: (.*)")
_OF_TEXT = re.compile(r"([\w.]+)\((?:(['\"])(.*)\2)?\)")

_MOST_WORDS = 50
"""Maximum number of lines of an exception message."""


def last_trace(printed: Sequence[str]) -> Optional[Trace]:
    """Return the last traceback of a rank's stderr, with the complete exception message."""
    rank = None
    lines = []
    printed = without_dumps(printed)
    for line in printed:
        match = _PREFIX.match(line)
        if match:
            rank = int(match.group(1))
            line = line[match.end() :]
        lines.append(line)
    starts = [
        number
        for number, line in enumerate(lines)
        if _START.match(line) and not (number and lines[number - 1].startswith(_IGNORED))
    ]
    end = len(lines)
    while starts and _is_cut(lines[starts[-1] : end]):
        end = starts.pop()
    lines, printed = lines[:end], printed[:end]
    if not starts:  # Python reports a syntax error of the script without a headline
        error = next((n for n, line in enumerate(lines) if _SYNTAX_ERROR.match(line)), 0)
        starts = [n for n in range(error) if _SYNTAX_ERROR_FILE.match(lines[n])][-1:]
    if not starts:
        return None
    start = begin = starts[-1]
    for earlier in reversed(starts[:-1]):  # the cause precedes it
        if not any(_CHAINED.match(line) for line in lines[earlier:begin]):
            break
        begin = earlier
    prefixed = _PREFIX.match(printed[start]) is not None
    frames = list(takewhile(lambda line: not line or line[0].isspace(), lines[start + 1 :]))
    lines_of_error: List[str] = []
    for number in range(start + 1 + len(frames), len(lines)):
        other = prefixed and printed[number] and not _PREFIX.match(printed[number])
        if other or _FOREIGN.match(printed[number]) or len(lines_of_error) == _MOST_WORDS:
            break
        lines_of_error.append(lines[number])
    end = start + 1 + len(frames) + len(lines_of_error)
    message = lines[start]
    if lines_of_error and not message.startswith("Fatal"):
        message = lines_of_error[0]
    if lines[start].startswith("  + "):
        message = next((line[4:] for line in frames if re.match(r"  \| \S", line)), message)
    while lines_of_error and not lines_of_error[-1]:
        lines_of_error.pop()
    return Trace(
        lines=tuple([*lines[begin : start + 1], *frames, *lines_of_error]),
        message=message,
        rank=rank,
        at_end=all(not line or _FOREIGN.match(line) for line in printed[end:]),
    )


def without_dumps(printed: Sequence[str]) -> List[str]:
    """Return the lines of stderr with an exception's usual line in place of a dump of its object.

    CPython dumps the object if it cannot use sys.stderr, as when a signal handler raises while
    Python exits or prints an exception; a headline and frames may precede the dump.

    >>> without_dumps(["object address  : 0x7f", "object repr     : OSError('full')"])
    ['Traceback (most recent call last):', 'OSError: full']
    """
    lines: List[str] = []
    outer, in_dump = "", False
    for line in printed:
        before, mark, _ = line.partition(_DUMP)
        if mark:
            lines += [before] if before else []
            lines += [] if (before or outer) == _HEADLINE else [_HEADLINE]
            in_dump = True
            continue
        if in_dump:
            of_repr = _DUMPED.match(line)
            if of_repr:
                of_text = _OF_TEXT.fullmatch(of_repr.group(1))
                exception = of_text.group(1, 3) if of_text else of_repr.groups()
                lines.append(": ".join(filter(None, exception)))
            in_dump = line.startswith("object ")
            if in_dump or line == "lost sys.stderr":
                outer = ""
                continue
        outer = outer if line[:1] in ("", " ") else line
        lines.append(line)
    return lines


def _is_cut(lines: Sequence[str]) -> bool:
    """Whether a traceback is incomplete: the rank was killed while writing it."""
    return lines[0].startswith("Traceback") and all(
        not line or line[0].isspace() for line in lines[1:]
    )
