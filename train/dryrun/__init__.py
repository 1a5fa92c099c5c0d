"""`--dry-run`: rehearse a step of a plan for any number of ranks, in one process."""

from .session import examine, show

__all__ = ["examine", "show"]
