"""The record `outcome.json`, which a training script may write at its end."""

import re
from typing import NamedTuple

from .files import read

_VALUE = r'"%s": *("(?:[^"\\]|\\.)*"|[^,}]*)'


class Outcome(NamedTuple):
    """The contents of the record; missing fields are empty."""

    status: str = ""
    """`done`, `preempted`, `fatal`, `retryable`, or `running` during training."""

    attempt: str = ""
    step: str = ""
    rank: str = ""
    reason: str = ""


def read_outcome(run_dir: str) -> Outcome:
    """Read the record of a run directory, as far as it can be read.

    The first occurrence of a name counts, in any context: the file may be cut.
    """
    text = read(run_dir + "/outcome.json")
    return Outcome(*(_value(text, name) for name in Outcome._fields))


def _value(text: str, name: str) -> str:
    # A value never continues in the next line.
    found = next(filter(None, (re.search(_VALUE % name, line) for line in text.split("\n"))), None)
    if found is None:
        return ""
    value = found.group(1)
    if value[:1] == '"':
        value = re.sub(r'\\(["\\])', r"\1", value[1:-1])
    return "" if value == "null" else value
