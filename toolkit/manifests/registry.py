"""Where the rules for manifests are kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toolkit.manifests.views import Stream, View
from toolkit.rules import Rule

__all__ = ["CHECKS", "Check", "Fault", "rule"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that a rule has found."""

    at: View
    what: str
    fix: str | None = None
    """The way out, where the rule's own is too general."""


Check = Callable[[Stream], Iterator[Fault]]

CHECKS: dict[str, tuple[Rule, Check]] = {}
"""Every rule for manifests by its id, in the order of the modules."""


def rule(id: str, *, finds: str, reason: str, fix: str) -> Callable[[Check], Check]:
    """Make a function a rule."""

    def keep(check: Check) -> Check:
        assert id not in CHECKS, id
        CHECKS[id] = (Rule(id=id, finds=finds, reason=reason, fix=fix), check)
        return check

    return keep
