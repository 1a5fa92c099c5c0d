"""The rules of `toolkit check`: each has a fault, a reason, a fix and a check function."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Generic, TypeVar

from toolkit.lint.scripts.script import BatchScript
from toolkit.lint.training.script import TrainingScript
from toolkit.text.manifests import Stream, View

SubjectT = TypeVar("SubjectT")
PlaceT = TypeVar("PlaceT")

_ALLOWED = re.compile(r"(?:^|\s)#.*\btoolkit: *allow +([\w, -]+)")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule."""

    id: str
    """The rule's name; it never changes."""

    finds: str
    """The fault that the rule finds."""

    reason: str
    """The consequence of the fault."""

    fix: str
    """The fix."""


@dataclass(frozen=True)
class Violation(Generic[PlaceT]):
    """A fault that a rule has found."""

    at: PlaceT
    """The line in a script, or the value in a manifest."""

    what: str
    fix: str | None = field(default=None, kw_only=True)
    """A more specific fix than the rule's."""


_Check = Callable[[SubjectT], Iterator[Violation[PlaceT]]]


class RuleBook(Generic[SubjectT, PlaceT]):
    """The rules for one kind of file, each with its check function."""

    def __init__(self) -> None:
        self._checks: list[tuple[Rule, _Check[SubjectT, PlaceT]]] = []

    def order(self, modules: Sequence[ModuleType]) -> tuple[Rule, ...]:
        """Sort the rules by module, independent of import order, and return them."""
        names = [module.__name__ for module in modules]
        self._checks.sort(key=lambda row: names.index(row[1].__module__))
        return tuple(rule for rule, _ in self._checks)

    def rule(
        self, id: str, *, finds: str, reason: str, fix: str
    ) -> Callable[[_Check[SubjectT, PlaceT]], _Check[SubjectT, PlaceT]]:
        """Register a function as the check of a rule."""

        def register(check: _Check[SubjectT, PlaceT]) -> _Check[SubjectT, PlaceT]:
            self._checks.append((Rule(id=id, finds=finds, reason=reason, fix=fix), check))
            return check

        return register

    def violations(self, subject: SubjectT) -> Iterator[tuple[Rule, Violation[PlaceT]]]:
        """Yield the violations, rule by rule."""
        for rule, check in self._checks:
            for violation in check(subject):
                yield rule, violation


SCRIPTS: RuleBook[BatchScript, int] = RuleBook()
"""The rules for batch scripts; a violation refers to a line."""

TRAINING: RuleBook[TrainingScript, int] = RuleBook()
"""The rules for training scripts in Python; a violation refers to a line."""

MANIFESTS: RuleBook[Stream, View] = RuleBook()
"""The rules for Kubernetes manifests; a violation refers to a value."""


def allowed_rules(text: str, comments: Iterable[tuple[int, str]]) -> dict[int, set[str]]:
    """Return the rules that `# toolkit: allow RULE` comments suppress, by line.

    A comment on a separate line applies to the next line.
    """
    rows = text.splitlines()
    rules_by_line: dict[int, set[str]] = {}
    for number, comment in comments:
        if match := _ALLOWED.search(comment):
            alone = rows[number - 1].lstrip().startswith("#")
            names = re.findall(r"[a-z][a-z0-9-]+[a-z]", match[1])
            rules_by_line.setdefault(number + alone, set()).update(names)
    return rules_by_line
