"""Where the rules for manifests are kept."""

from dataclasses import dataclass

from toolkit.lint.rules import RuleBook
from toolkit.text.manifests import Stream, View

__all__ = ["RULES", "Fault", "rule"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that a rule has found."""

    at: View
    what: str
    fix: str | None = None
    """The way out, where the rule's own is too general."""


RULES: RuleBook[Stream, Fault] = RuleBook()
"""Every rule for manifests, in the order of the modules."""

rule = RULES.rule
