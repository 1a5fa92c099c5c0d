"""Batch scripts held to the rules, all of them at once."""

import re

from toolkit.errors import InputError, Problem
from toolkit.lint.rules import Rule
from toolkit.lint.scripts.registry import RULES
from toolkit.lint.scripts.rules import exit_status, rendezvous, resources, secrets, signals, tasks
from toolkit.lint.scripts.script import BatchScript, read_batch_script
from toolkit.lint.scripts.values import uncovered

__all__ = ["SCRIPT_RULES", "check_script"]

RULES.order((resources, secrets, rendezvous, exit_status, tasks, signals))

SCRIPT_RULES: tuple[Rule, ...] = RULES.rules
"""The rules for batch scripts."""

_ALLOWED = re.compile(r"#.*\btoolkit: *allow +([\w, -]+)")


def check_script(text: str, source: str) -> list[Problem]:
    """Return the problems of a batch script, by line; each fault once.

    A comment `# toolkit: allow RULE` on the line, or alone on the one above, takes a finding back.

    Raises:
        InputError: its bash cannot be read.
    """
    if not text.strip():
        raise InputError([Problem(place=source, message="the file is empty")])
    script = read_batch_script(text, source)
    allowed = _allowed(script)
    problems = []
    for rule, fault in RULES.faults(script):
        if rule.id in allowed.get(fault.line, ()):
            continue
        place = f"{source}:{fault.line}"
        message = f"{uncovered(fault.what)}; {fault.fix or rule.fix}"
        problems.append((fault.line, Problem(place=place, message=message, rule=rule.id)))
    problems.sort(key=lambda entry: entry[0])
    return [problem for _, problem in dict.fromkeys(problems)]


def _allowed(script: BatchScript) -> dict[int, set[str]]:
    """Return which rules are taken back on which lines."""
    rows = script.text.splitlines()
    rules_by_line: dict[int, set[str]] = {}
    for comment in script.comments:
        if match := _ALLOWED.search(comment.text):
            alone = rows[comment.line - 1].lstrip().startswith("#")
            names = set(re.findall(r"[a-z][a-z-]+[a-z]", match[1]))
            rules_by_line.setdefault(comment.line + alone, set()).update(names)
    return rules_by_line
