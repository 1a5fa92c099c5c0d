"""`--dry-run`: rehearse a step of a plan for any number of ranks, in one process."""

from train.dryrun.session import examine, show

__all__ = ["examine", "show"]
