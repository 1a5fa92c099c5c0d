"""The record `outcome.json`, which a training script may write at its end."""

import re
from typing import NamedTuple

from .files import read

_VALUE = r'"%s": *("(?:[^"\\]|\\.)*"|[^,}]*)'


class Outcome(NamedTuple):
    """What the record says of an attempt; fields that it does not have are empty."""

    status: str = ""
    """`done`, `preempted`, `fatal`, `retryable`, or `running` while steps are made."""

    attempt: str = ""
    step: str = ""
    rank: str = ""
    reason: str = ""


def read_outcome(run_dir: str) -> Outcome:
    """Read the record of a run directory, as far as it can be read.

    The first occurrence of a name counts, whatever surrounds it: the file may be cut.
    """
    text = read(run_dir + "/outcome.json")
    return Outcome(*(_value(text, name) for name in Outcome._fields))


def _value(text: str, name: str) -> str:
    # A value does not go on in the next line.
    found = next(filter(None, (re.search(_VALUE % name, line) for line in text.split("\n"))), None)
    if found is None:
        return ""
    value = found.group(1)
    if value[:1] == '"':
        value = re.sub(r'\\(["\\])', r"\1", value[1:-1])
    return "" if value == "null" else value
