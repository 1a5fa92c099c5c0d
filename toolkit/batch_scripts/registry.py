"""Where the rules for batch scripts are kept."""

from dataclasses import dataclass

from toolkit.batch_scripts.scripts import BatchScript
from toolkit.rules import RuleBook

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
