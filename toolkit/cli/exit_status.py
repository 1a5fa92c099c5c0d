"""The exit status of each command.

0: done; the runs that were waited for have succeeded. 1: a run has failed, a check has found
something, or the scheduler refused. 2: the user's input cannot be used, or the command line, as
click has it. 130: Ctrl-C. The error classes in toolkit/errors.py carry their status; `main()` in
toolkit/cli/main.py turns every exception into one.
"""

from __future__ import annotations  # naming a type must not import it

import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.checks import Finding
    from toolkit.runs.state import RunStatus

DONE, FAILED, UNUSABLE = 0, 1, 2
INTERRUPTED = 128 + signal.SIGINT  # as shells have it


def of_runs(statuses: Iterable[RunStatus]) -> int:
    """Return the status of `run`, `wait` and `--follow`: whether all runs have succeeded."""
    from toolkit.runs.state import RunState

    return DONE if all(one.state is RunState.SUCCEEDED for one in statuses) else FAILED


def of_findings(findings: Iterable[Finding]) -> int:
    """Return the status of `check`: a finding without a rule is of a file that cannot be used."""
    rules = [finding.rule for finding in findings]
    if None in rules:
        return UNUSABLE
    return FAILED if rules else DONE
