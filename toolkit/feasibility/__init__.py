"""What cannot work: every reason why a job does not fit a site, with the arithmetic. Pure."""

from toolkit.feasibility.margins import (
    POD_MARGIN_S,
    REQUEUE_MARGIN_S,
    SIGNAL_SLACK_S,
    cpus_of,
    warning_lead_s,
)
from toolkit.feasibility.reasons import refusals

__all__ = [
    "POD_MARGIN_S",
    "REQUEUE_MARGIN_S",
    "SIGNAL_SLACK_S",
    "cpus_of",
    "refusals",
    "warning_lead_s",
]
