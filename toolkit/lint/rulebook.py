"""The rules of `toolkit check`: what each finds, why it matters, the way out, and its function."""

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
    """Its name, the same in every message and for ever."""

    finds: str
    """The fault that the rule finds."""

    reason: str
    """What happens then."""

    fix: str
    """What to do about it."""


@dataclass(frozen=True)
class Violation(Generic[PlaceT]):
    """Something that a rule has found."""

    at: PlaceT
    """The line of a script, or the value of a manifest."""

    what: str
    fix: str | None = field(default=None, kw_only=True)
    """The way out, where the rule's own is too general."""


_Check = Callable[[SubjectT], Iterator[Violation[PlaceT]]]


class RuleBook(Generic[SubjectT, PlaceT]):
    """The rules for one kind of file, each with the function that finds its violations."""

    def __init__(self) -> None:
        self._checks: list[tuple[Rule, _Check[SubjectT, PlaceT]]] = []

    def order(self, modules: Sequence[ModuleType]) -> tuple[Rule, ...]:
        """Sort the rules by these modules, in any order of imports; return them."""
        names = [module.__name__ for module in modules]
        self._checks.sort(key=lambda row: names.index(row[1].__module__))
        return tuple(rule for rule, _ in self._checks)

    def rule(
        self, id: str, *, finds: str, reason: str, fix: str
    ) -> Callable[[_Check[SubjectT, PlaceT]], _Check[SubjectT, PlaceT]]:
        """Make a function a rule."""

        def register(check: _Check[SubjectT, PlaceT]) -> _Check[SubjectT, PlaceT]:
            self._checks.append((Rule(id=id, finds=finds, reason=reason, fix=fix), check))
            return check

        return register

    def violations(self, subject: SubjectT) -> Iterator[tuple[Rule, Violation[PlaceT]]]:
        """Yield what the rules find, rule by rule."""
        for rule, check in self._checks:
            for violation in check(subject):
                yield rule, violation


SCRIPTS: RuleBook[BatchScript, int] = RuleBook()
"""The rules for batch scripts; a violation stands on a line."""

TRAINING: RuleBook[TrainingScript, int] = RuleBook()
"""The rules for training scripts in Python; a violation stands on a line."""

MANIFESTS: RuleBook[Stream, View] = RuleBook()
"""The rules for Kubernetes manifests; a violation stands at a value."""


def allowed_rules(text: str, comments: Iterable[tuple[int, str]]) -> dict[int, set[str]]:
    """Return which rules a file's comments `# toolkit: allow RULE` take back, by line.

    A comment that stands alone on its line is about the next one.
    """
    rows = text.splitlines()
    rules_by_line: dict[int, set[str]] = {}
    for number, comment in comments:
        if match := _ALLOWED.search(comment):
            alone = rows[number - 1].lstrip().startswith("#")
            names = re.findall(r"[a-z][a-z0-9-]+[a-z]", match[1])
            rules_by_line.setdefault(number + alone, set()).update(names)
    return rules_by_line
