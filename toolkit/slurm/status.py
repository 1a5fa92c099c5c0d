"""Why a job waits, in words, and until when."""

import re
from datetime import datetime

__all__ = ["expected", "in_words"]

_WORDS = {
    "AssocGrp.*|AssocMax.*|Max.*PerAccount": "a limit of your account is reached",
    "BadConstraints": "no node can give what it asks for, so it never starts",
    "BeginTime": "its time to begin has not come",
    "BurstBuffer.*": "waits for the burst buffer",
    "Cleaning": "what its last start left is being cleaned up",
    "Dependency": "waits for other jobs",
    "DependencyNeverSatisfied": "what it waits for has ended otherwise, so it never starts",
    "InvalidAccount|InvalidQOS": "this account or QOS may not be used, so it never starts",
    "JobArrayTaskLimit": "as many points run as may run at once",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; `scontrol release JOB_ID` lets it go",
    "JobHoldMaxRequeue|JobLaunchFailure|.*requeued held": (
        "it could not be started and is held; `scontrol release JOB_ID` tries again"
    ),
    "Licenses": "waits for licences",
    "NodeDown": "a node that it needs is down",
    "PartitionDown|PartitionInactive": "its partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives, so it never starts",
    "PartitionTimeLimit": "it asks for more time than its partition gives, so it never starts",
    "Priority": "others come first",
    "QOSNotAllowed|QOSJobLimit|QOS.*Limit|QOSGrp.*|QOSMax.*": "a limit of the QOS is reached",
    "QOSUsageThreshold|QOSTimeLimit": "the QOS has no time left for it",
    "ReqNodeNotAvail.*": "a node that it needs is down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Resources": "waits for nodes to become free",
}
"""Explanations of reasons of Slurm (squeue manual, JOB REASON CODES) for readers who do not know
Slurm."""

_TABLE = [(re.compile(pattern), words) for pattern, words in _WORDS.items()]


def in_words(reason: str) -> str:
    """Return Slurm's reason with its meaning, where it has one that is not plain.

    >>> in_words("Priority")
    'Priority: others come first'
    >>> in_words("Nodes required for job are DOWN")
    'Nodes required for job are DOWN'
    """
    for pattern, words in _TABLE:
        if pattern.fullmatch(reason):
            return f"{reason}: {words}"
    return reason


def expected(start: str, *, now: datetime | None = None) -> str:
    """Return when a job is expected to start, or "" for a time that is unknown or over.

    >>> expected("2026-11-05T14:05:00", now=datetime(2026, 11, 5, 13, 0))
    'expected to start 14:05'
    >>> expected("2026-11-06T09:00:00", now=datetime(2026, 11, 5, 13, 0))
    'expected to start Nov 6 09:00'
    """
    try:
        at = datetime.fromisoformat(start)
    except ValueError:
        return ""
    now = now or datetime.now()
    if at <= now:
        return ""
    day = "" if at.date() == now.date() else f"{at:%b} {at.day} "
    return f"expected to start {day}{at:%H:%M}"
