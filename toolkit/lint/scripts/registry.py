"""Where the rules for batch scripts are kept."""

from dataclasses import dataclass

from toolkit.lint.rules import RuleBook
from toolkit.lint.scripts.script import BatchScript

__all__ = ["RULES", "Fault", "rule"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that a rule has found."""

    line: int
    what: str
    fix: str | None = None
    """The way out, where the rule's own is too general."""


RULES: RuleBook[BatchScript, Fault] = RuleBook()
"""Every rule for batch scripts, in the order of the modules."""

rule = RULES.rule
