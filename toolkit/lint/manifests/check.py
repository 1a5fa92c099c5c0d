"""Manifests held to the rules, all of them at once."""

import re
from collections.abc import Iterable, Iterator

from toolkit.errors import Problem
from toolkit.lint.manifests.registry import RULES, Fault
from toolkit.lint.manifests.rules import (
    environment,
    lifecycle,
    object_names,
    operators,
    rendezvous,
    resources,
    scheduling,
    schema,
    security,
    training,
    volumes,
)
from toolkit.lint.manifests.schema import CRD_RULE, Schemas, schema_faults
from toolkit.lint.rules import Rule
from toolkit.text.manifests import Stream, read_manifests
from toolkit.text.yaml_reader import KeyPath

__all__ = [
    "MANIFEST_RULES",
    "allowed",
    "check_manifests",
    "faults",
    "in_order",
    "problem_of",
]

RULES.order(
    (
        *(schema, volumes, rendezvous, object_names, operators, scheduling),
        *(security, resources, lifecycle, environment, training),
    )
)

MANIFEST_RULES: tuple[Rule, ...] = (*RULES.rules, CRD_RULE)
"""The rules for manifests."""

_ALLOWED = re.compile(r"(^|\s)#.*\btoolkit: *allow +([\w, -]+)")


def check_manifests(
    text: str,
    source: str,
    *,
    pod_security: str | None = None,
    schemas: Schemas | None = None,
) -> list[Problem]:
    """Return the problems of a stream of manifests, by line; each fault once.

    A comment `# toolkit: allow RULE` on the line, or alone on the one above, takes a finding back.

    Args:
        text: YAML, of one document or of several.
        source: The file's name.
        pod_security: The Pod Security level of the namespace, where it is known.
        schemas: Those of the cluster's own kinds.

    Raises:
        InputError: it cannot be read, or a document is not an object.
    """
    stream = read_manifests(text, source, pod_security=pod_security)
    problems = [problem_of(rule, fault, source) for rule, fault in faults(stream, schemas)]
    return in_order(allowed(problems, text))


def faults(stream: Stream, schemas: Schemas | None = None) -> Iterator[tuple[Rule, Fault]]:
    """Yield the faults of all rules; a schema's problem at a place of a rule is left out."""
    reported: set[tuple[int, KeyPath]] = set()
    for rule, fault in RULES.faults(stream):
        reported.add((fault.at.manifest.index, fault.at.path))
        yield rule, fault
    for fault in schema_faults(stream, schemas) if schemas else ():
        if (fault.at.manifest.index, fault.at.path) not in reported:
            yield CRD_RULE, fault


def problem_of(rule: Rule, fault: Fault, source: str) -> Problem:
    """Return a fault with its place and its way out."""
    place = fault.at.manifest.place(fault.at.path)
    return Problem(place=place, message=f"{fault.what}; {fault.fix or rule.fix}", rule=rule.id)


def allowed(problems: Iterable[Problem], text: str) -> list[Problem]:
    """Return those problems that no comment of the text takes back."""
    taken_back = _taken_back(text)
    return [one for one in problems if one.rule not in taken_back.get(_line(one), ())]


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems by line, each once."""
    return sorted(dict.fromkeys(problems), key=_line)


def _line(problem: Problem) -> int:
    match = re.search(r":(\d{1,18})$", problem.place or "")
    return int(match[1]) if match else 0


def _taken_back(text: str) -> dict[int, set[str]]:
    """Return which rules are taken back on which lines."""
    rules_by_line: dict[int, set[str]] = {}
    for number, row in enumerate(text.splitlines(), start=1):
        if match := _ALLOWED.search(row):
            alone = row.lstrip().startswith("#")
            names = set(re.findall(r"[a-z][a-z-]+[a-z]", match[2]))
            rules_by_line.setdefault(number + alone, set()).update(names)
    return rules_by_line
