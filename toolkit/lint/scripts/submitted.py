"""Nested scripts: here-documents that a script passes to sbatch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.lint.scripts.script import BatchScript

_START = re.compile(r"<<(-?)[ \t]*(\\?)([\"']?)([\w.!-]{1,100})\3")


@dataclass(frozen=True, kw_only=True)
class SubmittedScript:
    """A script in a here-document."""

    text: str
    line: int
    """The first line of the nested script."""

    decided: frozenset[str]
    """The rules that do not apply, because of the outer script's variables or sbatch options."""


def submitted_scripts(script: BatchScript) -> Iterator[SubmittedScript]:
    """Yield the scripts that a script passes to sbatch on standard input."""
    rows = script.text.replace("\r\n", "\n").split("\n")
    for call in script.walk.calls:
        bodies = [redirection for redirection in call.node.redirections if redirection.body]
        if call.name != "sbatch" or len(bodies) != 1 or call.level != "batch":
            continue
        first = bodies[0].body[0].line
        starts = [
            match for row in rows[max(first - 2, 0) : first] for match in _START.finditer(row)
        ]
        if not starts or starts[0][4] != (bodies[0].target.literal or bodies[0].target.shown):
            continue  # one of several here-documents, or an unusual delimiter
        match = starts[0]
        lines = []
        for number in range(first - 1, len(rows)):
            row = rows[number].lstrip("\t") if match[1] else rows[number]
            if row == match[4]:
                break
            lines.append(row)
        text = "\n".join([*lines, ""])
        if not (match[2] or match[3]):
            text = re.sub(r"\\([$`\\])", r"\1", text)  # the outer shell removes these
        decided = set() if match[2] or match[3] else {"directive-variable"}
        if len(call.words) > 1:
            decided |= {"time-missing", "log-truncated"}
        if text.strip():
            yield SubmittedScript(text=text, line=first, decided=frozenset(decided))
